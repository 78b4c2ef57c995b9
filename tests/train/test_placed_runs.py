"""Training on a target whose layers are spread over devices by one process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from train import medusa, plan
from train.command_line import load_config
from train.config import ConfigError
from train.frozen import load_target

Launch = Callable[..., Path]
Read = Callable[[Path], list[dict[str, float]]]
FEW = ("--optim.steps=2", "--optim.schedule=constant", "--eval.num_prompts=1", "--eval.temperatures=[0]")


def test_a_run_learns_what_it_learns_from_a_target_in_one_place(
    launch: Launch, read_metrics: Read, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    whole = launch(*FEW)
    monkeypatch.setattr(plan, "free_memory", lambda: 1)  # which says nothing about several GPUs
    spread = launch(*FEW, "--run.name=spread", "--target.device_map=auto")
    assert "cannot be predicted (the target is spread over several devices or processes)" in capsys.readouterr().out
    for found, expected in zip(read_metrics(spread), read_metrics(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_run_goes_on_wherever_its_target_is(launch: Launch):
    launch(*FEW)
    launch("--optim.steps=3", *FEW[1:], "--target.device_map=balanced")


def test_several_processes_that_would_each_take_all_gpus_are_refused(config_file: Path):
    config = load_config(medusa.HEADS, ["--config", str(config_file), "--target.device_map=auto"], "")
    launched = SimpleNamespace(num_processes=2, distributed_type=DistributedType.MULTI_GPU)
    with pytest.raises(ConfigError, match=r"one process all GPUs, and 2 processes were launched; launch one"):
        load_target(config, launched)
