"""Proposers: whatever yields token trees for the next step.

A proposer is frozen settings; `begin` opens the state of one session (B rows), so two calls never share state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.checks import assert_close
from decode.dynamic import DynamicTree
from decode.grow import Chain, Grow, StaticTree
from decode.sampling import Sampler
from decode.tree import TokenTree
from heads import Drafter
from heads.base import Tree
from heads.transfer import to_device


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


def to_grow(tree: Sequence[Sequence[int]] | Mapping[str, float]) -> Grow:
    """Return the tree of paths of child ranks, or the dynamic tree of settings, as folders hold them."""
    if isinstance(tree, Mapping):
        return DynamicTree.of(tree)
    return StaticTree(tuple(map(tuple, tree)))


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
        return cls(head, Chain(head.drafter().max_depth) if head.tree is None else to_grow(head.tree))

    @property
    def max_nodes(self) -> int:
        """Largest tree, root included."""
        return self.grow.max_nodes

    @property
    def feature_layers(self) -> Sequence[int]:
        """Those of the head."""
        return self.head.feature_layers

    def begin(self, rows: int, *, shared_noise: bool) -> DraftingState:
        """Open a session; see `Proposer.begin`."""
        return DraftingState(self.head, self.grow, shared_noise)


class DraftingState:
    """A drafter's state in one session, and the tree it fills in the next step."""

    def __init__(self, head: Drafts, grow: Grow, shared_noise: bool) -> None:
        self.grow = grow
        self._head = head
        self._drafter = head.drafter()
        self._shared_noise = shared_noise
        self._logits = torch.empty(0)
        self.started = False
        """Whether it knows a prompt."""

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        """Absorb committed tokens; see `Proposing.sync`."""
        self._logits = self._drafter.sync(token_ids, hidden, lengths, features)
        self.started = True

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        """Return trees; see `Proposing.propose`."""
        return self.grow(self._drafter, self._logits, roots, rows, shared_noise=self._shared_noise)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self._drafter.keep(rows)
        self._logits = self._logits[list(rows)]

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        """Compare with a fresh drafter; see `Proposing.check`."""
        texts = [to_device(row.context, hidden.device) for row in rows]
        token_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        fresh = self._head.drafter().sync(token_ids, hidden, [len(text) - 1 for text in texts], features)
        for row, (held, expected) in enumerate(zip(self._logits, fresh, strict=True)):
            what = f"row {row}: the drafter's logits after the root against a fresh drafter's"
            if held.dtype == torch.float64:  # lent by a float64 target to a head that may compute in less
                held, expected = held.float(), expected.float()
            if hidden.dtype.itemsize < held.dtype.itemsize:  # no better than the states that they were made of
                held, expected = held.to(hidden.dtype), expected.to(hidden.dtype)
            assert_close(held, expected, what)
