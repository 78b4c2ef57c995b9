"""What a launch may say about a step, and what of it is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from train import medusa
from train.command_line import load_config
from train.config import ConfigError, RunConfig
from train.distributed import _agree_with_deepspeed, _check_launch, check_layout

Launch = Callable[..., Path]


@pytest.fixture
def run_config(config_file: Path) -> RunConfig:
    return load_config(medusa.HEADS, ["--config", str(config_file), "--optim.accumulation=2"], "")


def agreed(config: RunConfig, **settings: Any) -> dict[str, Any]:
    """DeepSpeed's settings for two processes."""
    found = {"zero_optimization": {"stage": 2}, **settings}
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=found))
    _agree_with_deepspeed(SimpleNamespace(state=state, num_processes=2, gradient_accumulation_steps=1), config)
    return found


def test_deepspeed_gets_the_numbers_of_the_run(run_config: RunConfig):
    found = agreed(run_config, train_batch_size="auto", gradient_accumulation_steps=1)
    assert found["train_batch_size"] == 4
    assert found["train_micro_batch_size_per_gpu"] == 1
    assert found["gradient_accumulation_steps"] == 2
    assert found["gradient_clipping"] == 1.0
    assert "torch_autocast" not in found
    assert agreed(replace(run_config, precision="bf16"))["torch_autocast"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_batch_size": 8}, r'train_batch_size=8, and the run 4 \(optim\.batch_size\); write "auto"'),
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps=4, and the run 2 \(optim\.accumulation\)"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping=0\.5, and the run 1\.0 \(optim\.max_grad_norm\)"),
        ({"optimizer": {"type": "Adam"}}, r"section 'optimizer'; leave it out"),
        ({"scheduler": {"type": "WarmupLR"}}, r"section 'scheduler'; leave it out"),
        ({"bf16": {"enabled": True}}, r"section 'bf16'; leave it out"),
        ({"zero_optimization": {"stage": 0}}, r"ZeRO stage 0; give 1, 2 or 3"),
    ],
)
def test_a_deepspeed_config_that_contradicts_the_run_is_refused(run_config: RunConfig, settings, message: str):
    with pytest.raises(ConfigError, match=message):
        agreed(run_config, **settings)


def test_a_precision_that_deepspeed_config_turns_off_is_none(run_config: RunConfig):
    agreed(run_config, bf16={"enabled": False}, fp16={"enabled": False})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WORLD_SIZE", "2", r"2 processes were started, and accelerate joined 1; .*ACCELERATE_USE_CPU=true"),
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "3",
            r"with 3 gradient accumulation steps, and optim.accumulation is 1",
        ),
    ],
)
def test_a_launch_that_would_train_something_else_is_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=message):
        launch("--optim.steps=1")


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_an_adapter_is_trained_by_one_process_or_with_ddp_only(run_config: RunConfig, kind: DistributedType):
    launched = SimpleNamespace(distributed_type=kind, num_processes=2, is_fsdp2=True, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match=f"launched as {kind.value}, and medusa2 trains layers inside the target"):
        _check_launch(launched, replace(run_config, head_type="medusa2"))


@pytest.mark.parametrize(
    ("written", "kind", "processes", "message"),
    [
        ("pytorch_model_fsdp_0", DistributedType.NO, 2, r"written by FSDP2, and this is one process or DDP; launch as"),
        ("model", DistributedType.DEEPSPEED, 2, r"written by one process or DDP, and this is DeepSpeed"),
        (
            "pytorch_model",
            DistributedType.DEEPSPEED,
            1,
            r"written by 1 processes, and DeepSpeed cannot continue it with 2",
        ),
    ],
)
def test_a_checkpoint_that_this_launch_cannot_read_is_refused(tmp_path: Path, written, kind, processes, message: str):
    (tmp_path / written).mkdir()
    with pytest.raises(ConfigError, match=message):
        check_layout(SimpleNamespace(distributed_type=kind, num_processes=2), tmp_path, processes)
