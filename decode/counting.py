"""Counts what proposers do: nodes of their trees, passes of their drafters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decode.adaptive import Adaptive
from decode.propose import Drafting, Drafts, Proposer, Proposing
from decode.sampling import Sampler
from decode.tree import TokenTree
from heads import Drafter
from heads.base import Tree


@dataclass
class Counts:
    """What a proposer did for one prompt or batch."""

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
        self.counts = Counts()
        self._drafts = isinstance(proposer, Drafting | Adaptive)
        if isinstance(proposer, Drafting | Adaptive):
            proposer = replace(proposer, head=_CountedDrafts(proposer.head, self))
        self._proposer = proposer

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
        inner = self._proposer.begin(rows, shared_noise=shared_noise)
        return _CountedState(inner, self, None if self._drafts else _Syncs(self))

    def take(self) -> Counts:
        """Return the counts since the last call. Take them between sessions."""
        counts, self.counts = self.counts, Counts()
        return counts


class _Syncs:
    """Counts calls of `sync`: of the drafter where there is one, as a controller does not always call it."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self._has_prompt = False

    def count(self, seconds: float) -> None:
        """Count one that took so long."""
        if self._has_prompt:
            self._counting.counts.passes += 1
        else:
            self._counting.counts.prompt_seconds += seconds
        self._has_prompt = True


class _CountedState:
    def __init__(self, inner: Proposing, counting: Counting, syncs: _Syncs | None) -> None:
        self._inner = inner
        self._counting = counting
        self._syncs = syncs

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        start = time.perf_counter()
        self._inner.sync(token_ids, hidden, lengths, features)
        if self._syncs is not None:
            self._syncs.count(time.perf_counter() - start)

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        trees = self._inner.propose(roots, rows)
        self._counting.counts.trees += len(trees)
        self._counting.counts.nodes += sum(tree.shape.size for tree in trees)
        return trees

    def keep(self, rows: Sequence[int]) -> None:
        self._inner.keep(rows)

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        self._inner.check(rows, hidden, features)


class _CountedDrafts:
    def __init__(self, inner: Drafts, counting: Counting) -> None:
        self._inner = inner
        self._counting = counting

    @property
    def tree(self) -> Tree:
        return self._inner.tree

    @property
    def feature_layers(self) -> Sequence[int]:
        return self._inner.feature_layers

    def drafter(self) -> Drafter:
        return _CountedDrafter(self._inner.drafter(), self._counting)


class _CountedDrafter:
    def __init__(self, inner: Drafter, counting: Counting) -> None:
        self._inner = inner
        self._counting = counting
        self._syncs = _Syncs(counting)

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
        start = time.perf_counter()
        logits = self._inner.sync(token_ids, hidden, lengths, features)
        self._syncs.count(time.perf_counter() - start)
        return logits

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self._counting.counts.passes += 1
        return self._inner.extend(token_ids, parents)

    def keep(self, rows: Sequence[int]) -> None:
        self._inner.keep(rows)
