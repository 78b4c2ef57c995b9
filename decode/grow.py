"""How a drafter's logits become a tree: `StaticTree` and `Chain`, a tree without branches.

A static tree is a list of paths of child ranks, as in Medusa (arXiv:2401.10774, section 2.1.2): (0, 2) is the
third-best token of the second head below the best token of the first. At temperature > 0 ranks are taken from logits
perturbed by the very noise with which the target will choose, so that drafts follow the draw. Drawn drafts (`draw`)
use noise of their own and carry their distribution, for `Rejection` and `Block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, get_args

import torch
from torch import Tensor

from decode.children import Children, Draw, ranked
from decode.limits import check_temperature
from decode.sampling import Sampler
from decode.tree import Draws, TokenTree, TreeShape, tree_shape
from heads import Drafter
from heads.transfer import to_device

Paths = tuple[tuple[int, ...], ...]
LONGEST_CHAIN = 1024


class Grow(Protocol):
    """A policy from logits to trees."""

    @property
    def depth(self) -> int:
        """Deepest node it makes."""
        ...

    @property
    def max_nodes(self) -> int:
        """Most nodes it makes, root included."""
        ...

    @property
    def width(self) -> int:
        """Most children of one node."""
        ...

    def __call__(
        self, drafter: Drafter, logits: Tensor, roots: Tensor, rows: Sequence[Sampler], *, shared_noise: bool
    ) -> list[TokenTree]:
        """Grow one tree for each row.

        Args:
            drafter: Gives the logits of further levels.
            logits: [B, U] of the roots' children.
            roots: [B] root tokens.
            rows: Settings and noise of each row.
            shared_noise: Rank with the noise the target will choose with.
        """
        ...


def check_depth(depth: int, drafter: Drafter) -> None:
    """Refuse a tree that is deeper than a drafter drafts.

    Raises:
        ValueError: If it is.
    """
    if depth > drafter.max_depth:
        raise ValueError(f"the tree is {depth} deep, but the head drafts only {drafter.max_depth} tokens ahead")


@dataclass(frozen=True)
class StaticTree:
    """The same shape in every step."""

    paths: Paths
    """Child ranks from the root; a path's parent and its elder sibling must be in the list too."""
    draw: Draw = "none"
    """Whether children are drawn at temperature > 0, and how; see `Draw`."""
    temperature: float | None = None
    """Of the drafts; None for the target's. 0 ranks by the logits alone."""

    def __post_init__(self) -> None:
        """Sort the paths by depth and reject gaps and settings that there are not."""
        if self.draw not in get_args(Draw):
            raise ValueError(f"draw must be one of {', '.join(get_args(Draw))}, got {self.draw!r}")
        if self.temperature is not None:
            check_temperature("the drafts' temperature", self.temperature)
        paths = tuple(sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path)))
        for path in paths:
            needed = {path[:-1], (*path[:-1], path[-1] - 1) if path and path[-1] else path[:-1]}
            if not path or path[-1] < 0 or not needed <= {(), *paths}:
                raise ValueError(f"tree path {path} needs its parent and its elder sibling in the tree; got {paths}")
        object.__setattr__(self, "paths", paths)

    @property
    def depth(self) -> int:
        """Longest path."""
        return max(map(len, self.paths), default=0)

    @property
    def max_nodes(self) -> int:
        """Nodes, root included."""
        return len(self.paths) + 1

    @property
    def width(self) -> int:
        """Most children of one node."""
        return 1 + max((path[-1] for path in self.paths), default=-1)

    def __call__(
        self, drafter: Drafter, logits: Tensor, roots: Tensor, rows: Sequence[Sampler], *, shared_noise: bool
    ) -> list[TokenTree]:
        """Grow one tree for each row; see `Grow`."""
        check_depth(self.depth, drafter)
        shape, levels = _plan(self.paths, roots.device)
        children = self._children(drafter, rows[0], logits, shared_noise=shared_noise)
        tokens = [roots[:, None]]
        drawing = children is not None and children.draw != "none"
        probs = (
            roots.new_zeros((len(rows), self.max_nodes, drafter.vocab_size), dtype=torch.float64) if drawing else None
        )
        level_logits = logits[:, None]  # [B, W, U], or [B, 1, U] where all nodes of a level share them
        for depth, level in enumerate(levels, start=1):
            if children is None:
                columns = ranked(level_logits, level.width, len(level.counts))
            else:
                columns, law = children.choose(level_logits, level.width, level.counts, rows, depth)
                if probs is not None and law is not None:
                    probs[:, level.frontier] = _over_target(law, drafter)
            nodes = columns[:, level.parents, level.ranks]  # [B, nodes of this level]
            tokens.append(nodes if drafter.vocabulary is None else drafter.vocabulary[nodes])
            if level.inner.numel():
                level_logits = drafter.extend(tokens[-1][:, level.inner], level.inner_parents.expand(len(rows), -1))
        token_ids = torch.cat(tokens, dim=1)
        return [TokenTree(ids, shape, self._draws(shape, probs, b)) for b, ids in enumerate(token_ids)]

    def _children(self, drafter: Drafter, row: Sampler, logits: Tensor, *, shared_noise: bool) -> Children | None:
        """Return how children are chosen at random, or None where they are the best by the logits alone."""
        temperature = row.sampling.temperature if self.temperature is None else self.temperature
        if row.sampling.greedy or temperature == 0 or (self.draw == "none" and not shared_noise):
            return None
        every = torch.arange(logits.shape[-1], device=logits.device)
        columns = every if drafter.vocabulary is None else drafter.vocabulary
        return Children(self.draw, temperature, shared_noise, columns)

    def _draws(self, shape: TreeShape, probs: Tensor | None, row: int) -> Draws | None:
        if probs is None:
            return None
        last = self.draw == "hybrid"
        drawn = (node == shape.children[parent][-1] or not last for node, parent in enumerate(shape.parents) if node)
        return Draws(probs[row], (False, *drawn), replacement=self.draw == "with_replacement")


