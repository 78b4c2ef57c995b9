"""What a step that was refused, because its loss or gradient is not finite, leaves behind: the batch it was made on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.base import FeatureBatch
from heads.files import write_atomically


def save_batches(path: Path, batches: Iterable[FeatureBatch], conversations: Iterable[int]) -> None:
    """Write micro-batches as one batch, padded on the right; `FeatureBatch(**load_file(path))` gives it back.

    Args:
        path: A safetensors file.
        batches: Micro-batches; each is moved to the CPU before the next is asked for.
        conversations: The number of each row's conversation, which the file's metadata keeps.
    """
    parts = [{name: part.cpu() for name, part in vars(batch).items() if part is not None} for batch in batches]
    longest = max(part["token_ids"].shape[1] for part in parts)
    tensors = {name: torch.cat([_padded(part[name], longest) for part in parts]) for name in parts[0]}
    notes = {"conversations": " ".join(map(str, conversations))}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=notes))


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Return a [B, T, ...] tensor as [B, length, ...], with zeros behind."""
    return torch.cat([tensor, tensor.new_zeros(len(tensor), length - tensor.shape[1], *tensor.shape[2:])], dim=1)
