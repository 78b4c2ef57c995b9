import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from decode.formulas import best_length, break_even, expected_tokens, expected_tokens_by_depth, speedup

RATES = [0.0, 0.1, 1 / 3, 0.5, 0.8, 0.99, 1 - 1e-9, math.nextafter(1, 0), 1.0]


def enumerated(rates: list[float]) -> Fraction:
    """Exact mean over the outcomes of a step: the first i drafts are kept and the next is rejected, or all are kept."""
    total, mass, reached = Fraction(0), Fraction(0), Fraction(1)
    for kept, rate in enumerate([*map(Fraction, rates), Fraction(0)]):
        total += (kept + 1) * reached * (1 - rate)
        mass += reached * (1 - rate)
        reached *= rate
    assert mass == 1
    return total


def staircase(nodes: int) -> float:
    """Time of a pass on hardware that works in tiles of 8 nodes."""
    return 1.0 + 0.6 * ((nodes - 1) // 8)


def random_costs(seed: int) -> tuple[float, Callable[[int], float] | None, float]:
    chance = random.Random(seed)
    slope = chance.uniform(0, 0.2)
    verify = [None, staircase, lambda nodes: 1 + slope * (nodes - 1)][seed % 3]
    return chance.uniform(0, 0.3), verify, chance.choice([0.0, chance.uniform(0, 0.5)])


@pytest.mark.parametrize(
    ("rate", "length", "tokens"), [(0.8, 4, 3.36), (0.6, 4, 2.31), (0.4, 4, 1.65), (0.8, 8, 4.33), (0.8, 0, 1.0)]
)
def test_published_tokens_per_step(rate, length, tokens):
    assert round(expected_tokens(rate, length), 2) == tokens


@pytest.mark.parametrize(
    ("rate", "length", "cost", "gain"), [(0.8, 4, 0.05, "2.8"), (0.4, 4, 0.05, "1.4"), (0.4, 8, 0.15, "0.76")]
)
def test_published_speed_ups(rate, length, cost, gain):
    digits = len(gain.partition(".")[2])
    assert f"{speedup(rate, length, draft_cost=cost):.{digits}f}" == gain


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 40])
def test_tokens_per_step_are_the_mean_over_all_outcomes(rate, length):
    exact = float(enumerated([rate] * length))
    assert expected_tokens(rate, length) == pytest.approx(exact, rel=1e-15)
    assert expected_tokens_by_depth([rate] * length) == pytest.approx(exact, rel=1e-14)


def test_tokens_per_step_by_depth_are_the_mean_over_all_outcomes():
    chance = random.Random(0)
    for length in [*range(8), 64]:
        rates = [chance.choice([chance.random(), 0.9, 1.0]) for _ in range(length)]
        assert expected_tokens_by_depth(rates) == pytest.approx(float(enumerated(rates)), rel=1e-14)
    assert expected_tokens_by_depth([0.5, 0.0, 1.0]) == 1.5  # nothing below a sure rejection counts
    assert expected_tokens_by_depth([0.25, 0.5]) != expected_tokens_by_depth([0.5, 0.25])


@pytest.mark.parametrize("rate", RATES)
def test_long_chains_keep_their_digits_next_to_one(rate):
    a = Fraction(rate)
    exact = Fraction(1025) if a == 1 else (1 - a**1025) / (1 - a)
    assert expected_tokens(rate, 1024) == pytest.approx(float(exact), rel=1e-15)


def test_the_ends_are_exact():
    assert [expected_tokens(1.0, length) for length in range(5)] == [1, 2, 3, 4, 5]
    assert [expected_tokens(0.0, length) for length in range(5)] == [1] * 5
    assert expected_tokens_by_depth([]) == 1.0


def test_numbers_of_other_types_are_computed_in_full_precision():
    found = expected_tokens(np.float32(0.8), np.int64(64))
    assert type(found) is float
    assert found == expected_tokens(float(np.float32(0.8)), 64)
    assert speedup(1, 3, draft_cost=Fraction(1, 4)) == 4 / 1.75


