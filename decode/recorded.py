"""What a proposer drafts, step by step, and two of them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decode.propose import Proposer, Proposing
from decode.sampling import Sampler
from decode.tree import TokenTree


@dataclass(frozen=True)
class Step:
    """What was drafted for one row in one step."""

    context: int
    """Tokens of prompt and text, the root included."""
    token_ids: list[int]
    """Drafted tokens, of a tree in the order of its nodes."""


class Recorded:
    """A proposer that does what another does and keeps what it drafted."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.rows: list[list[Step]] = []
        """The steps of each row, of the last session."""

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
        self.rows = [[] for _ in range(rows)]
        return _RecordedState(self._proposer.begin(rows, shared_noise=shared_noise), self.rows)


class _RecordedState:
    def __init__(self, inner: Proposing, rows: Sequence[list[Step]]) -> None:
        self._inner = inner
        self._rows = rows

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        self._inner.sync(token_ids, hidden, lengths, features)

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        trees = self._inner.propose(roots, rows)
        for steps, row, tree in zip(self._rows, rows, trees, strict=True):
            steps.append(Step(len(row.context), tree.token_ids[1:].tolist()))
        return trees

    def keep(self, rows: Sequence[int]) -> None:
        self._inner.keep(rows)
        self._rows = [self._rows[row] for row in rows]

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        self._inner.check(rows, hidden, features)


class Beside:
    """A proposer, with another that drafts the same steps and whose drafts are thrown away; see `Recorded`.

    Both must read the same decoder layers.
    """

    def __init__(self, proposer: Proposer, other: Proposer) -> None:
        self._proposer = proposer
        self._other = other

    @property
    def max_nodes(self) -> int:
        """That of the proposer."""
        return self._proposer.max_nodes

    @property
    def feature_layers(self) -> Sequence[int]:
        """Those of both."""
        return self._proposer.feature_layers

    def begin(self, rows: int, *, shared_noise: bool) -> Proposing:
        """Open a session; see `Proposer.begin`."""
        both = (proposer.begin(rows, shared_noise=shared_noise) for proposer in (self._proposer, self._other))
        return _BesideState(*both)


class _BesideState:
    def __init__(self, inner: Proposing, other: Proposing) -> None:
        self._inner = inner
        self._both = (inner, other)

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        for state in self._both:
            state.sync(token_ids, hidden, lengths, features)

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        trees, _ = [state.propose(roots, rows) for state in self._both]
        return trees

    def keep(self, rows: Sequence[int]) -> None:
        for state in self._both:
            state.keep(rows)

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        for state in self._both:
            state.check(rows, hidden, features)
