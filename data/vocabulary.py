"""Which tokens a head with a reduced output vocabulary may propose: those the target produces most often."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.conversations import Encoded

SIZES = tuple(2**power for power in range(10, 16))
"""Sizes that the table compares, as far as they are below the target's."""


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens that a head may propose."""

    token_ids: Tensor
    """[U] int64 target ids, ascending, on the CPU."""
    coverage: float
    """Share of the supervised tokens that are among them."""

    @property
    def digest(self) -> str:
        """Short hash of the ids."""
        return hashlib.sha256(self.token_ids.numpy().astype("<i8").tobytes()).hexdigest()[:16]

    def notes(self) -> dict[str, int | float | str]:
        """Return what a head folder records of it."""
        return {"size": len(self.token_ids), "coverage": self.coverage, "digest": self.digest}

    def describe(self) -> str:
        """Return it in one line, for people."""
        return (
            f"draft vocabulary: {len(self.token_ids)} tokens, which are {self.coverage:.1%} of the supervised ones; "
            f"digest {self.digest}"
        )


class SupervisedTokens:
    """What is supervised in the data, counted.

    Args:
        encoded: Conversations whose supervised tokens are counted.
        vocab_size: V, of the target.

    Raises:
        ValueError: If an id is not below V, or if no token is supervised.
    """

    def __init__(self, encoded: Sequence[Encoded], vocab_size: int) -> None:
        ids, first = _supervised(encoded)
        if not len(ids):
            raise ValueError(
                "no token is supervised, so none can be counted; see `python -m data.conversations preview`"
            )
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(
                f"token ids run from {int(ids.min())} to {int(ids.max())}, but the target's vocabulary has "
                f"{vocab_size}; encode the conversations with this target's tokenizer"
            )
        self.vocab_size = vocab_size
        self._counts = torch.bincount(ids, minlength=vocab_size)
        # stable: equal counts, zero included, stay in the order of their ids
        self._by_frequency = torch.sort(self._counts, descending=True, stable=True).indices  # [V]
        ranks = torch.empty_like(self._by_frequency)
        ranks[self._by_frequency] = torch.arange(vocab_size)
        self._ranks = ranks[ids]  # [supervised tokens]
        self._first = first

    def vocabulary(self, size: int) -> DraftVocabulary:
        """Return the `size` most frequent tokens. Ties, also between tokens that do not occur, go to the lower id.

        Raises:
            ValueError: If `size` is not in 1..V.
        """
        if not 1 <= size <= self.vocab_size:
            raise ValueError(
                f"draft vocabulary must have 1 to {self.vocab_size} tokens (the target's vocabulary), got {size}"
            )
        return self.measure(self._by_frequency[:size].sort().values)

    def measure(self, token_ids: Tensor) -> DraftVocabulary:
        """Return `token_ids`, [U] distinct ids in ascending order, with what they cover."""
        ids = token_ids.to(device="cpu", dtype=torch.int64)
        return DraftVocabulary(ids, int(self._counts[ids].sum()) / len(self._ranks))

    def ceiling(self, size: int, depth: int) -> float:
        """Return the tokens per step of a chain whose every guess within a vocabulary of `size` tokens is right.

        Counted on the answers themselves, as decoding would write them: the first token comes from the prefill, and a
        step gives the next tokens as far as they are in the vocabulary, at most `depth`, and one more.
        """
        drafted = self._ranks[~self._first]
        missing = (drafted >= size).nonzero()[:, 0]  # numbers of tokens outside the vocabulary
        answers = torch.cumsum(self._first, 0)[~self._first] - 1
        ends = torch.bincount(answers, minlength=int(self._first.sum())).cumsum(0)  # number of the token after each
        # runs of tokens in the vocabulary lie between these; an end comes before the token with its number
        order, source = torch.sort(torch.cat([2 * missing + 1, 2 * ends]))
        places, is_end = order // 2, source >= len(missing)
        starts = torch.cat([places.new_zeros(1), torch.where(is_end, places, places + 1)[:-1]])
        runs = places - starts
        # every depth + 1 tokens of a run are a step; so are the rest of it and a missing token that follows
        steps = torch.where(is_end, (runs + depth) // (depth + 1), runs // (depth + 1) + 1)
        return len(drafted) / max(1, int(steps.sum()))

    def table(self, size: int, depth: int) -> str:
        """Return coverage and ceiling of several sizes, `size` among them, as a table for people."""
        sizes = sorted({size, self.vocab_size, *(known for known in SIZES if known < self.vocab_size)})
        lines = [f"  {'tokens':>9}  {'coverage':>8}  tokens per step of a perfect chain of {depth}"]
        for known in sizes:
            mark = "*" if known == size else " "
            coverage = self.vocabulary(known).coverage
            lines.append(f"{mark} {known:>9,}  {coverage:>8.2%}  {self.ceiling(known, depth):.2f}")
        return "\n".join(lines)


def _supervised(encoded: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Return all supervised tokens, int64, and which of them are the first of an answer."""
    ids, first = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.bool)]
    for sample in encoded:
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        before = torch.cat([mask.new_zeros(1), mask[:-1]])
        ids.append(torch.tensor(sample.token_ids, dtype=torch.int64)[mask])
        first.append(~before[mask])
    return torch.cat(ids), torch.cat(first)
