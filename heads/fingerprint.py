"""A short hash that tells targets apart, the same for float32 and bfloat16 copies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SAMPLES = 64
"""Values of each weight that are hashed, about."""
EXPERTS = re.compile(r"\.(experts|block_sparse_moe)\.")
FEED_FORWARD = re.compile(r"\.(mlp|block_sparse_moe|feed_forward)\.")
"""Of mixtures of experts, files and modules name and fuse these each in its own way."""


def fingerprint(
    vocab_size: int, hidden_size: int, num_layers: int, names: Iterable[str], weight: Callable[[str], Tensor]
) -> str:
    """Hash a model's sizes and a sample of every weight, in mixtures of experts of those outside feed-forward layers.

    Args:
        vocab_size: V.
        hidden_size: D.
        num_layers: Decoder layers.
        names: Names of all parameters; their order does not matter.
        weight: Returns the parameter of a name; no more than one is asked for at a time.
    """
    digest = hashlib.sha256(f"{vocab_size} {hidden_size} {num_layers}".encode())
    names = sorted(names)
    if any(EXPERTS.search(name) for name in names):
        names = [name for name in names if not FEED_FORWARD.search(name)]
    for name in names:
        flat = weight(name).detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLES)].to(torch.bfloat16).cpu()
        digest.update(name.encode() + sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
