"""The controller's decisions, without a model: acceptance is drawn with known rates, and costs are given."""

import random
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from statistics import fmean
from types import SimpleNamespace

import pytest

from decode import Chain, DynamicTree, StaticTree
from decode.adaptive import Adaptive, Arm, Control, Estimates, conditional

NAN, INF = float("nan"), float("inf")
LARGE, MIDDLE, SMALL, GOOD = (0.5, 0.28, 0.16, 0.1), (0.42, 0.17), (0.33,), (0.8, 0.6, 0.42, 0.3)
ARMS = {
    "cheap": {LARGE: 1.30, MIDDLE: 1.12, SMALL: 1.05},
    "steep": {LARGE: 1.60, MIDDLE: 1.30, SMALL: 1.20},
    "good": {GOOD: 1.60},
    "batch": {LARGE: 2.10, MIDDLE: 1.50, SMALL: 1.30},
}
"""Times of a step by reach; those of `batch` are of 8 rows, the others of one."""
ROWS = {"cheap": 1, "steep": 1, "good": 1, "batch": 8}


class Head:
    """Drafts four tokens out of ten."""

    tree, feature_layers, vocabulary = None, (2, 5), None

    def drafter(self):
        return SimpleNamespace(max_depth=4, vocab_size=20, vocabulary=range(10))


def made(costs: dict[tuple[float, ...], float], rows: int = 1, **options) -> Adaptive:
    arms = tuple(Arm(Chain(len(reach)), {rows: cost}, reach) for reach, cost in costs.items())
    return Adaptive(Head(), arms, **options)


def simulate(
    settings: Adaptive, factor: Callable[[int, int], float], steps: int, *, rows: int = 1, seed: int = 0
) -> tuple[list[Arm | None], list[float], list[float]]:
    """Arms, costs and tokens of each step, if `factor(step, depth)` times as many drafts are right as calibrated."""
    chance, control = random.Random(seed), Control(settings)
    used, costs, tokens = [], [], []
    for step in range(steps):
        arm = control.choose(rows)
        accepted = [0] * rows
        for row in range(rows if arm is not None else 0):
            rates = enumerate(arm.rates)
            accepted[row] = next((d for d, rate in rates if chance.random() >= rate * factor(step, d)), len(arm.rates))
        control.learn(accepted)
        used.append(arm)
        costs.append(1.0 if arm is None else arm.cost(rows))
        tokens.append(1 + fmean(accepted))
    return used, costs, tokens


def gain(arm: Arm, factor: float, rows: int) -> float:
    """Tokens per time if the factor is the same at all depths."""
    rates = [min(1.0, factor * rate) for rate in arm.rates]
    return (1 + sum(accumulate(rates, mul))) / arm.cost(rows)


def regret(name: str, factor: float, steps: int, seeds: int) -> float:
    """Time of the controller over that of the best single arm, or of none, less 1; over many texts."""
    settings, rows = made(ARMS[name], ROWS[name]), ROWS[name]
    runs = [simulate(settings, lambda step, depth: factor, steps, rows=rows, seed=seed) for seed in range(seeds)]
    time = sum(sum(costs) for _, costs, _ in runs) / sum(sum(tokens) for *_, tokens in runs)
    return time * max(1.0, *(gain(arm, factor, rows) for arm in settings.arms)) - 1


@pytest.mark.parametrize(("name", "share"), [("cheap", 0.97), ("steep", 0.84), ("good", 1.0)])
def test_as_calibrated_the_best_arm_is_used_nearly_always(name, share):
    """`steep`: the next arm is 4 % slower."""
    settings = made(ARMS[name])
    best = max(settings.arms, key=lambda arm: gain(arm, 1.0, 1))
    used = [arm for seed in range(10) for arm in simulate(settings, lambda *_: 1.0, 512, seed=seed)[0]]
    assert used[0] is best
    assert fmean(arm is best for arm in used) >= share


@pytest.mark.parametrize("name", ["steep", "good"])
@pytest.mark.parametrize(("factor", "latest"), [(0.0, 9), (0.2, 35)])
def test_bad_drafts_are_soon_left_and_cost_little_in_all(name, factor, latest):
    for seed in range(15):
        used, costs, tokens = simulate(made(ARMS[name]), lambda *_: factor, 512, seed=seed)
        assert used.index(None) <= latest
        assert sum(costs) <= 1.03 * sum(tokens)


def test_trials_that_fail_lose_no_more_than_their_share():
    settings = made({LARGE: 1.5}, pause=20, trial=3, risk=1 / 64)
    used, costs, tokens = simulate(settings, lambda *_: 0.0, 2000)
    first = used.index(None)
    runs = "".join("-" if arm is None else "x" for arm in used[first:])
    assert runs.startswith("-" * 20 + ("xxx" + "-" * 96) * 19)  # 3 steps lose 1.5, which is the share of 96
    assert sum(costs[first:]) - sum(tokens[first:]) <= 2000 / 64 + 1.5


