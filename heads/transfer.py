"""Between host and device, with as little waiting as can be.

A GPU works off a queue. Whoever asks for a value, or copies by `torch.tensor(values, device=…)`, waits for its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor on a device.

    Args:
        values: A number, or lists of them.
        device: Where they go.
        dtype: As in `torch.tensor`.
    """
    return move(torch.tensor(values, dtype=dtype), device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; CUDA reads ordinary memory before it returns."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def answers_later(device: torch.device) -> bool:
    """Return whether a question waits for a queue of work: then it is better to compute more and to ask once."""
    return device.type != "cpu"
