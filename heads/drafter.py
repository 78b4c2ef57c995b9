"""What the drafters of all heads answer alike; see `heads.Drafter`."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from heads.base import Head

AnyHead = TypeVar("AnyHead", bound=Head)


class HeadDrafter(Generic[AnyHead]):
    """A head's drafting state, without the state."""

    def __init__(self, head: AnyHead, max_depth: int) -> None:
        self._head = head
        self._max_depth = max_depth

    @property
    def max_depth(self) -> int:
        """How many tokens past the root can be drafted."""
        return self._max_depth

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return self._head.config.vocab_size

    @property
    def vocabulary(self) -> Tensor | None:
        """[U] target ids of the logit columns, or None."""
        return self._head.vocabulary