def test_a_trial_goes_on_while_it_gains_what_it_costs():
    control = Control(made({SMALL: 1.2}, pause=4, trial=2, risk=0.05))
    for _ in range(60):  # drafts nothing but for trials
        control.choose(1)
        control.learn([0])
    while control.choose(1) is None:
        control.learn([0])
    for accepted in (0, 1, 0, 0):  # tokens less costs: -0.2, +0.6, +0.4, +0.2
        control.learn([accepted])
        assert control.choose(1) is not None
    control.learn([0])
    assert control.choose(1) is not None  # 0.0
    control.learn([0])
    assert control.choose(1) is None


def test_the_pause_is_the_same_whenever_drafts_cease_to_pay():
    control, runs = Control(made({SMALL: 1.2}, pause=7)), ""
    for accepted, steps in ((0, 60), (1, 60), (0, 240)):
        for _ in range(steps):
            runs += "-" if control.choose(1) is None else "x"
            control.learn([accepted])
    first, last = (runs[start:].lstrip("x").index("x") for start in (0, 120))
    assert first == last == 7


@pytest.mark.parametrize(("name", "bound"), [("cheap", 64), ("steep", 360), ("good", 200)])
def test_drafting_comes_back_when_drafts_are_right_again(name, bound):
    found = []
    for seed in range(15):
        used, *_ = simulate(made(ARMS[name]), lambda step, _: 0.1 if step < 100 else 1.0, 550, seed=seed)
        drafted = [arm is not None for arm in used]
        found.append(next(step for step in range(100, 530) if sum(drafted[step : step + 20]) >= 18) - 100)
    assert max(found) <= bound
    assert sorted(found)[7] <= bound // 3


def test_deeper_drafts_that_are_right_again_are_found_although_the_small_arm_pays_all_the_while():
    def factor(step: int, depth: int) -> float:
        return 0.1 if depth and step < 128 else 1.0

    runs = [simulate(made({LARGE: 1.3, SMALL: 1.05}), factor, 512, seed=seed)[0] for seed in range(10)]
    assert fmean(arm is not None and arm.reach == SMALL for used in runs for arm in used[64:128]) > 0.4
    assert fmean(arm is not None and arm.reach == LARGE for used in runs for arm in used[256:]) > 0.95


@pytest.mark.parametrize(
    ("factors", "winner", "share"),
    [
        ((1.0,) * 4, LARGE, 0.97),
        ((1.4,) * 4, LARGE, 0.97),
        ((0.5,) * 4, SMALL, 0.9),
        ((1.0, 0.1, 0.1, 0.1), SMALL, 0.65),
        ((0.6, 1.6, 1.6, 1.6), LARGE, 0.9),
    ],
)
def test_of_a_small_and_a_large_arm_the_one_that_pays_more_wins(factors, winner, share):
    """Where only deeper drafts are bad, the large arm is tried again whenever that has faded from memory."""
    costs = {LARGE: 1.3, SMALL: 1.05}
    for order in (costs, dict(reversed(costs.items()))):
        used, *_ = simulate(made(order), lambda _, depth: factors[depth], 800, seed=1)
        assert fmean(arm is not None and arm.reach == winner for arm in used[150:]) > share


def test_costs_follow_the_rows_at_once():
    arms = (Arm(Chain(4), {1: 1.3, 8: 2.6}, LARGE), Arm(Chain(1), {1: 1.25, 4: 1.26, 8: 1.3}, SMALL))
    control = Control(Adaptive(Head(), arms, margin=0.0))
    chosen = [control.choose(rows) for rows in (8, 7, 4, 2, 1, 8)]
    assert [arms.index(arm) for arm in chosen] == [1, 1, 0, 0, 0, 1]
    assert control.choose(40) is None  # beyond the rows that were measured, costs go on along their line


@pytest.mark.parametrize(("promised", "drafts"), [(1.02, False), (1.04, True)])
def test_a_tree_must_promise_a_margin_over_plain_decoding(promised, drafts):
    arm = Arm(Chain(1), {1: 1.5 / promised}, (0.5,))
    assert (Control(Adaptive(Head(), (arm,))).choose(1) is not None) == drafts
    assert Control(Adaptive(Head(), (arm,), margin=0.0)).choose(1) is arm


def test_the_same_outcomes_give_the_same_arms_and_sessions_share_nothing():
    settings = made(ARMS["steep"])
    first = simulate(settings, lambda step, _: 0.2 + step / 200, 300, seed=3)
    simulate(settings, lambda *_: 0.0, 50)
    again = simulate(settings, lambda step, _: 0.2 + step / 200, 300, seed=3)
    assert first == again
    assert {arm and arm.reach for arm in first[0]} >= {None, LARGE}


