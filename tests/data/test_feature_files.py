"""The files of a folder of features: what is told apart, and how."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import feature_files
from data.feature_files import MISSING, Contents, FeatureFolder, cut, is_taken, open_folder, write_contents

CONTENTS = Contents(
    target="tiny", fingerprint="f00", target_dtype="float64", dtype="float32", layers=(1, 2), inputs="abc",
    bounds=(0, 2, 3),
)  # fmt: skip


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(5, 4, generator=generator) for name in CONTENTS.names}


@pytest.fixture
def folder(tmp_path: Path) -> FeatureFolder:
    made = FeatureFolder(tmp_path, CONTENTS)
    write_contents(tmp_path, CONTENTS)
    made.write(0, tensors())
    made.write(1, tensors(1))
    return made


def test_what_was_written_is_read_back_to_the_bit(folder: FeatureFolder):
    assert [folder.fault(number, thorough=True) for number in (0, 1)] == [None, None]
    for number in (0, 1):
        file = folder.open(number)
        for name, tensor in tensors(number).items():
            assert torch.equal(file.get_slice(name)[1:4], tensor[1:4])
    assert open_folder(folder.path, CONTENTS).contents == CONTENTS


def test_files_are_cut_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feature_files, "FILE_CONVERSATIONS", 3)
    monkeypatch.setattr(feature_files, "FILE_BYTES", 10)
    assert cut([1] * 7) == (0, 3, 6, 7)
    assert cut([6, 5, 5, 99, 1, 1]) == (0, 1, 3, 4, 6)
    assert cut([99]) == (0, 1)


def test_any_flipped_bit_and_any_cut_is_found(folder: FeatureFolder):
    path = folder.file(0)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(whole), (300,), generator=generator).tolist()
    for place in [*places, 0, 7, 8, len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert folder.fault(0, thorough=True) is not None, place
    for length in (0, 4, 8, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "is damaged" in (folder.fault(0, thorough=True) or ""), length
    path.write_bytes(whole + b"\0")
    assert folder.fault(0, thorough=True) is not None
    path.write_bytes(whole)
    assert folder.fault(0, thorough=True) is None


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "f01"},
        {"target_dtype": "float32"},
        {"dtype": "bfloat16"},
        {"layers": (1, 3)},
        {"inputs": "abd"},
        {"bounds": (0, 1, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_of_other_settings_or_another_place_is_not_used(folder: FeatureFolder, change):
    other = FeatureFolder(folder.path, replace(CONTENTS, **change))
    assert "holds other features" in (other.fault(0, thorough=False) or "")
    with pytest.raises(ValueError, match=r"features_00000.*holds other features.*computes it again"):
        other.open(0)
    assert FeatureFolder(folder.path, replace(CONTENTS, target="another/path")).fault(0, thorough=True) is None


def test_a_file_in_the_place_of_another_is_not_used(folder: FeatureFolder):
    shutil.copy(folder.file(0), folder.file(1))
    assert "holds other features" in (folder.fault(1, thorough=False) or "")


def test_a_missing_file_is_missing(folder: FeatureFolder):
    folder.file(1).unlink()
    assert folder.fault(1, thorough=True) == MISSING
    with pytest.raises(ValueError, match=r"features_00001\.safetensors is missing"):
        folder.open(1)


def test_a_kill_while_writing_leaves_the_old_file(folder: FeatureFolder, monkeypatch: pytest.MonkeyPatch):
    def die(state, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(feature_files, "save_file", die)
    with pytest.raises(KeyboardInterrupt):
        folder.write(0, tensors(7))
    assert folder.fault(0, thorough=True) is None
    assert torch.equal(folder.open(0).get_tensor("hidden"), tensors()["hidden"])


def test_a_full_disk_is_an_error_with_the_way_out(folder: FeatureFolder, monkeypatch: pytest.MonkeyPatch):
    def fail(state, path, metadata):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(feature_files, "save_file", fail)
    with pytest.raises(OSError, match=r"cannot write .*No space left.*make room, and the same command goes on"):
        folder.write(0, tensors())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "f01", "inputs": "other"}, r"\n  target: tiny \(fingerprint f00\) -> tiny \(f01\)\nChoose"),
        ({"inputs": "abd"}, r"\n  conversations: abc -> abd: data\.source"),
        ({"target_dtype": "float32"}, r"\n  target\.dtype, target\.quantize: float64 -> float32\nChoose"),
        ({"dtype": "bfloat16"}, r"data\.feature_dtype\): float32 -> bfloat16\nChoose"),
        ({"layers": (1, 3)}, r"\n  layers: has \[1, 2\], the head reads \[1, 3\]\nChoose .*delete the folder"),
    ],
)
def test_a_folder_of_other_settings_is_refused_with_what_differs(folder: FeatureFolder, change, message: str):
    with pytest.raises(ValueError, match=message):
        open_folder(folder.path, replace(CONTENTS, **change))


@pytest.mark.parametrize("layers", [(), (1,), (2,), (1, 2)])
def test_a_head_that_reads_fewer_layers_is_served(folder: FeatureFolder, layers):
    assert open_folder(folder.path, replace(CONTENTS, layers=layers, bounds=(0, 3))).contents == CONTENTS


def test_a_manifest_that_is_missing_or_damaged_is_an_error(folder: FeatureFolder):
    manifest = folder.path / "manifest.json"
    text = manifest.read_text()
    for damaged in (text.replace("abc", "abd"), text[:50], "[]", "{}", ""):
        manifest.write_text(damaged)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged .*delete"):
            open_folder(folder.path, CONTENTS)
    manifest.write_text(json.dumps({**json.loads(text), "format": 2}))
    with pytest.raises(ValueError, match="has format 2, this version reads 1"):
        open_folder(folder.path, CONTENTS)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        open_folder(folder.path, CONTENTS)
    assert is_taken(folder.path)
