"""How a run is spread over processes: one, DDP, FSDP2 or DeepSpeed's ZeRO, with the same step in each.

The loop splits the global batch and divides its loss (`train.loop`). What accelerate or DeepSpeed would split, scale,
clip or accumulate as well is made to agree with the run's config here, or refused. Only the head is spread; the target
is whole in every process.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from heads.base import Head
from train.config import ADAPTING, RunConfig, require

NOT_OURS = ("optimizer", "scheduler", "fp16", "bf16", "amp", "torch_autocast", "data_types")
"""Sections of a DeepSpeed config that would take the place of the run's own settings."""


def start_accelerator(config: RunConfig) -> Accelerator:
    """Return the accelerator of this process, after it has found the others that it was launched with.

    Raises:
        ConfigError: If the launch and the config contradict each other.
    """
    # where only the first process reads weights, the target would be empty in the others
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    deepspeed = _launched_with("DEEPSPEED")
    on_cpu = "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()
    if deepspeed and on_cpu:
        _leave_out_shared_memory()
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" and not deepspeed else "no",
        cpu=on_cpu and not deepspeed,  # else accelerate starts processes that do not know of each other
        log_with=config.run.tracker,
        project_dir=str(config.run.folder),
        step_scheduler_with_optimizer=False,  # else accelerate takes a schedule step for each process
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if deepspeed and on_cpu else None,
    )
    if accelerator.distributed_type == DistributedType.MULTI_CPU and _launched_with("FSDP"):
        _shard_on_cpu(accelerator)
    _check_launch(accelerator, config)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _keep_models_whole()
        _agree_with_deepspeed(accelerator, config)
    return accelerator


def _launched_with(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def _keep_models_whole() -> None:
    """Let transformers forget ZeRO-3: it would spread the weights of every model that it loads."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


def _leave_out_shared_memory() -> None:
    """Have DeepSpeed talk through gloo alone: its own way for CPUs is compiled for a minute before the first run."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _shard_on_cpu(accelerator: Accelerator) -> None:
    """Turn FSDP on where accelerate passes over it without a word, and would start DDP."""
    require(
        not torch.accelerator.is_available(),
        "FSDP2 does not work on the CPUs of a machine with a GPU; unset ACCELERATE_USE_CPU, or launch without FSDP",
    )
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):  # the first is copied to the second now and again
        state.distributed_type = DistributedType.FSDP


def _check_launch(accelerator: Accelerator, config: RunConfig) -> None:
    kind, processes = accelerator.distributed_type, accelerator.num_processes
    known = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
    require(
        kind.value in known and (kind != DistributedType.FSDP or accelerator.is_fsdp2),
        f"launched as {kind.value}; supported are one process, DDP (accelerate launch --multi_gpu), FSDP2 (--use_fsdp "
        "--fsdp_version 2) and DeepSpeed (--use_deepspeed)",
    )
    require(
        config.head_type not in ADAPTING or kind not in (DistributedType.FSDP, DistributedType.DEEPSPEED),
        f"launched as {kind.value}, and {config.head_type} trains layers inside the target, which that would not find "
        "there; launch as one process or with DDP",
    )
    started = int(os.environ.get("WORLD_SIZE", processes))
    require(
        started == processes,
        f"{started} processes were started, and accelerate joined {processes}; on CPUs set ACCELERATE_USE_CPU=true",
    )
    precision = {"float32": "no"}.get(config.precision, config.precision)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    require(
        launched in ("no", precision),
        f"accelerate was launched with mixed precision {launched}, but precision is {config.precision}; set the "
        "precision in the config (--precision=bf16) and leave it out of the launch",
    )
    accumulation = config.optim.accumulation
    require(
        accelerator.gradient_accumulation_steps in (1, accumulation),
        f"accelerate was launched with {accelerator.gradient_accumulation_steps} gradient accumulation steps, and "
        f"optim.accumulation is {accumulation}; set it in the config alone",
    )
    accelerator.gradient_accumulation_steps = 1  # the loop divides the loss
    require(
        config.optim.batch_size % (processes * accumulation) == 0,
        f"optim.batch_size ({config.optim.batch_size}) must be a multiple of processes x optim.accumulation "
        f"({processes} x {accumulation})",
    )


