"""Token trees: what is proposed to the target in one pass.

Node 0 is the root, the last committed token. Parents come before children, so a path's node numbers ascend.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TreeShape:
    """The shape of a tree; made by `tree_shape`, which returns one object for one shape."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    ancestors: Tensor
    """[N, N] bool on the CPU: whether node j is node i or stands above it."""

    @property
    def size(self) -> int:
        """N."""
        return len(self.parents)

    def prefix(self, depth: int) -> TreeShape:
        """Return the shape without nodes deeper than `depth`; nodes must be in order of depth."""
        return tree_shape(tuple(p for p, d in zip(self.parents, self.depths, strict=True) if d <= depth))


@lru_cache(maxsize=4096)
def tree_shape(parents: tuple[int, ...]) -> TreeShape:
    """Return the shape in which node i hangs below `parents[i]`; the root has parent -1.

    Raises:
        ValueError: If node 0 is not the only root, or a parent does not come before its child.
    """
    if not parents or parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents) if i):
        raise ValueError(f"parents must be -1 for node 0 and an earlier node for every other, got {parents}")
    depths = [0] * len(parents)
    children: list[list[int]] = [[] for _ in parents]
    ancestors = [[node == 0 for node in range(len(parents))]]  # lists: tensor operations on rows cost far more
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
        children[parent].append(node)
        ancestors.append(ancestors[parent].copy())
        ancestors[node][node] = True
    return TreeShape(parents, tuple(depths), tuple(map(tuple, children)), torch.tensor(ancestors))


@lru_cache(maxsize=4096)
def chain_shape(size: int) -> TreeShape:
    """Return the shape of a root with a chain below it, `size` nodes in all."""
    return tree_shape(tuple(range(-1, size - 1)))


@dataclass(frozen=True, eq=False)
class Draws:
    """Which nodes of a tree were drawn at random, and from what."""

    probs: Tensor
    """[N, V]; row n is the distribution that the drawn children of node n were drawn from, in their order."""
    drawn: tuple[bool, ...]
    """For each node, whether it was drawn from its parent's row; the others (ranked, looked up) are point masses."""
    replacement: bool = False
    """Whether drawn siblings are independent; else each draw leaves out the tokens of those before it."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree of proposed tokens."""

    token_ids: Tensor
    """[N] int64; `token_ids[0]` is the root."""
    shape: TreeShape
    draws: Draws | None = None
    """None if no node was drawn."""

    def cut(self, depth: int) -> TokenTree:
        """Return the tree without nodes deeper than `depth`; nodes must be in order of depth."""
        if self.shape.depths[-1] <= depth:
            return self
        shape = self.shape.prefix(depth)
        size, draws = shape.size, self.draws
        if draws is not None:
            draws = Draws(draws.probs[:size], draws.drawn[:size], draws.replacement)
        return TokenTree(self.token_ids[:size], shape, draws)
