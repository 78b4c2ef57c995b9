import math
import random

import numpy as np
import pytest

from decode.intervals import ratio_interval, speedup_interval


def prompts(count: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Accepted tokens and steps of prompts that differ in length and in how easy they are; the true ratio is 1.8."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(20, 60, count)
    return generator.poisson(steps * generator.gamma(20, 1.8 / 20, count)).tolist(), steps.tolist()


def linearised(numerators: list[int], denominators: list[int]) -> float:
    """Half-width of the 95 % interval of a ratio of sums (Cochran 1977, Sampling Techniques, section 6.4)."""
    n, value = len(numerators), sum(numerators) / sum(denominators)
    squares = sum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return 1.96 * math.sqrt(squares * n / (n - 1)) / sum(denominators)


def obvious(columns: list[list[int]], resamples: int) -> list[list[int]]:
    """Sums of the columns over resamples of their rows, one at a time."""
    rows, generator = list(zip(*columns, strict=True)), random.Random(1)
    drawn = ([generator.choice(rows) for _ in rows] for _ in range(resamples))
    return [[sum(column) for column in zip(*sample, strict=True)] for sample in drawn]


def test_the_interval_of_many_prompts_is_the_linearised_one():
    numerators, denominators = prompts(400)
    value, low, high = ratio_interval(numerators, denominators, resamples=4000)
    margin = linearised(numerators, denominators)
    assert value == sum(numerators) / sum(denominators)
    assert value - low == pytest.approx(margin, rel=0.08)
    assert high - value == pytest.approx(margin, rel=0.08)


def test_the_interval_covers_the_true_ratio_about_19_times_in_20():
    intervals = [ratio_interval(*prompts(40, seed), seed=seed) for seed in range(400)]
    covered = sum(low <= 1.8 <= high for _, low, high in intervals)
    assert 0.91 < covered / 400 < 0.98


def test_the_ends_are_the_percentiles_of_resampled_prompts():
    numerators, denominators = prompts(7)
    ratios = [a / b for a, b in obvious([numerators, denominators], 4000)]
    low, high = np.quantile(ratios, [0.025, 0.975])
    found = ratio_interval(numerators, denominators, resamples=4000)
    assert found.low == pytest.approx(low, abs=0.03)
    assert found.high == pytest.approx(high, abs=0.03)
    assert found.high - found.low > 0.4


def test_the_speed_up_is_that_of_tokens_per_second_and_resamples_both_methods_together():
    tokens, plain_tokens = prompts(30)
    seconds, plain_seconds = prompts(30, seed=5)
    value, low, high = speedup_interval(tokens, seconds, plain_tokens, plain_seconds, resamples=4000)
    assert value == pytest.approx(sum(tokens) / sum(seconds) / (sum(plain_tokens) / sum(plain_seconds)))
    ratios = [a / b / (c / d) for a, b, c, d in obvious([tokens, seconds, plain_tokens, plain_seconds], 4000)]
    assert (low, high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), rel=0.02)
    twice_as_fast = speedup_interval(tokens, seconds, tokens, [2 * s for s in seconds])
    assert twice_as_fast == pytest.approx((2.0, 2.0, 2.0))  # prompts differ, the speed-up does not


def test_the_same_seed_gives_the_same_interval():
    data = prompts(10)
    assert ratio_interval(*data) == ratio_interval(*data)
    assert ratio_interval(*data) != ratio_interval(*data, seed=1)


def test_one_prompt_has_no_width_and_no_steps_no_ratio():
    assert ratio_interval([3], [2]) == (1.5, 1.5, 1.5)
    assert ratio_interval([0, 0], [0, 0]) == (0.0, 0.0, 0.0)
    value, low, high = ratio_interval([0, 0, 6], [0, 0, 4])  # most resamples have steps, some have none
    assert value == low == high == 1.5


@pytest.mark.parametrize("columns", [([], []), ([1, 2], [1])])
def test_prompts_that_are_missing_are_refused(columns: tuple[list[int], list[int]]):
    with pytest.raises(ValueError, match="the same prompts in each column, and one at least, got"):
        ratio_interval(*columns)
