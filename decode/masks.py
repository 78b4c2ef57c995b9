"""Which slots a node may attend to: the committed tokens of its row, its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from decode.tree import TreeShape
from heads.growing import level_visible
from heads.transfer import move

ALIGNMENT = 8
"""Entries of a mask that CUDA's memory-efficient attention reads at a time (torch, `preprocess_mask`)."""


def tree_visible(
    shapes: Sequence[TreeShape], lengths: Sequence[int], device: torch.device, *, size: int | None = None
) -> Tensor:
    """Return [B, N, slots] bool for trees written behind `lengths` committed tokens.

    Padding nodes of smaller trees see themselves (a softmax over nothing is NaN) and the committed tokens.

    Args:
        shapes: Of B trees.
        lengths: Committed tokens of each row.
        device: Where the mask goes.
        size: N; by default that of the largest tree.
    """
    size = max(shape.size for shape in shapes) if size is None else size
    ancestors = torch.stack([_padded_ancestors(shape, size) for shape in shapes])
    return level_visible(move(ancestors, device), lengths)


@lru_cache(maxsize=256)
def _padded_ancestors(shape: TreeShape, size: int) -> Tensor:
    mask = torch.eye(size, dtype=torch.bool)
    mask[: shape.size, : shape.size] = shape.ancestors
    return mask


def prefill_visible(start: int, size: int, device: torch.device) -> Tensor:
    """Return [1, size, start + size] bool: causal, for `size` tokens after `start` committed ones."""
    slots = torch.arange(start + size, device=device)
    return (slots <= slots[start:, None])[None]


def slot_positions(lengths: Sequence[int], positions: Tensor, slots: int) -> Tensor:
    """Return the position of what each slot holds: the committed tokens in order, then the tree's nodes.

    Args:
        lengths: Committed tokens of each row.
        positions: [B, M] of the tree's nodes.
        slots: Number of slots.

    Returns:
        [B, slots].
    """
    held = torch.arange(slots, device=positions.device).repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        held[row, length : length + positions.shape[1]] = positions[row]
    return held


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where visible and the lowest finite value elsewhere: [B, N, slots] -> [B, 1, N, slots].

    Additive, because a bool mask is right for sdpa and silently wrong for eager attention. Rows start at multiples of
    `ALIGNMENT`, or CUDA's sdpa would make a copy that does, in every layer.
    """
    slots = visible.shape[-1]
    whole = torch.zeros((*visible.shape[:-1], slots + -slots % ALIGNMENT), dtype=dtype, device=visible.device)
    return whole[..., :slots].masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
