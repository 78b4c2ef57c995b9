"""Logits processors that transformers lacks, or has for whole batches only; and copies of a user's, for each row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor

AllowedTokens = Callable[[int, Tensor], Sequence[int]]
"""(row of the batch, [length] ids so far) -> the tokens that may follow."""


class CountPenalty(LogitsProcessor):
    """Lowers the scores of tokens by how often the output has them, as vLLM and OpenAI's API do; the prompt is free."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        """Set what one occurrence costs (`presence`), and each (`frequency`)."""
        self._presence = presence
        self._frequency = frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalised scores: [1, length], [1, V] -> [1, V]."""
        counts = input_ids[0, self._prompt_length :].bincount(minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self._frequency * counts - self._presence * counts.clamp(max=1)


class RowConstraint(PrefixConstrainedLogitsProcessor):
    """transformers' processor, which takes a text on its own for row 0, asking `allowed` for the row it is of."""

    def __init__(self, allowed: AllowedTokens, row: int) -> None:
        super().__init__(self._of_row, num_beams=1)
        self._allowed = allowed
        self._row = row
        self._vocab_size = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of allowed tokens: [1, length], [1, V] -> [1, V]."""
        self._vocab_size = scores.shape[-1]
        return super().__call__(input_ids, scores)

    def _of_row(self, _: int, token_ids: Tensor) -> list[int]:
        found = self._allowed(self._row, token_ids)
        tokens = [int(token) for token in found] if isinstance(found, Iterable) else []
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(
                f"prefix_allowed_tokens_fn allows no token after {len(token_ids)} tokens of row {self._row} (the last "
                f"are {token_ids[-5:].tolist()}), or none that there is: it returned {str(found)[:80]}, expected at "
                f"least one id below {self._vocab_size}, such as that of an end-of-text token"
            )
        return tokens


def copies(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """Copy processors with their state; what they share among themselves, the copies share too.

    Raises:
        ValueError: If one cannot be copied.
    """
    memo: dict[int, object] = {}
    copied = []
    for processor in processors:
        try:
            copied.append(copy.deepcopy(processor, memo))
        except Exception as error:  # it is the processor's own code that runs here
            raise ValueError(
                f"every row of a batch needs its own {type(processor).__name__}, but copying it failed "
                f"({type(error).__name__}: {error}); decode the prompts one at a time, or give it a __deepcopy__"
            ) from error
    return copied
