"""Proposers: whatever yields token trees for the next step.

A proposer is frozen settings; `begin` opens the state of one session (B rows), so two calls never share state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.checks import StateError, assert_close
from decode.dynamic import DynamicTree
from decode.grow import LONGEST_CHAIN, Chain, Grow, StaticTree
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape
from heads import Drafter
from heads.base import Tree


class Proposing(Protocol):
    """A proposer's state in one session."""

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        """Absorb newly committed tokens; arguments as in `heads.Drafter.sync` (one more token than states)."""
        ...

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        """Return a tree for each row; its root is the row's last committed token.

        Args:
            roots: [B] root tokens.
            rows: Settings, noise and text of each row.
        """
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        ...

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        """Compare the state with that of a fresh start on the rows' texts; for `decode.checks`.

        Args:
            rows: Settings, noise and text of each row.
            hidden: [B, L, D] the target's states at each text's tokens but the root.
            features: [B, L, F] outputs of `feature_layers` there.

        Raises:
            StateError: If it differs.
        """
        ...


class Proposer(Protocol):
    """Settings that open a `Proposing` for each session."""

    @property
    def max_nodes(self) -> int:
        """Largest tree it proposes, root included."""
        ...

    @property
    def feature_layers(self) -> Sequence[int]:
        """Decoder layers of the target whose outputs `Proposing.sync` wants; see `heads.Head.feature_layers`."""
        ...

    def begin(self, rows: int, *, shared_noise: bool) -> Proposing:
        """Open the state of one session.

        Args:
            rows: B.
            shared_noise: Drafts may be ranked with the target's own noise (the acceptance rule decides).
        """
        ...


class Drafts(Protocol):
    """Weights that draft: a `heads.Head` or a `decode.DraftModel`."""

    @property
    def tree(self) -> Tree:
        """Tree to use by default."""
        ...

    @property
    def feature_layers(self) -> Sequence[int]:
        """Decoder layers whose outputs it reads; see `heads.Head.feature_layers`."""
        ...

    def drafter(self) -> Drafter:
        """Return a fresh drafting state."""
        ...


@dataclass(frozen=True)
class Drafting:
    """Trees grown from the guesses of a head or a draft model."""

    head: Drafts
    grow: Grow

    def __post_init__(self) -> None:
        """Reject trees that the head cannot fill."""
        drafter = self.head.drafter()
        columns = drafter.vocab_size if drafter.vocabulary is None else len(drafter.vocabulary)
        if self.grow.depth > drafter.max_depth:
            raise ValueError(f"the tree is {self.grow.depth} deep, but the head drafts {drafter.max_depth} tokens")
        if self.grow.width > columns:
            raise ValueError(f"a node has {self.grow.width} children, but the head's vocabulary has {columns} tokens")

    @classmethod
    def of(cls, head: Drafts) -> Drafting:
        """Use the tree that the head recommends, or a chain of all the head can draft."""
        if head.tree is None:
            return cls(head, Chain(head.drafter().max_depth))
        if isinstance(head.tree, Mapping):
            return cls(head, DynamicTree.of(head.tree))
        return cls(head, StaticTree(tuple(map(tuple, head.tree))))

    @property
    def max_nodes(self) -> int:
        """Largest tree, root included."""
        return self.grow.max_nodes

    @property
    def feature_layers(self) -> Sequence[int]:
        """Those of the head."""
        return self.head.feature_layers

    def begin(self, rows: int, *, shared_noise: bool) -> _DraftingState:
        """Open a session; see `Proposer.begin`."""
        return _DraftingState(self.head, self.grow, shared_noise)


class _DraftingState:
    def __init__(self, head: Drafts, grow: Grow, shared_noise: bool) -> None:
        self._head = head
        self._drafter = head.drafter()
        self._grow = grow
        self._shared_noise = shared_noise
        self._logits = torch.empty(0)

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        self._logits = self._drafter.sync(token_ids, hidden, lengths, features)

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        return self._grow(self._drafter, self._logits, roots, rows, shared_noise=self._shared_noise)

    def keep(self, rows: Sequence[int]) -> None:
        self._drafter.keep(rows)
        self._logits = self._logits[list(rows)]

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        texts = [torch.tensor(row.context, device=hidden.device) for row in rows]
        token_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        fresh = self._head.drafter().sync(token_ids, hidden, [len(text) - 1 for text in texts], features)
        for row, (held, expected) in enumerate(zip(self._logits, fresh, strict=True)):
            what = f"row {row}: the drafter's logits after the root against a fresh drafter's"
            if held.dtype == torch.float64:  # lent by a float64 target to a head that may compute in less
                held, expected = held.float(), expected.float()
            assert_close(held, expected, what)


@dataclass(frozen=True)
class PromptLookup:
    """Propose what followed the last occurrence of the text's final n-gram (Saxena 2023, prompt lookup decoding)."""

    length: int = 6
    """Tokens proposed at most."""
    max_ngram: int = 3
    """Longest n-gram looked for; shorter ones follow, down to `min_ngram`."""
    min_ngram: int = 1

    def __post_init__(self) -> None:
        """Reject settings that find nothing."""
        if not 1 <= self.length <= LONGEST_CHAIN or not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"prompt lookup needs length >= 1 and <= {LONGEST_CHAIN}, and 1 <= min_ngram <= max_ngram, got length "
                f"{self.length}, min_ngram {self.min_ngram}, max_ngram {self.max_ngram}"
            )

    @property
    def max_nodes(self) -> int:
        """Root and `length` tokens."""
        return self.length + 1

    @property
    def feature_layers(self) -> Sequence[int]:
        """None: it reads the text only."""
        return ()

    def begin(self, rows: int, *, shared_noise: bool) -> _LookupState:
        """Open a session; see `Proposer.begin`."""
        return _LookupState(self, rows)


class _LookupState:
    """For each row, where every n-gram seen so far last ended (before the final token)."""

    def __init__(self, settings: PromptLookup, rows: int) -> None:
        self._settings = settings
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]
        self._indexed = [0] * rows

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        """Nothing to do: the rows' own text is indexed when a tree is proposed."""

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        trees = []
        for b, row in enumerate(rows):
            tokens = [row.context[-1], *self._continuation(b, row.context)]
            trees.append(TokenTree(torch.tensor(tokens, device=roots.device), chain_shape(len(tokens))))
        return trees

    def _continuation(self, b: int, context: list[int]) -> list[int]:
        sizes = range(self._settings.min_ngram, self._settings.max_ngram + 1)
        ends = self._ends[b]
        for end in range(self._indexed[b] + 1, len(context)):
            for size in sizes:
                if size <= end:
                    ends[tuple(context[end - size : end])] = end
        self._indexed[b] = len(context) - 1
        for size in reversed(sizes):
            found = ends.get(tuple(context[-size:])) if size <= len(context) else None
            if found is not None:
                return context[found : found + self._settings.length]
        return []

    def keep(self, rows: Sequence[int]) -> None:
        self._ends = [self._ends[row] for row in rows]
        self._indexed = [self._indexed[row] for row in rows]

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        fresh = _LookupState(self._settings, len(rows))
        for b, row in enumerate(rows):
            held, expected = self._continuation(b, row.context), fresh._continuation(b, row.context)
            if held != expected:
                raise StateError(f"row {b}: the index of n-grams finds {held}, a fresh one {expected}")
