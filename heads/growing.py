"""Trees that drafters grow level by level: their usual size, who stands above whom, and what sees what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def growing_tree(max_depth: int, num_tokens: int) -> Mapping[str, int]:
    """Return the settings of a small `decode.DynamicTree`, which suits heads that see the tokens drafted above.

    Args:
        max_depth: Depth that the head can draft.
        num_tokens: U, tokens that it can guess.
    """
    return {"depth": min(4, max_depth), "width": min(4, num_tokens), "size": 10}


class GrowingTree:
    """Nodes below the root of B rows, in the order in which they were added; parents count from 1, the root is 0."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.depths = torch.empty(rows, 0, dtype=torch.int64, device=device)
        """[B, M] 1 for the root's children."""
        self.ancestors = torch.empty(rows, 0, 0, dtype=torch.bool, device=device)
        """[B, M, M] whether node j is node i or stands above it."""

    def add(self, parents: Tensor) -> Tensor:
        """Add one level and return what its nodes see of the tree, themselves included: [B, W] -> [B, W, M] bool."""
        rows, width = parents.shape
        row = torch.arange(rows, device=parents.device)[:, None]
        depths = torch.nn.functional.pad(self.depths, (1, 0))[row, parents] + 1
        above = torch.nn.functional.pad(self.ancestors, (0, 0, 1, 0))[row, parents]  # the root is no slot of the tree
        itself = torch.eye(width, dtype=torch.bool, device=parents.device).expand(rows, -1, -1)
        level = torch.cat([above, itself], dim=2)
        self.ancestors = torch.cat([torch.nn.functional.pad(self.ancestors, (0, width)), level], dim=1)
        self.depths = torch.cat([self.depths, depths], dim=1)
        return level

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        index = list(rows)
        self.depths, self.ancestors = self.depths[index], self.ancestors[index]


def level_visible(ancestors: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [B, W, slots] bool for one level of trees that grow behind `lengths` committed tokens.

    Args:
        ancestors: [B, W, M] bool: which of the tree's M nodes each of the level's W nodes sees, itself included.
        lengths: Committed tokens of each row.
    """
    _, width, size = ancestors.shape
    starts = torch.tensor(lengths, device=ancestors.device)[:, None, None]
    nodes = torch.arange(max(lengths) + size, device=ancestors.device) - starts  # [B, 1, slots] what each slot holds
    seen = ancestors.gather(2, nodes.clamp(0, size - 1).expand(-1, width, -1))
    return (nodes < 0) | ((nodes < size) & seen)
