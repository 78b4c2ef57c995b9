import json
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from heads.files import write_atomically
from train.checkpoints import Checkpoints, Progress
from train.config import ConfigError


@pytest.fixture
def accelerator(fresh_accelerate) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def test_the_newest_is_found_by_number_and_only_the_last_few_are_kept(accelerator: Accelerator, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    for step in (0, 999_999, 1_000_000):
        checkpoints.save(accelerator, Progress(step=step, best=1.5))
    assert checkpoints.newest().name == "step_1000000"
    assert checkpoints.read(checkpoints.newest()) == Progress(step=1_000_000, best=1.5)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_1000000", "step_999999"]


def test_what_a_kill_left_behind_is_not_found_and_is_removed(accelerator: Accelerator, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(accelerator, Progress(step=3))
    half = checkpoints.folder / "step_000006.incomplete"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert checkpoints.newest().name == "step_000003"
    checkpoints.remove_incomplete()
    assert not half.exists()
    assert checkpoints.newest().name == "step_000003"


def test_saving_a_step_again_replaces_only_its_progress(accelerator: Accelerator, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(accelerator, Progress(step=3))
    weights = (checkpoints.newest() / "model.safetensors").stat().st_mtime_ns
    checkpoints.save(accelerator, Progress(step=3, evaluated_step=3, best=2.0))
    assert checkpoints.read(checkpoints.newest()) == Progress(step=3, evaluated_step=3, best=2.0)
    assert (checkpoints.newest() / "model.safetensors").stat().st_mtime_ns == weights


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps("new")))
    assert json.loads(path.read_text()) == "new"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "state.json"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 64], ids=["empty", "overwritten"])
def test_a_damaged_checkpoint_is_named_with_the_way_out(accelerator: Accelerator, tmp_path: Path, name: str, content):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(accelerator, Progress(step=3))
    (tmp_path / "step_000003" / name).write_bytes(content)
    use = checkpoints.read if name == "state.json" else partial(checkpoints.load, accelerator, seed=0)
    with pytest.raises(ConfigError, match=r"(?s)cannot continue from .*step_000003.* delete it"):
        use(checkpoints.newest())


def test_a_disk_that_takes_no_more_is_named_with_the_way_out(accelerator: Accelerator, tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(accelerator, Progress(step=3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 400):  # the weights do not fit, or the optimiser's state does not
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(ConfigError, match=r"run\.dir: .*make room there"):
                checkpoints.save(accelerator, Progress(step=4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.newest().name == "step_000003"