def slow_tokens(arm: Arm, history, prior: float, half_life: float) -> float:
    """From all that was seen: at each depth accepted drafts over those expected of the steps that came so far."""
    total, reached, factor = 1.0, 1.0, 1.0
    for depth, rate in enumerate(conditional(arm.reach)):
        accepted = expected = 0.0
        for age, (used, numbers) in enumerate(reversed(history)):
            for number in numbers:
                if number >= depth and depth < len(used.reach):
                    accepted += 0.5 ** (age / half_life) * (number > depth)
                    expected += 0.5 ** (age / half_life) * conditional(used.reach)[depth]
        factor = (accepted + prior * rate * factor) / (expected + prior * rate)
        reached *= min(1.0, rate * factor)
        total += reached
    return total


@pytest.mark.parametrize(("prior", "half_life"), [(8.0, 64.0), (1.0, 3.0), (200.0, 1.0)])
def test_estimates_equal_those_from_the_whole_history(prior, half_life):
    chance = random.Random(5)
    arms = made(ARMS["cheap"] | {(0.9, 0.9, 0.3): 1.0}).arms
    estimates, history = Estimates(4, prior, half_life), []
    for _ in range(60):
        for arm in arms:
            assert estimates.tokens_per_step(arm) == pytest.approx(slow_tokens(arm, history, prior, half_life))
        arm = chance.choice(arms)
        history.append((arm, [chance.randint(0, len(arm.reach)) for _ in range(chance.choice((1, 1, 3)))]))
        estimates.learn(*history[-1])


def test_a_depth_learns_only_from_steps_that_came_to_it():
    """Nothing accepted says that first drafts are bad, and no more of the second than that it may be as bad."""
    (arm,) = made({(0.5, 0.25): 1.1}).arms
    estimates = Estimates(2, 8.0, 1e6)
    for _ in range(8):
        estimates.learn(arm, [0])
    assert estimates.tokens_per_step(arm) == pytest.approx(1 + 0.25 + 0.25 * 0.25, rel=1e-4)
    for _ in range(8):
        estimates.learn(arm, [2])
    assert estimates.tokens_per_step(arm) == pytest.approx(1 + 0.5 + 0.5 * 0.75, rel=1e-4)


@pytest.mark.parametrize("name", ARMS)
def test_a_text_of_any_length_and_quality_takes_little_longer_than_with_the_best_arm(name):
    for steps, worst, usual in ((64, 0.12, 0.035), (128, 0.07, 0.025), (512, 0.03, 0.015)):
        found = [regret(name, factor, steps, 24 // ROWS[name]) for factor in (0.1, 0.3, 0.5, 0.7, 1.0, 1.3)]
        assert max(found) < worst
        assert fmean(found) < usual


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": ()}, "at least one way of drafting; to draft nothing, leave it out"),
        ({"arms": (Arm(Chain(5), {1: 1.0}, ()),)}, "5 deep, but the head drafts 4"),
        ({"arms": (Arm(DynamicTree(2, 11, 30), {1: 1.0}, ()),)}, "11 children, but the head's vocabulary has 10"),
        *[({"prior": value}, "prior must be .* at least 0 and finite, got") for value in (-1, "8", NAN, INF)],
        *[({"half_life": value}, "half_life must be .* at least 1 ") for value in (0.5, 0, NAN, INF)],
        *[({"pause": value}, "pause must be a whole number of .*1, got") for value in (0, -3, 1.5, NAN)],
        *[({"trial": value}, "trial must be a whole number of .*1, got") for value in (0, 2.0)],
        *[({"risk": value}, "risk must be a share .*, got") for value in (0, 1.5, NAN, None)],
    ],
)
def test_settings_that_make_no_controller_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Adaptive(**{"head": Head(), "arms": made(ARMS["cheap"]).arms, **options})


@pytest.mark.parametrize(
    ("costs", "reach", "message"),
    [
        ({}, (0.5,), "for one number of rows or more, got costs {}"),
        *[({1: 1.2, 2: cost}, (0.5,), "above 0 and finite") for cost in (0.0, -1.0, NAN, INF)],
        ({0: 1.0}, (0.5,), "got costs {0: 1.0}"),
        *[
            ({1: 1.0}, reach, "fall from 1 to 0, got reach")
            for reach in ((1.1,), (0.5, 0.6), (0.5, -0.1), (NAN,), (0.5, NAN))
        ],
        ({1: 1.0}, (0.5, 0.4, 0.3, 0.2), "a tree 3 deep cannot accept 4 drafts"),
    ],
)
def test_arms_that_no_calibration_gives_are_refused(costs, reach, message):
    with pytest.raises(ValueError, match=message):
        Arm(StaticTree(((0,), (0, 0), (0, 0, 0))), costs, reach)


def test_an_arm_that_never_accepted_a_draft_is_no_error():
    settings = Adaptive(Head(), (Arm(Chain(2), {1: 1.1}, ()), Arm(Chain(2), {1: 1.2}, (0.0, 0.0))), prior=0.0)
    used, *_ = simulate(settings, lambda *_: 1.0, 200)
    assert used.count(None) > 150
    assert settings.max_nodes == 3
    assert settings.feature_layers == (2, 5)
