"""Acceptance rules: which drafted tokens stay, and which token follows them.

A rule sees trees, the target's logits at their nodes and a source of randomness, and decides paths. `Match`,
`Rejection` and `Block` are exact: the emitted text has the target's own distribution, whatever was drafted. `Typical`
(`decode.typical`) is not. Greedy decoding is any of them at temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from decode.sampling import Sampling
from decode.tree import TokenTree
from heads.transfer import answers_later, to_device

LEAST_MASS = 1e-280
"""Of float64: below it, entries of a distribution have few correct bits left."""


class Verdict(NamedTuple):
    """What one row commits in a step."""

    path: tuple[int, ...]
    """Accepted nodes, root first."""
    tokens: tuple[int, ...]
    """What the row emits: the tokens of the accepted nodes below the root, then `next_token`."""

    @property
    def next_token(self) -> int:
        """Recovered token if the path stopped above a rejected draft, else bonus token; the next root."""
        return self.tokens[-1]

    @classmethod
    def of(cls, tokens: Sequence[int], path: Sequence[int], next_token: int) -> Verdict:
        """Return the verdict of a path through a tree whose nodes have these tokens."""
        return cls(tuple(path), (*(tokens[node] for node in path[1:]), next_token))


class Randomness(Protocol):
    """What a rule needs to know of a row: the target's distribution and a source of chance. `Sampler` is one."""

    sampling: Sampling

    def choose(self, logits: Tensor, path: Sequence[int]) -> int:
        """Return the target's token after the tokens of `path`, with noise keyed by its position."""
        ...

    def choices(self, logits: Tensor, depths: Sequence[int]) -> Tensor:
        """Return what `choose` would at nodes of these depths, where no node needs its path: [N, V] -> [N]."""
        ...

    def probs(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Return the target's distribution after `path`: [V] -> [V]."""
        ...

    def flip(self, probability: float) -> bool:
        """Return True with this probability."""
        ...

    def draw(self, weights: Tensor) -> int:
        """Draw an index in proportion to `weights`."""
        ...


class AcceptRule(Protocol):
    """Trees and the target's logits at their nodes -> a verdict for each row."""

    @property
    def exact(self) -> bool:
        """Whether the emitted text has the target's distribution."""
        ...

    @property
    def shares_noise(self) -> bool:
        """Whether drafts may be ranked with the noise the target's token will be chosen with."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether a row is asked for its distribution once for each token of its text, in order.

        And never behind a draft that is dropped: a logits processor with a state needs that.
        """
        ...

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows.

        Args:
            trees: B trees of at most N nodes.
            logits: [B, N, V] the target's raw logits after each node.
            rows: B sources of distribution and chance.
        """
        ...


@dataclass(frozen=True)
class Match:
    """Emit the target's own choice at each node; descend while a child carries it.

    Exact for any tree, however it was built, and optimal for trees that were not drawn. With noise keyed by position
    the text is that of plain decoding with the same seed (Daliri, Musco, Suresh 2024, arXiv:2408.07978).
    """

    exact: bool = field(default=True, init=False)
    shares_noise: bool = field(default=True, init=False)
    in_order: bool = field(default=True, init=False)

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows; see `AcceptRule`."""
        if not any(row.sampling.needs_context for row in rows):
            if all(row.sampling.greedy for row in rows):
                return _follow_all(trees, logits.argmax(-1))
            if answers_later(logits.device):
                chosen = [
                    row.choices(logits[b], tree.shape.depths)
                    for b, (tree, row) in enumerate(zip(trees, rows, strict=True))
                ]
                return _follow_all(trees, pad_sequence(chosen, batch_first=True))
        return [follow_choices(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]


def follow_choices(tree: TokenTree, logits: Tensor, row: Randomness) -> Verdict:
    """Descend while a child carries the row's own choice: one row of `Match`, logits [N, V]."""
    tokens = tree.token_ids.tolist()
    path = [0]
    while True:
        token = row.choose(logits[path[-1]], [tokens[node] for node in path[1:]])
        child = next((c for c in tree.shape.children[path[-1]] if tokens[c] == token), None)
        if child is None:
            return Verdict.of(tokens, path, token)
        path.append(child)


def _follow_all(trees: Sequence[TokenTree], choices: Tensor) -> list[Verdict]:
    """Descend as `follow_choices` does, with every node's choice at hand, [B, N]: one transfer for all rows."""
    drafted = pad_sequence([tree.token_ids for tree in trees], batch_first=True, padding_value=-1)
    choices = choices[:, : drafted.shape[1]]  # what is behind it is padding
    verdicts = []
    for tree, (tokens, chosen) in zip(trees, torch.stack([drafted, choices], dim=1).tolist(), strict=True):
        path = [0]
        while True:
            child = next((c for c in tree.shape.children[path[-1]] if tokens[c] == chosen[path[-1]]), None)
            if child is None:
                break
            path.append(child)
        verdicts.append(Verdict.of(tokens, path, chosen[path[-1]]))
    return verdicts


@dataclass(frozen=True)
class Rejection:
    """Accept a drawn child with min(1, p/q), else draw from the residual.

    Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) for chains; for several drawn children the recursion of Miao
    et al. 2024 (arXiv:2305.09781, algorithm 2; independent draws) or Jeon et al. 2024 (arXiv:2402.14160; without
    replacement): after each rejection p becomes the normalised (p - q)+, and q loses the token that was drawn unless
    draws are independent. Children that were not drawn are point masses and come last: accepted with p, else p loses
    the token. A tree of ranked tokens with one drawn child is the greedy multi-draft of Hu et al. 2025
    (arXiv:2502.18779).
    """

    exact: bool = field(default=True, init=False)
    shares_noise: bool = field(default=False, init=False)
    in_order: bool = field(default=True, init=False)

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows; see `AcceptRule`."""
        return [self._walk(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]

    def _walk(self, tree: TokenTree, logits: Tensor, row: Randomness) -> Verdict:
        tokens = tree.token_ids.tolist()
        path = [0]
        while True:
            p = row.probs(logits[path[-1]], [tokens[node] for node in path[1:]])
            child, p = self._choose_child(tree, tokens, path[-1], p, row)
            if child is None:
                return Verdict.of(tokens, path, row.draw(p))
            path.append(child)

    def _choose_child(
        self, tree: TokenTree, tokens: list[int], node: int, p: Tensor, row: Randomness
    ) -> tuple[int | None, Tensor]:
        """Return the accepted child of `node`, or None, and what is left of the target's distribution `p`."""
        drawn = [c for c in tree.shape.children[node] if tree.draws is not None and tree.draws.drawn[c]]
        if tree.draws is not None and drawn:
            q = tree.draws.probs[node].to(p.dtype)
            for child in drawn:
                if row.flip(min(1.0, probability_ratio(p, q, tokens[child]))):
                    return child, p
                p = residual(p, q)
                if not tree.draws.replacement:
                    q = without(q, tokens[child])
        for child in tree.shape.children[node]:
            if child not in drawn:
                if row.flip(float(p[tokens[child]])):
                    return child, p
                p = without(p, tokens[child])
        return None, p


@dataclass(frozen=True)
class Block:
    """Verify a drawn chain as a whole (Sun et al. 2025, arXiv:2403.10444, algorithm 2).

    Like `Rejection`, but a token that is too likely under the draft may be paid for by later tokens that are too
    unlikely: exact, and never accepts fewer tokens in expectation.
    """

    exact: bool = field(default=True, init=False)
    shares_noise: bool = field(default=False, init=False)
    in_order: bool = field(default=False, init=False)

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows; see `AcceptRule`.

        Raises:
            ValueError: If a tree has branches.
        """
        for tree in trees:
            if any(len(children) > 1 for children in tree.shape.children):
                raise ValueError("block verification is for chains, but a drafted tree has branches; use a Chain")
        return [self._walk(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]

    def _walk(self, tree: TokenTree, logits: Tensor, row: Randomness) -> Verdict:
        tokens = tree.token_ids.tolist()
        p: list[Tensor] = []
        q: list[Tensor] = []
        ratios = [1.0]  # r_i: p/q of the first i tokens together, never above 1
        for node, token in enumerate(tokens[1:]):
            p.append(row.probs(logits[node], tokens[1 : node + 1]))
            q.append(self._draft_law(tree, node, token, p[node]))
            ratios.append(min(1.0, ratios[-1] * probability_ratio(p[node], q[node], token)))
            if ratios[-1] == 0:
                break  # no longer block can be accepted: the target is not asked behind a token that it forbids
        else:
            p.append(row.probs(logits[len(q)], tokens[1:]))
        length = len(q)
        # every length is tried and the longest success wins, so the longest is tried first
        end = next((i for i in range(length, 0, -1) if row.flip(self._accept_block(p, q, ratios, i))), 0)
        rest = p[end] if end == length else residual(ratios[end] * p[end], q[end])
        return Verdict.of(tokens, range(end + 1), row.draw(rest))

    @staticmethod
    def _draft_law(tree: TokenTree, node: int, token: int, like: Tensor) -> Tensor:
        if tree.draws is not None and tree.draws.drawn[node + 1]:
            return tree.draws.probs[node].to(like.dtype)
        return F.one_hot(to_device(token, like.device), len(like)).to(like.dtype)

    @staticmethod
    def _accept_block(p: Sequence[Tensor], q: Sequence[Tensor], ratios: Sequence[float], end: int) -> float:
        """Return h_end, the probability of accepting at least `end` tokens if no longer block was accepted."""
        ratio = ratios[end]
        if end == len(q):
            return ratio
        mass = float((ratio * p[end] - q[end]).clamp(min=0.0).sum())
        missing = mass + (1.0 - ratio)  # in this order: mass + 1 - ratio would lose a small mass
        return mass / missing if missing > 0 else 1.0


def probability_ratio(p: Tensor, q: Tensor, token: int) -> float:
    """Return p/q at a drawn token; 0 where q is 0, which was not drawn."""
    drawn = float(q[token])
    return float(p[token]) / drawn if drawn > 0 else 0.0


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return what is left of the target's distribution after a draw from q was rejected: normalised (p - q)+."""
    left = (p - q).clamp(min=0.0)
    mass = left.sum()
    # p == q up to rounding: rejection had probability 0, so any law will do; p keeps it finite
    return left / mass if mass > 0 else p


def without(p: Tensor, token: int) -> Tensor:
    """Return p without a token, normalised; zeros where so little is left that its ratios have underflowed."""
    left = p.clone()
    left[token] = 0.0
    mass = left.sum()
    # zeros are exact: a child of probability 0 is never accepted, whatever it was drawn from
    return left / mass if mass > LEAST_MASS else torch.zeros_like(left)
