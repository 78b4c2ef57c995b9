"""Training cannot tell features on disk from features made while training, and a kill costs one file at most."""

import logging
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from data import feature_files
from data.conversations import Encoded
from data.feature_files import FeatureFolder
from data.feature_plan import contents_for, prepare_folder
from data.features import OnlineFeatures
from data.stored_features import StoredFeatures
from decode import Target

LENGTHS = [5, 11, 8, 3, 9, 2, 7]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def samples() -> list[Encoded]:
    generator = torch.Generator().manual_seed(0)
    return [
        Encoded(torch.randint(2, 320, (n,), generator=generator).tolist(), [False] + [True] * (n - 1)) for n in LENGTHS
    ]


@pytest.fixture(autouse=True)
def two_conversations_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "FILE_CONVERSATIONS", 2)


def prepare(
    target: Target, samples, path: Path, layers: Sequence[int] = (), *, inputs="abc", dtype="target", say=print
):
    wanted = contents_for(target, samples, layers, inputs=inputs, dtype=dtype)
    prepare_folder(target, samples, path, wanted, say=say)
    return StoredFeatures(target, samples, path, wanted)


def fill(target: Target, samples, path: Path, layers: Sequence[int] = (), **options) -> StoredFeatures:
    source = prepare(target, samples, path, layers, **options)
    source.fill(hide=True)
    return source


def assert_same_batches(source, other) -> None:
    for indices in ([0], [3, 6, 1], [5, 5], range(7)):
        a, b = source.batch(indices), other.batch(indices)
        for name, value in vars(a).items():
            assert (value is None) == (vars(b)[name] is None)
            assert value is None or (torch.equal(value, vars(b)[name]) and value.dtype == vars(b)[name].dtype), name
        assert source.num_tokens(indices) == other.num_tokens(indices)
        assert source.num_supervised(indices) == other.num_supervised(indices)


