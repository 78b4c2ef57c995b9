"""Counts what proposers do: nodes of their trees, passes of their drafters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decode.propose import Drafting, Drafts, Proposer, Proposing
from decode.sampling import Sampler
from decode.tree import TokenTree
from heads import Drafter
from heads.base import Tree


@dataclass
class Counts:
    """What a proposer did for one prompt."""

    trees: int = 0
    nodes: int = 0
    """Of these trees as they were proposed, roots included."""
    passes: int = 0
    """Calls of the drafter's `sync` and `extend`, but for the one over the prompt."""
    prompt_seconds: float = 0.0
    """That one. On a GPU, only until its work is queued."""


class Counting:
    """A proposer that does what another does and counts it."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._counts = Counts()

    @property
    def max_nodes(self) -> int:
        """That of the proposer."""
        return self._proposer.max_nodes

    @property
    def feature_layers(self) -> Sequence[int]:
        """Those of the proposer."""
        return self._proposer.feature_layers

    def begin(self, rows: int, *, shared_noise: bool) -> Proposing:
        """Open a session; see `Proposer.begin`."""
        inner = self._proposer
        if isinstance(inner, Drafting):
            inner = Drafting(_CountedDrafts(inner.head, self._counts), inner.grow)
        return _CountedState(inner.begin(rows, shared_noise=shared_noise), self._counts)

    def take(self) -> Counts:
        """Return the counts since the last call. Take them between sessions."""
        counts, self._counts = self._counts, Counts()
        return counts


class _CountedState:
    def __init__(self, inner: Proposing, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts
        self._has_prompt = False

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        start = time.perf_counter()
        self._inner.sync(token_ids, hidden, lengths, features)
        if self._has_prompt:
            self._counts.passes += 1
        else:
            self._counts.prompt_seconds += time.perf_counter() - start
        self._has_prompt = True

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        trees = self._inner.propose(roots, rows)
        self._counts.trees += len(trees)
        self._counts.nodes += sum(tree.shape.size for tree in trees)
        return trees

    def keep(self, rows: Sequence[int]) -> None:
        self._inner.keep(rows)

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        self._inner.check(rows, hidden, features)


class _CountedDrafts:
    def __init__(self, inner: Drafts, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts

    @property
    def tree(self) -> Tree:
        return self._inner.tree

    @property
    def feature_layers(self) -> Sequence[int]:
        return self._inner.feature_layers

    def drafter(self) -> Drafter:
        return _CountedDrafter(self._inner.drafter(), self._counts)


class _CountedDrafter:
    """Counts calls of `extend`; those of `sync` are the session's own."""

    def __init__(self, inner: Drafter, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts

    @property
    def max_depth(self) -> int:
        return self._inner.max_depth

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def vocabulary(self) -> Tensor | None:
        return self._inner.vocabulary

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        return self._inner.sync(token_ids, hidden, lengths, features)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self._counts.passes += 1
        return self._inner.extend(token_ids, parents)

    def keep(self, rows: Sequence[int]) -> None:
        self._inner.keep(rows)
