"""EAGLE-2's draft tree: in every step the shape that the drafter's own probabilities ask for.

Li et al. 2024 (arXiv:2406.16858, section 4). The value of a node is the logarithm of the probability that the drafter
gives to its whole path: EAGLE's drafters are calibrated well enough that this estimates how often the target takes it.
Level by level the best nodes are expanded, and at the end the best of all candidates are the tree. A child is never
worth more than its parent, so the best nodes are a tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode import noise
from decode.grow import check_depth
from decode.limits import check_temperature
from decode.sampling import Sampler
from decode.tree import TokenTree, tree_shape
from heads import Drafter

_DROPPED, _ORPHAN = -2, -1
"""In place of a parent: no node at all; a node whose parent is not in the tree, which cannot be."""


@dataclass(frozen=True)
class DynamicTree:
    """Each step and row gets the tree of its most probable paths.

    Where rows share the target's noise (temperature T > 0, rule `Match`), children are ranked and valued by
    `log_softmax(logits + T * G)`, G being the very noise the target will choose with at their position. At T = 0 that
    is `log_softmax(logits)`: sampling continues greedy decoding. Other rules get `log_softmax(logits)`, and children
    that are ranked, not drawn: point masses. Tokens of probability 0 are never drafted.
    """

    depth: int
    """Deepest node it may make."""
    width: int
    """Nodes expanded at each level, and candidates among the children of each. 1 makes chains."""
    size: int
    """Most nodes it makes, root included."""
    confidence: float = 0.0
    """A node whose path is less probable than this is neither kept nor expanded, and drafting ends when no row has
    another: chains and trees grow as far as the drafter is sure. That may be nowhere: with the root alone a step is a
    plain one, the cheapest where the drafter knows nothing."""
    temperature: float | None = None
    """Of the shared noise; None for the target's. 0 ranks by the logits alone."""

    def __post_init__(self) -> None:
        """Reject settings that make no tree."""
        for name in ("depth", "width", "size"):
            value = vars(self)[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"a dynamic tree's {name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.confidence, int | float) or not 0 <= self.confidence <= 1:
            raise ValueError(
                "a dynamic tree's confidence is a probability between 0 (keep all) and 1, got " + repr(self.confidence)
            )
        if self.temperature is not None:
            check_temperature("the drafts' temperature", self.temperature)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> DynamicTree:
        """Return the tree that a head's folder describes.

        Raises:
            ValueError: If a field is unknown, missing or impossible.
        """
        known = [entry.name for entry in fields(cls)]
        needed = [entry.name for entry in fields(cls) if entry.default is MISSING]
        if not set(needed) <= set(settings) <= set(known):
            raise ValueError(
                f"a dynamic tree needs {', '.join(needed)} and knows {', '.join(known)}, got {dict(settings)}; "
                "correct `tree` in the head's config.json"
            )
        return cls(**settings)

    @property
    def max_nodes(self) -> int:
        """`size`, or what depth and width can fill if that is less."""
        return min(self.size, 1 + self.width + (self.depth - 1) * self.width**2)

    def __call__(
        self, drafter: Drafter, logits: Tensor, roots: Tensor, rows: Sequence[Sampler], *, shared_noise: bool
    ) -> list[TokenTree]:
        """Grow one tree for each row; see `Grow`."""
        check_depth(self.depth, drafter)
        temperature = rows[0].sampling.temperature if self.temperature is None else self.temperature
        if rows[0].sampling.greedy or not shared_noise:
            temperature = 0.0
        root = torch.zeros_like(roots)[:, None]
        frontier = _Frontier(root.float(), root, root)
        level_logits = logits[:, None]  # [B, W, U], or [B, 1, U] where all nodes of a level share them
        levels: list[_Level] = []
        candidates, given = 0, 1  # numbers used up so far
        for depth in range(1, self.depth + 1):
            scores = _with_noise(level_logits, drafter, rows, depth, temperature)
            level = self._candidates(frontier, scores, drafter.vocabulary)
            levels.append(level)
            best = self._best(level, depth)
            if best.shape[1] == 0:
                break
            level_logits = drafter.extend(level.tokens.gather(1, best), level.given.gather(1, best))
            added = torch.arange(given, given + best.shape[1], device=roots.device).expand_as(best)
            frontier = _Frontier(level.values.gather(1, best), candidates + 1 + best, added)
            candidates, given = candidates + level.values.shape[1], given + best.shape[1]
        return _best_trees(levels, roots, self.size)

    def _candidates(self, frontier: _Frontier, scores: Tensor, vocabulary: Tensor | None) -> _Level:
        """Return the best children of all frontier nodes, those of the first node first, each node's best first."""
        columns = scores.topk(min(self.width, scores.shape[-1]), dim=-1).indices
        # rounding may leave a little above 0, and a child must not be worth more than its parent
        log_probs = scores.log_softmax(-1).gather(-1, columns).float().clamp(max=0.0)
        values = frontier.values[..., None] + log_probs  # [B, W, k]
        unsure = values.isnan() | (values.exp() < self.confidence)  # NaN: a row of logits that are all -inf
        values = values.masked_fill(unsure, -torch.inf)
        tokens = columns if vocabulary is None else vocabulary[columns]
        of_each = values.shape
        return _Level(
            values.flatten(1),
            tokens.expand(of_each).flatten(1),
            frontier.numbers[..., None].expand(of_each).flatten(1),
            frontier.given[..., None].expand(of_each).flatten(1),
        )

    def _best(self, level: _Level, depth: int) -> Tensor:
        """Return the candidates to expand, best first: [B, C] -> [B, W], where W is 0 at the end of all trees.

        Rows with fewer that are worth it carry others along, whose values, as all their descendants', are -inf.
        """
        if depth == self.depth:
            return level.tokens[:, :0]
        # a child is chosen only after the root, the `depth` nodes above it and all those here better than its parent
        count = max(0, min(self.width, self.size - 1 - depth))
        if count and self.confidence > 0:
            count = min(count, int(level.values.isfinite().sum(1).max()))
        return _order(level.values)[:, :count]


class _Frontier(NamedTuple):
    """The nodes whose children are looked for, [B, W] each."""

    values: Tensor
    numbers: Tensor
    """Among all candidates, from 1 on; the root is 0."""
    given: Tensor
    """In the drafter's numbering."""


class _Level(NamedTuple):
    """The candidates of one depth, [B, C] each; those that are out of the question have value -inf."""

    values: Tensor
    tokens: Tensor
    parents: Tensor
    """Their numbers among all candidates; the root is 0."""
    given: Tensor
    """Their numbers in the drafter."""


def _with_noise(logits: Tensor, drafter: Drafter, rows: Sequence[Sampler], depth: int, temperature: float) -> Tensor:
    """Return the logits of nodes at `depth`, plus the noise of their position where the temperature is above 0."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return scores
    every = torch.arange(logits.shape[-1], device=logits.device)
    keys = [row.key(noise.TARGET, len(row.context) + depth - 1) for row in rows]
    gumbel = noise.gumbel(keys, every if drafter.vocabulary is None else drafter.vocabulary)
    return scores + (temperature * gumbel[:, None]).to(scores.dtype)


def _order(values: Tensor) -> Tensor:
    """Return numbers by falling value; among equals the earlier comes first, so parents before children."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def _best_trees(levels: Sequence[_Level], roots: Tensor, size: int) -> list[TokenTree]:
    """Return for each row the tree of its best candidates.

    Candidates are in order of depth, and siblings best first; their numbers in the tree keep that order.
    """
    values, tokens, parents, _ = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    total = values.shape[1]
    best = _order(values)[:, : size - 1]
    chosen = torch.where(values.gather(1, best) > -torch.inf, best, total).sort(-1).values  # [B, n]; total: dropped
    index = chosen.clamp(max=total - 1)
    count = chosen.shape[1]
    numbers = torch.full((len(roots), total + 2), _ORPHAN, device=roots.device)  # in the tree, of root and candidates
    numbers[:, 0] = 0
    numbers.scatter_(1, chosen + 1, torch.arange(1, count + 1, device=roots.device).expand_as(chosen))
    above = numbers.gather(1, parents.gather(1, index)).masked_fill(chosen == total, _DROPPED).cpu()
    assert not bool((above == _ORPHAN).any()), "a child is worth more than its parent"
    token_ids = torch.cat([roots[:, None], tokens.gather(1, index)], dim=1)
    trees = []
    for ids, row in zip(token_ids, above.tolist(), strict=True):
        shape = tree_shape((-1, *(parent for parent in row if parent != _DROPPED)))
        trees.append(TokenTree(ids[: shape.size], shape))
    return trees
