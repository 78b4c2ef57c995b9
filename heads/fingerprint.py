"""A short hash that tells targets apart, the same for float32, bfloat16 and quantized copies; what heads record."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from heads.base import Lender

logger = logging.getLogger(__name__)

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


def describe_target(target: Lender) -> dict[str, str]:
    """Return what a head folder records of the target that its head was trained for."""
    known = {"name": target.name, "fingerprint": target.fingerprint}
    return known if target.quantize is None else {**known, "quantize": target.quantize}


def check_target_of(
    folder: Path, trained: Mapping[str, str], hidden_size: int, vocab_size: int, target: Lender, check_target: bool
) -> None:
    """Refuse a head on a target that it was not trained for; say so where only the rounding of the weights differs.

    Args:
        folder: Of the head.
        trained: What it records; see `describe_target`.
        hidden_size: D of the head.
        vocab_size: V of the head.
        target: The target that it is loaded for.
        check_target: Whether its weights must be those.

    Raises:
        ValueError: If sizes differ, or weights that must not.
    """
    vocab, hidden = target.lm_head.get_parameter("weight").shape
    if (hidden_size, vocab_size) != (hidden, vocab):
        raise ValueError(
            f"head {folder} was trained for {trained['name']} (hidden size {hidden_size}, vocabulary {vocab_size}), "
            f"but the target {target.name} has {hidden} and {vocab}; load the head with its own target"
        )
    if check_target and trained["fingerprint"] != target.fingerprint:
        raise ValueError(
            f"head {folder} was trained for {trained['name']} (fingerprint {trained['fingerprint']}), but the target "
            f"{target.name} has other weights (fingerprint {target.fingerprint}); load the head with its own target, "
            "or, for the same weights in another precision, pass check_target=False"
        )
    before, now = trained.get("quantize"), target.quantize
    if before != now:
        logger.warning(
            "head %s was trained on states of %s, and the target's weights are %s here: texts stay plain decoding's, "
            "but drafts may be accepted less often; measure it with python -m decode.bench",
            folder,
            f"{trained['name']} in {before}" if before else f"{trained['name']}, not quantized",
            f"in {now}" if now else "not quantized",
        )