def test_tokens_per_step_grow_with_the_rate_and_the_length():
    rates = [i / 20 for i in range(1, 21)]
    for length in (1, 4, 16):
        tokens = [expected_tokens(rate, length) for rate in rates]
        assert all(a < b for a, b in pairwise(tokens))
    for rate in rates:
        tokens = [expected_tokens(rate, length) for length in range(8)]
        assert all(a < b for a, b in pairwise(tokens))


def test_the_speed_up_falls_with_every_cost():
    free = speedup(0.7, 5, draft_cost=0.0)
    assert free == expected_tokens(0.7, 5)
    assert speedup(0.7, 5, draft_cost=0.1) == pytest.approx(free / 1.5)
    assert speedup(0.7, 5, draft_cost=0.1, overhead=0.25) == pytest.approx(free / 1.75)
    assert speedup(0.7, 5, draft_cost=0.1, overhead=0.25, verify_cost=lambda n: n / 2) == pytest.approx(free / 3.75)


def test_the_target_verifies_the_root_too():
    sizes = []
    speedup(0.7, 7, draft_cost=0.1, verify_cost=lambda nodes: sizes.append(nodes) or 1.0)
    assert sizes == [8]
    assert speedup(0.7, 7, draft_cost=0.0, verify_cost=staircase) == expected_tokens(0.7, 7)
    assert speedup(0.7, 8, draft_cost=0.0, verify_cost=staircase) == expected_tokens(0.7, 8) / 1.6


def test_no_drafts_are_plain_decoding_without_overhead():
    assert speedup(0.7, 0, draft_cost=0.3, overhead=5.0) == 1.0
    assert speedup(0.7, 0, draft_cost=0.3, overhead=5.0, verify_cost=lambda nodes: 2.0 * nodes) == 0.5


@pytest.mark.parametrize("seed", range(12))
def test_the_best_length_is_that_of_brute_force(seed):
    draft, verify, overhead = random_costs(seed)
    found = set()
    for rate in RATES:
        verify_time = verify or (lambda nodes: 1.0)
        gains = [1 / verify_time(1)]
        for k in range(1, 21):
            tokens = float(enumerated([rate] * k))
            gains.append(tokens / (k * draft + verify_time(k + 1) + overhead))
        best = best_length(rate, draft_cost=draft, verify_cost=verify, overhead=overhead, longest=20)
        assert gains[best] == pytest.approx(max(gains), rel=1e-12)
        assert all(gain < max(gains) * (1 - 1e-12) for gain in gains[:best])
        found.add(best)
    assert len(found) > 1


def test_the_best_length_fills_the_step_of_a_staircase():
    assert best_length(0.95, draft_cost=0.01, verify_cost=staircase) % 8 == 7


def test_equal_speed_ups_give_the_shortest_chain():
    assert best_length(1.0, draft_cost=1.0) == 0  # every length is as fast as plain decoding
    assert best_length(0.0, draft_cost=0.0) == 0
    assert best_length(1.0, draft_cost=0.0, verify_cost=lambda nodes: 1.0 if nodes == 1 else nodes / 2) == 1


def test_the_longest_chain_is_a_limit():
    assert best_length(1.0, draft_cost=0.1) == 64
    assert best_length(1.0, draft_cost=0.1, longest=5) == 5
    assert best_length(1.0, draft_cost=0.1, longest=0) == 0


