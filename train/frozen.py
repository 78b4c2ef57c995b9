"""The target of a run: loaded as its config says, where the launch allows it."""

from __future__ import annotations

from accelerate import Accelerator

from decode import Target
from train.config import ADAPTING, RunConfig, require


def load_target(config: RunConfig, accelerator: Accelerator) -> Target:
    """Load the target of a run.

    Raises:
        ValueError: If it cannot be loaded so.
        OSError: If there is no such model.
    """
    wanted, processes = config.target, accelerator.num_processes
    require(
        wanted.device_map is None or processes == 1,
        f"target.device_map={wanted.device_map} gives one process all GPUs, and {processes} processes were launched; "
        "launch one (accelerate launch --num_processes 1), or leave it out",
    )
    adapting = config.head_type in ADAPTING
    return Target.from_pretrained(
        wanted.name,
        dtype=wanted.dtype,
        device=None if wanted.device_map else accelerator.device,
        pack=not adapting,
        quantize=wanted.quantize,
        device_map=wanted.device_map,
    )