def Chain(length: int, *, draw: Draw = "none", temperature: float | None = None) -> StaticTree:
    """Return the tree that is a chain of the `length` best (or drawn) tokens; see `StaticTree`.

    Raises:
        ValueError: If `length` is below 1.
    """
    if not 1 <= length <= LONGEST_CHAIN:
        raise ValueError(f"a chain has at least 1 token and at most {LONGEST_CHAIN}, got {length}")
    paths = tuple((0,) * depth for depth in range(1, length + 1))
    return StaticTree(paths, draw=draw, temperature=temperature)


@dataclass(frozen=True)
class _Level:
    """How to make the nodes of one depth; all fields but `width` are index tensors."""

    width: int
    """Ranks needed."""
    counts: Tensor
    """Children of each node of the frontier."""
    frontier: Tensor
    """Tree numbers of the nodes above that have children, in the order of the logits' rows."""
    parents: Tensor
    """For each node of this level its parent's place in the frontier."""
    ranks: Tensor
    inner: Tensor
    """Which nodes of this level have children."""
    inner_parents: Tensor
    """Their parents, in the drafter's numbering (root 0, then every node given to `extend`)."""


@lru_cache(maxsize=256)
def _plan(paths: Paths, device: torch.device) -> tuple[TreeShape, list[_Level]]:
    number = {path: i for i, path in enumerate([(), *paths])}
    shape = tree_shape((-1, *(number[path[:-1]] for path in paths)))
    given: dict[tuple[int, ...], int] = {(): 0}  # drafter numbers
    frontier: list[tuple[int, ...]] = [()]
    levels = []
    for depth in range(1, max(map(len, paths), default=0) + 1):
        nodes = [path for path in paths if len(path) == depth]
        inner = [path for path in nodes if shape.children[number[path]]]
        indices = (
            [len(shape.children[number[path]]) for path in frontier],
            [number[path] for path in frontier],
            [frontier.index(path[:-1]) for path in nodes],
            [path[-1] for path in nodes],
            [nodes.index(path) for path in inner],
            [given[path[:-1]] for path in inner],
        )
        width = max(path[-1] for path in nodes) + 1
        levels.append(_Level(width, *(to_device(index, device, dtype=torch.int64) for index in indices)))
        given |= {path: len(given) + i for i, path in enumerate(inner)}
        frontier = inner
    return shape, levels


def _over_target(law: Tensor, drafter: Drafter) -> Tensor:
    """Spread a distribution over the target's vocabulary: [B, W, U] -> [B, W, V]."""
    if drafter.vocabulary is None:
        return law
    return law.new_zeros((*law.shape[:-1], drafter.vocab_size)).index_copy_(-1, drafter.vocabulary, law)
