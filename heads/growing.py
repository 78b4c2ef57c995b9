"""Trees that drafters grow level by level: their usual size, who stands above whom, and what sees what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heads.transfer import to_device


def growing_tree(max_depth: int, num_tokens: int) -> Mapping[str, int]:
    """Return the settings of a small `decode.DynamicTree`, which suits heads that see the tokens drafted above.

    Args:
        max_depth: Depth that the head can draft.
        num_tokens: U, tokens that it can guess.
    """
    return {"depth": min(4, max_depth), "width": min(4, num_tokens), "size": 10}


class GrowingTree:
    """Nodes below the root of B rows, numbered from 1 in the order in which they are added; the root is 0."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = torch.arange(rows, device=device)[:, None]
        """[B, 1], for indexing by row."""
        self._seen = torch.empty(rows, 1, 0, dtype=torch.bool, device=device)  # [B, 1 + M, M]

    @property
    def depths(self) -> Tensor:
        """[B, M] 1 for the root's children."""
        return self._seen[:, 1:].sum(2)

    def add(self, parents: Tensor) -> Tensor:
        """Add one level and return what its nodes see of the tree, themselves included: [B, W] -> [B, W, M] bool."""
        rows, width = parents.shape
        itself = torch.eye(width, dtype=torch.bool, device=parents.device).expand(rows, -1, -1)
        level = torch.cat([self._seen[self.rows, parents], itself], dim=2)
        self._seen = torch.cat([torch.nn.functional.pad(self._seen, (0, width)), level], dim=1)
        return level

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.rows, self._seen = self.rows[: len(rows)], self._seen[list(rows)]


def level_visible(ancestors: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [B, W, slots] bool for one level of trees that grow behind `lengths` committed tokens.

    Args:
        ancestors: [B, W, M] bool: which of the tree's M nodes each of the level's W nodes sees, itself included.
        lengths: Committed tokens of each row.
    """
    if len(set(lengths)) == 1:
        return torch.nn.functional.pad(ancestors, (lengths[0], 0), value=True)
    _, width, size = ancestors.shape
    starts = to_device(lengths, ancestors.device)[:, None, None]
    nodes = torch.arange(max(lengths) + size, device=ancestors.device) - starts  # [B, 1, slots] what each slot holds
    seen = ancestors.gather(2, nodes.clamp(0, size - 1).expand(-1, width, -1))
    return (nodes < 0) | ((nodes < size) & seen)
