"""A loss that is not finite stops a run in all processes, with the batch saved."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from data.batches import BatchPlan
from data.features import OnlineFeatures
from decode import Target
from heads import load_head
from heads.base import FeatureBatch
from train.refused import save_batches

Launch = Callable[..., Path]
BAD = 5
"""The sample whose states are spoilt."""


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a state of one sample be infinite, as where a target in float16 overflows."""
    states = OnlineFeatures.batch

    def batch(self: OnlineFeatures, indices: list[int]) -> FeatureBatch:
        made = states(self, indices)
        if BAD in indices:
            row = list(indices).index(BAD)
            made.hidden[row, made.loss_mask[row].nonzero()[0].item()] = math.inf
        return made

    monkeypatch.setattr(OnlineFeatures, "batch", batch)


def test_the_saved_batch_replays_to_the_loss_that_is_not_finite(
    launch: Launch, config_file: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    spoil(monkeypatch)
    plan = BatchPlan(14, 4, seed=0)
    step = next(step for step in range(8) if BAD in plan.indices(step)) + 1
    with pytest.raises(SystemExit, match=rf"step {step}: loss (nan|inf), .*state before it is saved.*\.safetensors"):
        launch("--optim.accumulation=2")
    folder = config_file.parent / "runs" / "tiny"
    path = folder / f"not_finite_step_{step}_process_0.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata()["conversations"] == " ".join(map(str, plan.indices(step - 1)))
    batch = FeatureBatch(**load_file(path))
    head = load_head(folder / "last", Target.from_pretrained(str(target_folder), dtype="float32", device="cpu"))
    assert not head(batch).loss.isfinite()
    row = plan.indices(step - 1).index(BAD)
    others = [other for other in range(4) if other != row]
    healthy = FeatureBatch(*(part[others] for part in (batch.token_ids, batch.loss_mask, batch.hidden)))
    assert head(healthy).loss.isfinite()
    assert (folder / "checkpoints" / f"step_{step - 1:06d}").is_dir()


def test_micro_batches_of_different_lengths_become_one_batch(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)

    def made(rows: int, length: int) -> FeatureBatch:
        tokens = torch.randint(1, 9, (rows, length), generator=generator)
        hidden = torch.randn(rows, length, 3, generator=generator, dtype=torch.bfloat16)
        return FeatureBatch(tokens, tokens > 4, hidden, torch.randn(rows, length, 6, generator=generator))

    batches = [made(2, 5), made(1, 7)]
    save_batches(tmp_path / "batch.safetensors", iter(batches), iter([8, 3, 9]))
    (tmp_path / "other").touch()
    assert (tmp_path / "batch.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    found = FeatureBatch(**load_file(tmp_path / "batch.safetensors"))
    for name, whole in vars(found).items():
        first, second = (vars(batch)[name] for batch in batches)
        assert whole.dtype == first.dtype
        assert torch.equal(whole[:2, :5], first)
        assert not whole[:2, 5:].any()
        assert torch.equal(whole[2:], second)


SPOILT = """
import os, sys
from data.features import OnlineFeatures
from train.medusa import main

states = OnlineFeatures.batch

def batch(self, indices):
    made = states(self, indices)
    if os.environ["RANK"] == "1" and self.spoilt:
        made.hidden[0].fill_(float("nan"))
    OnlineFeatures.spoilt = True  # from the second step on
    return made

OnlineFeatures.spoilt = False
OnlineFeatures.batch = batch
main(sys.argv[1:])
"""


@pytest.mark.timeout(120)
def test_a_loss_that_is_not_finite_in_one_process_stops_all(
    start: Callable[..., "subprocess.Popen[str]"], config_file: Path, tmp_path: Path
):
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    options = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
    process = start(launcher=(*accelerate, *options), script=script, ACCELERATE_USE_CPU="true")
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0
    assert output.count("error: step 2: loss nan") == 2, output
    folder = config_file.parent / "runs" / "tiny"
    for number in (0, 1):
        path = folder / f"not_finite_step_2_process_{number}.safetensors"
        assert f"Its batch is in {path}" in output
        batch = FeatureBatch(**load_file(path))
        assert len(batch.token_ids) == 2
        assert batch.hidden.isnan().any() == (number == 1)
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step_000001"
