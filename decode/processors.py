"""Logits processors that transformers lacks, or has for whole batches only; and copies of a user's, for each row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

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


def prefix_constraint(allowed: AllowedTokens, row: int) -> LogitsProcessor:
    """Return transformers' processor that asks `allowed` for this row; alone, it takes every text for row 0."""

    def of_row(_: int, token_ids: Tensor) -> list[int]:
        tokens = [int(token) for token in allowed(row, token_ids)]
        if not tokens:
            raise ValueError(
                f"prefix_allowed_tokens_fn allows no token after {len(token_ids)} tokens of row {row} (the last are "
                f"{token_ids[-5:].tolist()}); allow at least one, such as an end-of-text token"
            )
        return tokens

    return PrefixConstrainedLogitsProcessor(of_row, num_beams=1)


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
