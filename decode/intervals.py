"""Confidence intervals by the percentile bootstrap over prompts (Efron and Tibshirani 1993, section 13.3).

Prompts are the independent unit: tokens of one text are not. A resample draws as many prompts as there are, with
replacement, and every figure of a prompt goes with it, so that two methods are compared on the same resampled prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
Numbers = Sequence[float] | Sequence[int]


class Interval(NamedTuple):
    """A figure over all prompts and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def ratio_interval(numerators: Numbers, denominators: Numbers, *, resamples: int = 1000, seed: int = 0) -> Interval:
    """Return sum(numerators) / sum(denominators) over prompts, as tokens per step is, with its interval.

    Args:
        numerators: One for each prompt.
        denominators: One for each prompt; all 0 (every answer ended at once) make the ratio 0.
        resamples: Number of resamples.
        seed: Of the resampling.

    Raises:
        ValueError: If there is no prompt, or not one of each for every prompt.
    """
    return _interval(*_sums([numerators, denominators], resamples, seed))


def speedup_interval(
    tokens: Numbers,
    seconds: Numbers,
    plain_tokens: Numbers,
    plain_seconds: Numbers,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Return how many times the tokens per second of plain decoding a method reaches, with its interval.

    All four have one number for each prompt, in the same order: the methods are paired. Equal texts make it the sum of
    plain seconds over the sum of seconds.

    Raises:
        ValueError: If there is no prompt, or not one of each for every prompt.
    """
    sums = _sums([tokens, seconds, plain_tokens, plain_seconds], resamples, seed)
    return _interval(sums[0] * sums[3], sums[1] * sums[2])


def _sums(columns: Sequence[Numbers], resamples: int, seed: int) -> NDArray[np.float64]:
    """Return the columns' sums over all prompts, [c, 0], and over each resample, [c, 1:]."""
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"an interval needs the same prompts in each column, and one at least, got {sorted(lengths)}")
    table = np.asarray(columns, dtype=np.float64)
    count = table.shape[1]
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    return table @ np.concatenate([np.ones((1, count)), drawn]).T


def _interval(numerators: NDArray[np.float64], denominators: NDArray[np.float64]) -> Interval:
    if denominators[0] == 0:
        return Interval(0.0, 0.0, 0.0)
    defined = denominators > 0  # a resample may hold only prompts without a step
    ratios = numerators[defined] / denominators[defined]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(ratios[1:], [tail, 1 - tail])
    return Interval(float(ratios[0]), float(low), float(high))