def die_after(target: Target, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    """Interrupt the process in the pass after so many."""
    encode, left = target.encode_features, iter(range(passes))

    def encode_or_die(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(target, "encode_features", encode_or_die)


def count_passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the length of each conversation that passes through the target."""
    encode, passes = target.encode_features, []
    monkeypatch.setattr(target, "encode_features", lambda *args: passes.append(args[1][0]) or encode(*args))
    return passes


@pytest.mark.parametrize("layers", [(), (1,), (1, 2)])
def test_batches_from_disk_are_those_made_while_training_to_the_bit(tiny_target, samples, tmp_path, layers):
    source = fill(tiny_target, samples, tmp_path / "new" / "folder", layers)
    assert_same_batches(source, OnlineFeatures(tiny_target, samples, 0, layers))
    assert "read from" in source.describe()
    assert "in 4 files, float64" in source.describe()


@pytest.mark.parametrize("layers", [(), (1,), (2,)])
def test_a_folder_serves_heads_that_read_fewer_layers_without_the_target(
    tiny_target, samples, tmp_path, monkeypatch, layers
):
    fill(tiny_target, samples, tmp_path, (1, 2))
    online = OnlineFeatures(tiny_target, samples, 2**20, layers)
    online.batch(range(7))
    passes = count_passes(tiny_target, monkeypatch)
    source = fill(tiny_target, samples, tmp_path, layers)
    assert_same_batches(source, online)
    assert passes == []


def test_a_file_that_a_head_with_fewer_layers_makes_again_has_all_layers(tiny_target, samples, tmp_path):
    folder = fill(tiny_target, samples, tmp_path, (1, 2)).folder
    folder.file(1).unlink()
    fill(tiny_target, samples, tmp_path, (2,))
    assert folder.fault(1, thorough=True) is None
    whole = fill(tiny_target, samples, tmp_path, (1, 2))
    assert_same_batches(whole, OnlineFeatures(tiny_target, samples, 0, (1, 2)))


def test_bfloat16_on_disk_rounds_the_states_and_batches_are_in_the_targets_format(tiny_target, samples, tmp_path):
    source = fill(tiny_target, samples, tmp_path, (1,), dtype="bfloat16")
    online = OnlineFeatures(tiny_target, samples, 0, (1,)).batch(range(7))
    batch = source.batch(range(7))
    assert batch.hidden.dtype == torch.float64
    assert torch.equal(batch.hidden, online.hidden.bfloat16().double())
    assert torch.equal(batch.features, online.features.bfloat16().double())
    assert not torch.equal(batch.hidden, online.hidden)
    whole = fill(tiny_target, samples, tmp_path / "whole", (1,))
    sizes = [sum(file.stat().st_size for file in each.folder.path.glob("*.safetensors")) for each in (source, whole)]
    data = sum(LENGTHS) * 2 * 32
    assert sizes[0] - 2 * data == pytest.approx(sizes[1] - 8 * data, abs=200)  # the headers


@pytest.mark.parametrize("passes", [5, 8, 9, 11])  # five are the estimate's
def test_a_kill_costs_the_file_that_was_being_made(tiny_target, samples, tmp_path, monkeypatch, passes):
    with monkeypatch.context() as patch:
        die_after(tiny_target, patch, passes)
        with pytest.raises(KeyboardInterrupt):
            fill(tiny_target, samples, tmp_path)
    done = (passes - 5) // 2
    folder = FeatureFolder(tmp_path, contents_for(tiny_target, samples, (), inputs="abc", dtype="target"))
    assert [folder.fault(number, thorough=True) is None for number in range(4)] == [n < done for n in range(4)]
    made = count_passes(tiny_target, monkeypatch)
    said: list[str] = []
    source = fill(tiny_target, samples, tmp_path, say=said.append)
    assert made[5:] == LENGTHS[2 * done :]
    assert (f"({done} are there)" in said[0]) == (done > 0)
    assert_same_batches(source, OnlineFeatures(tiny_target, samples, 0))


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_or_foreign_file_is_named_and_made_again(tiny_target, samples, tmp_path, caplog, monkeypatch, damage):
    folder = fill(tiny_target, samples, tmp_path).folder
    path = folder.file(2)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-9])
    elif damage == "flipped":
        content[-9] ^= 4
        path.write_bytes(content)
    else:
        shutil.copy(folder.file(1), path)
    passes = count_passes(tiny_target, monkeypatch)
    with caplog.at_level(logging.WARNING):
        source = fill(tiny_target, samples, tmp_path)
    assert str(path) in caplog.text
    assert "it is computed again" in caplog.text
    assert passes[-2:] == LENGTHS[4:6]
    assert len(passes) == 2 + (0 if damage == "flipped" else 5)  # a flipped bit shows after the estimate
    assert_same_batches(source, OnlineFeatures(tiny_target, samples, 0))


def test_shares_of_several_processes_make_up_the_folder(tiny_target, samples, tmp_path, monkeypatch):
    source = prepare(tiny_target, samples, tmp_path)
    passes = count_passes(tiny_target, monkeypatch)
    source.fill(1, 2, hide=True)
    assert passes == [8, 3, 7]
    source.fill(0, 2, hide=True)
    assert passes == [8, 3, 7, 5, 11, 9, 2]
    assert_same_batches(source, OnlineFeatures(tiny_target, samples, 0))


def test_the_estimate_is_exact_in_bytes_and_leaves_out_what_is_there(tiny_target, samples, tmp_path):
    said: list[str] = []
    source = prepare(tiny_target, samples, tmp_path, (1,), say=said.append)
    token = 2 * 32 * 8
    assert f"{sum(LENGTHS) * token / 2**20:.2f} MiB in 4 files, " in said[0]
    assert f"{16 * token / 2**20:.2f} MiB of memory" in said[0]
    assert "outputs of layers [1]" in said[0]
    assert not list(tmp_path.glob("*.safetensors"))  # said before anything is written
    source.fill(hide=True)
    for number in (0, 3):
        source.folder.file(number).unlink()
    prepare(tiny_target, samples, tmp_path, (1,), say=said.append)
    assert f"{23 * token / 2**20:.2f} MiB in 2 files (2 are there), " in said[1]
    source.fill(hide=True)
    prepare(tiny_target, samples, tmp_path, (1,), say=said.append)
    assert len(said) == 2  # nothing to do


def test_a_full_disk_is_refused_before_anything_is_written_and_what_is_there_counts(
    tiny_target, samples, tmp_path, monkeypatch
):
    token = 32 * 8
    needed = sum(LENGTHS) * token
    enough = needed + needed // 20 + 16 * token  # and a margin
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 0, enough - 1))
    with pytest.raises(ValueError, match=r"free, but the features need .*data\.limit.*bfloat16.*feature_dir") as error:
        prepare(tiny_target, samples, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 0, enough))
    source = prepare(tiny_target, samples, tmp_path)
    source.fill(0, 2, hide=True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 0, enough // 2 + 9 * token))
    fill(tiny_target, samples, tmp_path)  # the other half fits


def test_another_format_may_follow_a_refusal_in_the_same_folder(tiny_target, samples, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 0, 1000))
        with pytest.raises(ValueError, match="free, but the features need"):
            prepare(tiny_target, samples, tmp_path)
    fill(tiny_target, samples, tmp_path, dtype="bfloat16")
    with pytest.raises(ValueError, match="bfloat16 -> float64"):
        prepare(tiny_target, samples, tmp_path)


def test_a_folder_of_other_data_or_too_few_layers_is_refused_and_not_touched(tiny_target, samples, tmp_path):
    fill(tiny_target, samples, tmp_path, (1,))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"conversations: abc -> abd"):
        prepare(tiny_target, samples, tmp_path, inputs="abd")
    with pytest.raises(
        ValueError, match=r"has \[1\], the head reads \[1, 2\]\nChoose another data.feature_dir, delete"
    ):
        prepare(tiny_target, samples, tmp_path, (1, 2))
    with pytest.raises(ValueError, match="from 1 to 2"):
        prepare(tiny_target, samples, tmp_path, (3,))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_target_is_refused(tiny_target, samples, tmp_path, make_tiny_llama):
    fill(tiny_target, samples, tmp_path)
    other = Target(make_tiny_llama(seed=1), name="other")
    with pytest.raises(ValueError, match=r"target: tiny \(fingerprint .* -> other \("):
        prepare(other, samples, tmp_path)


def test_reading_before_it_is_filled_is_an_error(tiny_target, samples, tmp_path):
    with pytest.raises(ValueError, match=r"features_00001\.safetensors is missing"):
        prepare(tiny_target, samples, tmp_path).batch([0 + 2])
    wanted = contents_for(tiny_target, samples, (), inputs="abc", dtype="target")
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        StoredFeatures(tiny_target, samples, tmp_path / "nowhere", wanted)


def test_a_place_that_cannot_be_written_is_refused(tiny_target, samples, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to .*file/sub.*choose another data\.feature_dir"):
        prepare(tiny_target, samples, tmp_path / "file" / "sub")


def test_a_file_that_another_process_is_making_is_waited_for(tiny_target, samples, tmp_path):
    source = prepare(tiny_target, samples, tmp_path)
    script = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'ab')\nfcntl.lockf(file, fcntl.LOCK_EX, 1, 1)\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        source.fill(1, 2, hide=True)  # these are free
        rest = threading.Thread(target=source.fill, args=(0, 2), kwargs={"hide": True})
        rest.start()
        rest.join(0.3)
        assert rest.is_alive()
        assert not source.folder.file(0).exists()
        other.kill()
        rest.join(20)
    assert_same_batches(source, OnlineFeatures(tiny_target, samples, 0))