@pytest.mark.parametrize("cost", [0.05, 0.3, 0.7])
def test_drafts_pay_if_more_are_accepted_than_they_cost(cost):
    assert best_length(math.nextafter(cost, 0), draft_cost=cost) == 0
    assert best_length(cost, draft_cost=cost) == 0
    assert best_length(cost + 1e-9, draft_cost=cost) > 0
    assert break_even(1, draft_cost=cost) == pytest.approx(cost, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("length", [1, 3, 8, 30])
def test_at_break_even_the_speed_up_is_1_and_more_above(length, seed):
    draft, verify, overhead = random_costs(seed)
    costs = {"draft_cost": draft, "verify_cost": verify, "overhead": overhead}
    rate = break_even(length, **costs)
    assert rate is not None
    assert 0 < rate < 1
    assert speedup(rate, length, **costs) == pytest.approx(1, abs=1e-12)
    assert speedup(rate + 1e-9, length, **costs) > 1 > speedup(rate - 1e-9, length, **costs)


def test_break_even_of_drafts_that_always_or_never_pay():
    assert break_even(4, draft_cost=0.0) == 0.0
    assert break_even(4, draft_cost=0.0, verify_cost=lambda nodes: 0.5) == 0.0
    assert break_even(4, draft_cost=1.0) == 1.0  # if all are accepted, as fast as plain decoding
    assert break_even(4, draft_cost=1.01) is None
    assert break_even(1, draft_cost=0.1, overhead=1.0) is None


COSTS = {"draft_cost": 0.1}


@pytest.mark.parametrize("rate", [-0.01, 1.01, math.nan, math.inf, "0.5", None, 1j])
def test_impossible_rates_are_refused(rate):
    for call in (lambda: expected_tokens(rate, 2), lambda: speedup(rate, 2, **COSTS)):
        with pytest.raises(ValueError, match="accept_rate must be between 0 and 1, got"):
            call()
    with pytest.raises(ValueError, match="accept_rate must be between 0 and 1, got"):
        best_length(rate, **COSTS)
    with pytest.raises(ValueError, match=r"accept_rates\[1\] must be between 0 and 1, got"):
        expected_tokens_by_depth([0.5, rate])


@pytest.mark.parametrize("length", [-1, 2.0, math.nan, "3", None])
def test_impossible_lengths_are_refused(length):
    for call in (lambda: expected_tokens(0.5, length), lambda: speedup(0.5, length, **COSTS)):
        with pytest.raises(ValueError, match=f"length must be a whole number of at least 0, got {length!r}"):
            call()
    with pytest.raises(ValueError, match=f"longest must be a whole number of at least 0, got {length!r}"):
        best_length(0.5, **COSTS, longest=length)
    with pytest.raises(ValueError, match=f"length must be a whole number of at least 1 .*, got {length!r}"):
        break_even(length, **COSTS)


def test_no_drafts_have_no_break_even():
    with pytest.raises(ValueError, match=r"at least 1 \(0 drafts always break even\), got 0"):
        break_even(0, **COSTS)


@pytest.mark.parametrize("bad", [-0.01, math.nan, math.inf, "0.1", None])
@pytest.mark.parametrize("length", [0, 2])
def test_impossible_costs_are_refused(bad, length):
    cases = [
        ({"draft_cost": bad}, "draft_cost must be at least 0 and finite, got"),
        ({**COSTS, "overhead": bad}, "overhead must be at least 0 and finite, got"),
        ({**COSTS, "verify_cost": lambda nodes: bad}, r"verify_cost\(\d\) must be above 0 and finite, got"),
    ]
    for costs, message in cases:
        with pytest.raises(ValueError, match=message):
            speedup(0.5, length, **costs)
        with pytest.raises(ValueError, match=message):
            best_length(0.5, **costs)
        with pytest.raises(ValueError, match=message):
            break_even(2, **costs)


@pytest.mark.parametrize(
    ("verify", "message"),
    [(lambda nodes: 0.0, r"verify_cost\(3\) must be above 0 and finite, got 0\.0"), (1.2, "a function .*, got 1.2")],
)
def test_passes_that_take_no_time_or_are_no_function_are_refused(verify, message):
    with pytest.raises(ValueError, match=message):
        speedup(0.5, 2, draft_cost=0.0, verify_cost=verify)
