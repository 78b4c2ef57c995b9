"""What numbers were measured on."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch
import transformers

from decode.target import Target


def device_name(target: Target) -> str:
    """Return the name of the target's device; of a CPU, with the threads that torch uses."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


@lru_cache(maxsize=1)  # the file is written when it is read, by all cores
def _cpu_name() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return cpu


def machine(target: Target) -> dict[str, str]:
    """Return what the numbers were measured on."""
    return {
        "device": device_name(target),
        "dtype": target.precision,
        "layers": _layers(target),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _layers(target: Target) -> str:
    """Say how the target's layers are computed."""
    if not target.packed:
        return "plain"
    return "packed" if target.packed.has_products else "compiled"