def _agree_with_deepspeed(accelerator: Accelerator, config: RunConfig) -> None:
    """Fill DeepSpeed's settings in from the run's config, or refuse those that contradict it."""
    settings, optim = accelerator.state.deepspeed_plugin.deepspeed_config, config.optim
    stage = settings["zero_optimization"].get("stage")
    require(stage in (1, 2, 3), f"launched with ZeRO stage {stage}; give 1, 2 or 3, or launch without DeepSpeed")
    for section in NOT_OURS:
        require(
            not settings.get(section, {"enabled": False}).get("enabled", True),
            f"the DeepSpeed config has the section {section!r}; leave it out: optim.* and precision are the run's",
        )
    pieces = accelerator.num_processes * optim.accumulation
    wanted: Mapping[str, tuple[float, str]] = {
        "train_batch_size": (optim.batch_size, "optim.batch_size"),
        "train_micro_batch_size_per_gpu": (optim.batch_size // pieces, "optim.batch_size by processes x accumulation"),
        "gradient_accumulation_steps": (optim.accumulation, "optim.accumulation"),
        "gradient_clipping": (optim.max_grad_norm, "optim.max_grad_norm"),
    }
    for key, (value, origin) in wanted.items():
        found = settings.get(key, "auto")
        unset = found == "auto" or (key == "gradient_accumulation_steps" and found == 1)  # accelerate's default
        require(
            unset or found == value,
            f'the DeepSpeed config has {key}={found}, and the run {value} ({origin}); write "auto" there',
        )
        settings[key] = value
    accelerator.gradient_accumulation_steps = optim.accumulation
    settings.setdefault("zero_force_ds_cpu_optimizer", False)  # the optimiser is torch's AdamW, offloaded or not
    if config.precision == "bf16":
        # no module is named whose gradients may be added up in bf16
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}


def is_spread(accelerator: Accelerator) -> bool:
    """Return whether each process holds only a part of the weights between two passes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return int(accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]) == 3
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def prepare(
    accelerator: Accelerator, head: Head, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
) -> tuple[nn.Module, AcceleratedOptimizer, AcceleratedScheduler]:
    """Return head, optimiser and schedule as the launch has them trained."""
    prepared, optimizer, scheduler = accelerator.prepare(head.train(), optimizer, scheduler)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _keep_models_whole()  # `prepare` has set it again
    if accelerator.distributed_type == DistributedType.FSDP:
        # torch makes up moments that are to be saved or loaded and are not there yet with a step, which it counts
        for weight in prepared.parameters():
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
    return prepared, optimizer, scheduler


@contextmanager
def micro_batch(accelerator: Accelerator, head: Any, *, last: bool) -> Iterator[Callable[[Tensor], None]]:
    """Yield what computes the gradients of a loss; processes exchange them with the last micro-batch of a step only."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        head.set_gradient_accumulation_boundary(last)
        yield lambda loss: head.backward(loss, scale_wrt_gas=False)
    elif last:
        yield accelerator.backward
    else:
        with accelerator.no_sync(head):
            yield accelerator.backward


def clip(accelerator: Accelerator, head: Any, max_norm: float) -> float:
    """Scale the gradients down to `max_norm` unless it is 0, and return the norm before, which may be infinite or NaN.

    DeepSpeed does it in its optimiser step, so that step is made here, unless the norm is not finite.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        head.step()
        return float(head.get_global_grad_norm()) if head.was_step_applied() else math.inf
    norm = accelerator.clip_grad_norm_(head.parameters(), max_norm or math.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class WholeHead:
    """The head with all its weights in every process, which decoding and saving need.

    It is the trained head itself, or, where that is spread, a copy that `gather` brings up to date.
    """

    def __init__(self, accelerator: Accelerator, head: Head) -> None:
        self._accelerator, self._trained = accelerator, head
        self.head = head
        if is_spread(accelerator):
            self.head = copy.deepcopy(head, {id(part): part for part in head.borrowed}).eval()

    def gather(self) -> None:
        """Bring the weights up to date; every process calls this."""
        if self.head is self._trained:
            return
        if self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters(list(self._trained.parameters())):
                self.head.load_state_dict(self._trained.state_dict())
        else:
            parts = self._trained.state_dict().items()
            self.head.load_state_dict(
                {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in parts}
            )


def check_layout(accelerator: Accelerator, checkpoint: Path, processes: int) -> None:
    """Refuse to continue from a checkpoint that this launch cannot read.

    Args:
        accelerator: The launch.
        checkpoint: Folder.
        processes: How many processes wrote it.

    Raises:
        ConfigError: If another kind of launch wrote it, or another number of processes with DeepSpeed.
    """
    plain, sharded, zero = "one process or DDP", "FSDP2", "DeepSpeed"
    written = {"pytorch_model_fsdp_0": sharded, "pytorch_model": zero}
    by = next((kind for name, kind in written.items() if (checkpoint / name).is_dir()), plain)
    now = {DistributedType.FSDP: sharded, DistributedType.DEEPSPEED: zero}.get(accelerator.distributed_type, plain)
    way_out = "launch as before, or start another run with --run.name"
    require(by == now, f"{checkpoint} was written by {by}, and this is {now}; {way_out}")
    require(
        now != zero or processes == accelerator.num_processes,
        f"{checkpoint} was written by {processes} processes, and DeepSpeed cannot continue it with "
        f"{accelerator.num_processes}; {way_out}",
    )
