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
from heads.transfer import answers_later


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
        frontier = _Frontier(root.float(), root)
        level_logits = logits[:, None]  # [B, W, U], or [B, 1, U] where all nodes of a level share them
        levels: list[_Level] = []
        found = first = 0  # candidates above this level; the drafter's number of the frontier's first node
        for depth in range(1, self.depth + 1):
            scores = shared_scores(level_logits, drafter, rows, depth, temperature)
            level = self._candidates(frontier, scores, drafter.vocabulary)
            levels.append(level)
            count = self._count(levels)
            if not count:
                break
            values, order = _ranked(level.values)
            best, (siblings, width) = order[:, :count], (level.values.shape[1], frontier.numbers.shape[1])
            parents = first + best // (siblings // width)
            level_logits = drafter.extend(level.tokens.gather(1, best), parents)
            frontier = _Frontier(values[:, :count], found + 1 + best)
            found, first = found + siblings, first + width
        return _best_trees(levels, roots, self.size)

    def _candidates(self, frontier: _Frontier, scores: Tensor, vocabulary: Tensor | None) -> _Level:
        """Return the best children of all frontier nodes, those of the first node first, each node's best first."""
        columns = scores.topk(min(self.width, scores.shape[-1]), dim=-1).indices
        # rounding may leave a little above 0, and a child must not be worth more than its parent
        log_probs = scores.log_softmax(-1).gather(-1, columns).float().clamp(max=0.0)
        values = frontier.values[..., None] + log_probs  # [B, W, k]
        sure = values.exp() >= self.confidence  # a row of logits that are all -inf gives NaN, which is not
        tokens = columns if vocabulary is None else vocabulary[columns]
        return _Level(
            values.where(sure, -torch.inf).flatten(1),
            tokens.expand_as(values).flatten(1),
            frontier.numbers[..., None].expand_as(values).flatten(1),
        )

    def _count(self, levels: Sequence[_Level]) -> int:
        """Return how many candidates of the last level to expand: those that could have a child in the tree.

        Rows with fewer carry others along.
        """
        depth, last = len(levels), levels[-1].values
        # a child is chosen only after the root, the `depth` nodes above it and all those here better than its parent
        count = max(0, min(self.width, self.size - 1 - depth)) if depth < self.depth else 0
        if count and (self.confidence > 0 or not answers_later(last.device)):
            # and after all other candidates better than its parent
            known = torch.cat([level.values for level in levels], dim=1)
            least = known.topk(min(self.size - 2, known.shape[1])).values[:, -1:]
            count = min(count, int((last >= least.clamp(min=torch.finfo(last.dtype).min)).sum(1).max()))
        return count


class _Frontier(NamedTuple):
    """The nodes whose children are looked for, [B, W] each."""

    values: Tensor
    numbers: Tensor
    """Among all candidates, from 1 on; the root is 0."""


class _Level(NamedTuple):
    """The candidates of one depth, [B, C] each; those that are out of the question have value -inf."""

    values: Tensor
    tokens: Tensor
    parents: Tensor
    """Their numbers among all candidates; the root is 0."""


def shared_scores(logits: Tensor, drafter: Drafter, rows: Sequence[Sampler], depth: int, temperature: float) -> Tensor:
    """Return the logits of nodes at `depth`, plus the noise of their position where the temperature is above 0."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return scores
    every = torch.arange(logits.shape[-1], device=logits.device)
    keys = [row.key(noise.TARGET, len(row.context) + depth - 1) for row in rows]
    gumbel = noise.gumbel(keys, every if drafter.vocabulary is None else drafter.vocabulary)
    return scores + (temperature * gumbel[:, None]).to(scores.dtype)


def _ranked(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and their numbers, falling; among equals the earlier comes first, so parents before children."""
    ranked = values.sort(dim=-1, descending=True, stable=True)
    return ranked.values, ranked.indices


def _best_trees(levels: Sequence[_Level], roots: Tensor, size: int) -> list[TokenTree]:
    """Return for each row the tree of its best candidates.

    Candidates are in order of depth, and siblings best first; their numbers in the tree keep that order.
    """
    values, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    total = values.shape[1]
    worth, order = (part[:, : size - 1] for part in _ranked(values))
    chosen = order.where(worth > -torch.inf, total).sort(-1).values  # [B, n]; total: none
    index = chosen.clamp(max=total - 1)
    token_ids = torch.cat([roots[:, None], tokens.gather(1, index)], dim=1)
    trees = []
    for ids, row in zip(token_ids, torch.stack([chosen, parents.gather(1, index)], dim=-1).tolist(), strict=True):
        places = {0: 0}  # in the tree, of root and candidates
        above = [-1]
        for number, parent in row:
            if number < total:
                assert parent in places, "a child is worth more than its parent"
                above.append(places[parent])
                places[number + 1] = len(places)
        trees.append(TokenTree(ids[: len(above)], tree_shape(tuple(above))))
    return trees
