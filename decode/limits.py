"""Which values of sampling parameters make a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decode.sampling import Sampling

_NUMBERS = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_LARGEST = 1e30
"""Penalty that float32 still multiplies without overflow."""
_COLDEST = 1e-6
"""Temperature that logits can still be divided by in float32."""


def check_temperature(name: str, temperature: float) -> None:
    """Raise ValueError unless it is 0, or one that logits can be divided by."""
    if not isinstance(temperature, Real) or not (temperature == 0 or _COLDEST <= temperature < math.inf):
        raise ValueError(
            f"{name} must be at least 0 (0 is greedy), {_COLDEST:g} or more, and finite, got {temperature}"
        )


def check_sampling(sampling: Sampling) -> None:
    """Reject values that no distribution has.

    Raises:
        ValueError: It names the parameter, what it got and what it takes.
    """
    for name in _NUMBERS:
        if not isinstance(vars(sampling)[name], Real):
            raise ValueError(f"{name} must be a number, got {vars(sampling)[name]!r}")
    check_temperature("temperature", sampling.temperature)
    finite = f"a finite number (0 is no penalty), at most {_LARGEST:g}"
    seeds = sampling.seed if isinstance(sampling.seed, Sequence) else [sampling.seed]
    checks = {
        "top_k": (
            sampling.top_k is None or (isinstance(sampling.top_k, Integral) and sampling.top_k >= 1),
            "at least 1, or None to keep all tokens",
        ),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "min_p": (0 <= sampling.min_p <= 1, "between 0 and 1"),
        "typical_p": (0 < sampling.typical_p <= 1, "above 0 and at most 1"),
        "repetition_penalty": (
            1 / _LARGEST <= sampling.repetition_penalty <= _LARGEST,
            f"above 0 (1 is no penalty) and finite, from {1 / _LARGEST:g} to {_LARGEST:g}",
        ),
        "presence_penalty": (abs(sampling.presence_penalty) <= _LARGEST, finite),
        "frequency_penalty": (abs(sampling.frequency_penalty) <= _LARGEST, finite),
        "processors": (
            isinstance(sampling.processors, Sequence) and all(map(callable, sampling.processors)),
            "a list of transformers' LogitsProcessors",
        ),
        "bad_words_ids": (
            isinstance(sampling.bad_words_ids, Sequence) and all(map(_is_token_sequence, sampling.bad_words_ids)),
            "non-empty lists of token ids, such as [[5], [7, 8]]",
        ),
        "seed": (
            sampling.seed is None or all(isinstance(seed, int) for seed in seeds),
            "a number, a list of numbers (one for each prompt), or None",
        ),
        "prefix_allowed_tokens_fn": (
            sampling.prefix_allowed_tokens_fn is None or callable(sampling.prefix_allowed_tokens_fn),
            "a function of row and token ids, or None",
        ),
    }
    for name, (good, expected) in checks.items():
        if not good:
            raise ValueError(f"{name} must be {expected}, got {vars(sampling)[name]}")


def _is_token_sequence(words: object) -> bool:
    return (
        isinstance(words, Sequence) and len(words) > 0 and all(isinstance(t, Integral) and int(t) >= 0 for t in words)
    )
