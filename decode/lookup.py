"""Prompt lookup: drafts copied from the text itself (Saxena 2023, prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decode.checks import StateError
from decode.grow import LONGEST_CHAIN
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape
from heads.transfer import to_device


class NgramIndex:
    """For each row, where every n-gram seen so far last ended (before the final token)."""

    def __init__(self, rows: int, min_ngram: int, max_ngram: int) -> None:
        """Start empty.

        Args:
            rows: B.
            min_ngram: Shortest n-gram.
            max_ngram: Longest n-gram.
        """
        self.ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]
        self._sizes = range(min_ngram, max_ngram + 1)
        self._indexed = [0] * rows

    def find(self, row: int, text: list[int]) -> int | None:
        """Return where the text's longest final n-gram that occurs earlier last ended; None if there is none.

        Args:
            row: Row of the batch.
            text: All of its tokens; what was indexed in earlier calls may not have changed.
        """
        ends = self.ends[row]
        for end in range(self._indexed[row] + 1, len(text)):
            for size in self._sizes:
                if size <= end:
                    ends[tuple(text[end - size : end])] = end
        self._indexed[row] = len(text) - 1
        for size in reversed(self._sizes):
            found = ends.get(tuple(text[-size:])) if size <= len(text) else None
            if found is not None:
                return found
        return None

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.ends = [self.ends[row] for row in rows]
        self._indexed = [self._indexed[row] for row in rows]


def check_lookup(name: str, length: int, min_ngram: int, max_ngram: int) -> None:
    """Reject settings that find nothing.

    Args:
        name: What the number of proposed tokens is called.
        length: That number.
        min_ngram: Shortest n-gram looked for.
        max_ngram: Longest n-gram looked for.

    Raises:
        ValueError: If one is impossible.
    """
    if not 1 <= length <= LONGEST_CHAIN or not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"prompt lookup needs {name} >= 1 and <= {LONGEST_CHAIN}, and 1 <= min_ngram <= max_ngram, got {name} "
            f"{length}, min_ngram {min_ngram}, max_ngram {max_ngram}"
        )


@dataclass(frozen=True)
class PromptLookup:
    """Propose what followed the last occurrence of the text's final n-gram; `AdaptiveLookup` chooses how much of it."""

    length: int = 6
    """Tokens proposed at most."""
    max_ngram: int = 3
    """Longest n-gram looked for; shorter ones follow, down to `min_ngram`."""
    min_ngram: int = 1

    def __post_init__(self) -> None:
        """Reject settings that find nothing."""
        check_lookup("length", self.length, self.min_ngram, self.max_ngram)

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
    def __init__(self, settings: PromptLookup, rows: int) -> None:
        self._settings = settings
        self._index = NgramIndex(rows, settings.min_ngram, settings.max_ngram)

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        """Nothing to do: the rows' own text is indexed when a tree is proposed."""

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        trees = []
        for b, row in enumerate(rows):
            tokens = [row.context[-1], *self._continuation(b, row.context)]
            trees.append(TokenTree(to_device(tokens, roots.device), chain_shape(len(tokens))))
        return trees

    def _continuation(self, b: int, context: list[int]) -> list[int]:
        found = self._index.find(b, context)
        return [] if found is None else context[found : found + self._settings.length]

    def keep(self, rows: Sequence[int]) -> None:
        self._index.keep(rows)

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        fresh = _LookupState(self._settings, len(rows))
        for b, row in enumerate(rows):
            held, expected = self._continuation(b, row.context), fresh._continuation(b, row.context)
            if held != expected:
                raise StateError(f"row {b}: the index of n-grams finds {held}, a fresh one {expected}")
