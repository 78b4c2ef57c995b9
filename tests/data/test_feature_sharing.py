"""A folder of features that several trainers, and several people, use."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from data.conversations import Encoded
from data.feature_files import FeatureFolder
from data.feature_plan import contents_for, prepare_folder
from data.stored_features import StoredFeatures

SAMPLES = [Encoded(list(range(2, 2 + n)), [False] + [True] * (n - 1)) for n in (5, 9, 4)]
Prepare = Callable[..., StoredFeatures]


@pytest.fixture
def prepare(tiny_target, tmp_path: Path) -> Prepare:
    def prepare(layers: Sequence[int]) -> StoredFeatures:
        wanted = contents_for(tiny_target, SAMPLES, layers, inputs="abc", dtype="target")
        prepare_folder(tiny_target, SAMPLES, tmp_path / "features", wanted)
        return StoredFeatures(tiny_target, SAMPLES, tmp_path / "features", wanted)

    return prepare


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_two_trainers_that_begin_in_one_empty_folder_share_it(prepare: Prepare):
    first = prepare([1])
    second = prepare([])  # another head's, which reads fewer layers; no file is there yet
    first.fill(hide=True)
    second.fill(hide=True)
    assert first.batch([0, 1]).features is not None
    assert second.batch([0, 1]).features is None


def test_one_that_needs_more_layers_than_another_began_with_is_refused_before_any_file(
    prepare: Prepare, tmp_path: Path
):
    first = prepare([])
    manifest = (tmp_path / "features" / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=r"has \[\], the head reads \[1\]\nChoose another data\.feature_dir"):
        prepare([1])
    assert (tmp_path / "features" / "manifest.json").read_bytes() == manifest
    first.fill(hide=True)
    assert first.batch([0, 1]).features is None


def no_place(self: FeatureFolder, number: int | None) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_complete_folder_is_only_read(prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepare([1]).fill(hide=True)
    (tmp_path / "features" / ".lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in [tmp_path / "features", *(tmp_path / "features").iterdir()]}
    monkeypatch.setattr(FeatureFolder, "lock", no_place)
    source = prepare([1])
    source.fill(hide=True)
    assert source.batch([0, 2]).hidden.shape == (2, 5, 32)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list((tmp_path / "features").iterdir())) == len(before) - 1
    source.folder.file(0).unlink()
    with pytest.raises(PermissionError):  # what is missing takes the lock
        prepare([1])


def test_a_lock_that_is_not_to_be_had_is_an_error_with_the_way_out(prepare: Prepare, tmp_path: Path):
    source = prepare([1])
    (tmp_path / "features" / ".lock").unlink()
    (tmp_path / "features" / ".lock").mkdir()
    for use in (lambda: source.fill(hide=True), lambda: prepare([1])):
        with pytest.raises(OSError, match=r"^cannot write to .*features: .*choose another data\.feature_dir$"):
            use()


def test_a_file_that_may_not_be_read_is_an_error_and_not_computed_again(prepare: Prepare, tmp_path: Path):
    source = prepare([1])
    source.folder.file(0).mkdir()  # nor can it be read
    for use in (lambda: source.fill(hide=True), lambda: prepare([1]), lambda: source.batch([0])):
        with pytest.raises(ValueError, match=r"cannot read .*features_00000.*choose another data\.feature_dir"):
            use()
    (tmp_path / "features" / "manifest.json").unlink()
    (tmp_path / "features" / "manifest.json").mkdir()
    with pytest.raises(ValueError, match=r"cannot read .*manifest\.json: .*choose another data\.feature_dir"):
        prepare([1])


def test_files_may_be_read_by_whom_the_umask_allows(prepare: Prepare, tmp_path: Path, umask: int):
    prepare([1]).fill(hide=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "features").iterdir()}
    assert modes == dict.fromkeys(["manifest.json", ".lock", "features_00000.safetensors"], 0o666 & ~umask)
