"""Acceptance rules: which drafted tokens stay, and which token follows them.

A rule sees trees, the target's logits at their nodes and a source of randomness, and decides paths. Both rules here
are exact: the emitted text has the target's own distribution, whatever was drafted. Greedy decoding is either rule at
temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decode.sampling import Sampling
from decode.tree import TokenTree


class Verdict(NamedTuple):
    """What one row commits in a step."""

    path: tuple[int, ...]
    """Accepted nodes, root first."""
    next_token: int
    """Recovered token if the path stopped above a rejected draft, else bonus token; the next root."""


class Randomness(Protocol):
    """What a rule needs to know of a row: the target's distribution and a source of chance. `Sampler` is one."""

    sampling: Sampling

    def choose(self, logits: Tensor, path: Sequence[int]) -> int:
        """Return the target's token after the tokens of `path`, with noise keyed by its position."""
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
    def shares_noise(self) -> bool:
        """Whether drafts may be ranked with the noise the target's token will be chosen with."""
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

    shares_noise: bool = field(default=True, init=False)

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows; see `AcceptRule`."""
        if all(row.sampling.greedy and not row.sampling.needs_context for row in rows):
            return _match_greedy(trees, logits)
        return [self._walk(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]

    def _walk(self, tree: TokenTree, logits: Tensor, row: Randomness) -> Verdict:
        tokens = tree.token_ids.tolist()
        path = [0]
        while True:
            token = row.choose(logits[path[-1]], [tokens[node] for node in path[1:]])
            child = next((c for c in tree.shape.children[path[-1]] if tokens[c] == token), None)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)


def _match_greedy(trees: Sequence[TokenTree], logits: Tensor) -> list[Verdict]:
    """`Match` without noise and context: one argmax and one transfer for all nodes of all rows."""
    best = logits.argmax(-1)
    drafted = torch.nn.utils.rnn.pad_sequence([tree.token_ids for tree in trees], batch_first=True, padding_value=-1)
    verdicts = []
    for tree, (tokens, choices) in zip(trees, torch.stack([drafted, best], dim=1).tolist(), strict=True):
        path = [0]
        while True:
            child = next((c for c in tree.shape.children[path[-1]] if tokens[c] == choices[path[-1]]), None)
            if child is None:
                break
            path.append(child)
        verdicts.append(Verdict(tuple(path), choices[path[-1]]))
    return verdicts


@dataclass(frozen=True)
class Rejection:
    """Accept a drawn child with min(1, p/q), else draw from the residual.

    Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) for chains; for several children the recursion without
    replacement of Jeon et al. 2024 (arXiv:2402.14160): after each rejection p becomes the normalised (p - q)+ and q
    loses the token that was drawn. Children that were not drawn are point masses: accepted with p, else p loses the
    token.
    """

    shares_noise: bool = field(default=False, init=False)

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        """Decide all rows; see `AcceptRule`."""
        return [self._walk(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]

    def _walk(self, tree: TokenTree, logits: Tensor, row: Randomness) -> Verdict:
        tokens = tree.token_ids.tolist()
        path = [0]
        while True:
            node = path[-1]
            p = row.probs(logits[node], [tokens[n] for n in path[1:]])
            q = None if tree.draft_probs is None else tree.draft_probs[node].to(p.dtype)
            for child in tree.shape.children[node]:
                token = tokens[child]
                if row.flip(_accept_probability(p, q, token)):
                    path.append(child)
                    break
                p, q = _after_rejection(p, q, token)
            else:
                return Verdict(tuple(path), row.draw(p))


def _accept_probability(p: Tensor, q: Tensor | None, token: int) -> float:
    target = float(p[token])
    if q is None:
        return target
    drawn = float(q[token])
    return min(1.0, target / drawn) if drawn > 0 else 0.0


def _after_rejection(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """Return the residual target distribution and what remains of the draft distribution."""
    if q is None:
        residual = p.clone()
        residual[token] = 0.0
    else:
        residual = (p - q).clamp(min=0.0)
        q = q.clone()
        q[token] = 0.0
        left = q.sum()
        q = q / left if left > 0 else q
    mass = residual.sum()
    # p == q up to rounding: rejection had probability 0, so any law will do; p keeps it finite
    return (residual / mass if mass > 0 else p), q


RULES: dict[str, AcceptRule] = {"match": Match(), "rejection": Rejection()}
