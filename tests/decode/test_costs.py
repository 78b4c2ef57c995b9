"""Costs of target passes: between the points on lines, refused where they are none, and measured fairly."""

import json
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from decode import Target, VerifyCosts, measure_costs
from decode.costs import MOST, Cost, on_lines, pass_sizes
from decode.session import Session


def cost(rows: int, nodes: int, seconds: float, context: int = 256) -> Cost:
    return Cost(rows, context, nodes, seconds, 0.9 * seconds, 1.2 * seconds)


ONE = cost(1, 1, 2.0)
COSTS = VerifyCosts(
    [
        cost(1, 9, 10.0),
        ONE,
        cost(1, 5, 4.0),
        cost(4, 1, 5.0),
        cost(4, 5, 7.0),
        cost(1, 1, 1.0, context=64),
        cost(1, 5, 8.0, context=64),
    ]
)


@pytest.mark.parametrize(
    ("points", "x", "y"),
    [
        ([(3, 7.0)], 1, 7.0),
        ([(3, 7.0)], 30, 7.0),
        ([(1, 2.0), (5, 4.0), (9, 10.0)], 1, 2.0),
        ([(1, 2.0), (5, 4.0), (9, 10.0)], 2, 2.5),
        ([(1, 2.0), (5, 4.0), (9, 10.0)], 5, 4.0),
        ([(1, 2.0), (5, 4.0), (9, 10.0)], 8, 8.5),
        ([(1, 2.0), (5, 4.0), (9, 10.0)], 9, 10.0),
        ([(1, 2.0), (5, 4.0), (9, 10.0)], 13, 16.0),
        ([(3, 6.0), (5, 8.0)], 1, 6.0),  # how cheap less work is was not measured
        ([(1, 3.0), (2, 1.0), (4, 2.0)], 1.5, 2.0),  # a measurement below the first is believed
        ([(1, 3.0), (2, 1.0), (4, 2.0)], 2, 1.0),
        ([(1, 3.0), (5, 1.0)], 3, 2.0),
        ([(1, 3.0), (5, 1.0)], 50, 1.0),  # but not that it goes on
    ],
)
def test_between_points_values_are_on_lines_that_go_on_but_do_not_fall(points, x, y):
    assert on_lines(points, x) == pytest.approx(y)


def test_seconds_are_on_lines_between_nodes_and_between_rows():
    assert COSTS.seconds(1, 3) == pytest.approx(3.0)
    assert COSTS.seconds(1, 7.5) == pytest.approx(7.75)
    assert COSTS.seconds(1, 17) == pytest.approx(22.0)
    assert COSTS.seconds(4, 3) == pytest.approx(6.0)
    assert COSTS.seconds(4, 9) == pytest.approx(9.0)
    assert COSTS.seconds(2, 1) == pytest.approx(3.0)
    assert COSTS.seconds(3, 3) == pytest.approx(5.0)
    assert COSTS.seconds(7, 3) == pytest.approx(9.0)
    assert COSTS.relative(1, 3) == pytest.approx(1.5)
    assert COSTS.relative(2, 5) == pytest.approx(5.0 / 3.0)
    assert COSTS.relative(4, 1) == 1


def test_the_nearest_context_that_was_measured_with_as_many_rows_is_used():
    assert COSTS.contexts(1) == [64, 256]
    assert COSTS.contexts(4) == [256]
    assert COSTS.seconds(1, 3, context=10) == pytest.approx(4.5)
    assert COSTS.seconds(1, 3, context=150) == pytest.approx(4.5)
    assert COSTS.seconds(1, 3, context=170) == pytest.approx(3.0)
    assert COSTS.seconds(4, 3, context=10) == pytest.approx(6.0)
    assert [point.nodes for point in COSTS.curve(1)] == [1, 5, 9]
    assert [point.seconds for point in COSTS.curve(1, 0)] == [1.0, 8.0]


def test_costs_survive_json():
    again = VerifyCosts.read(json.loads(json.dumps(COSTS.write())))
    assert again.points == COSTS.points
    assert all(isinstance(point, Cost) for point in again.points)
    assert again.seconds(3, 3) == COSTS.seconds(3, 3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "need a point of one row and one node"),
        ([cost(1, 2, 1.0), cost(2, 1, 1.0)], "need a point of one row and one node"),
        ([ONE, ONE], "two points of the same rows, context and nodes"),
        ([ONE, replace(ONE, seconds=9.0)], "two points of the same rows, context and nodes"),
    ],
)
def test_points_that_make_no_curve_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        VerifyCosts(points)


@pytest.mark.parametrize(
    "form",
    [
        7,
        None,
        "costs",
        {"rows": 1},
        [[1, 256, 1, 0.1, 0.1, 0.1]],
        [{"rows": 1, "context": 256, "nodes": 1, "seconds": 0.1, "low": 0.1}],
        [{**asdict(ONE), "mean": 0.1}],
        *([{**asdict(ONE), name: value}] for name in ("rows", "context", "nodes") for value in (0, 1.5, "1", None)),
        *([{**asdict(ONE), name: value}] for name in ("seconds", "low", "high") for value in (-1.0, "1", None, 1e999)),
        [{**asdict(ONE), "seconds": float("nan")}],
        [{**asdict(ONE), "seconds": 0.0}],
        [asdict(ONE), {**asdict(ONE), "rows": 2, "seconds": 0.0}],
    ],
)
def test_what_is_no_list_of_costs_is_refused(form):
    with pytest.raises(ValueError, match="cost"):
        VerifyCosts.read(form)


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int, int]]:
    """Rows, committed tokens of the longest and nodes of each real pass."""
    seen: list[tuple[int, int, int]] = []
    score = Session.score

    def spy(session, trees):
        context = session.lengths[0]
        assert session.lengths == [max(1, context - row) for row in range(len(trees))]  # rows differ in length
        seen.append((len(trees), context, *{tree.shape.size for tree in trees}))
        return score(session, trees)

    monkeypatch.setattr(Session, "score", spy)
    return seen


def sizes(costs: VerifyCosts) -> list[tuple[int, int, int]]:
    return [(point.rows, point.context, point.nodes) for point in costs.points]


def test_all_sizes_that_are_wanted_are_measured_and_no_others(small_target, passes):
    costs = measure_costs(small_target, nodes=(5, 3, 3), rows=(2, 4), contexts=(20, 9, 20, 252), repeats=3)
    first = [(rows, 20, nodes) for rows in (1, 2, 4) for nodes in (1, 3, 5)]
    assert sizes(costs) == sorted([*first, *((1, 9, nodes) for nodes in (1, 3, 5))])  # 252 + 5 are above 256
    assert sorted(passes) == sorted(4 * sizes(costs))  # in rounds, and one to warm up
    assert passes[:6] == [(1, 20, 1), (1, 20, 3), (1, 20, 5)] * 2
    assert all(0 < point.low <= point.seconds <= point.high for point in costs.points)


def test_passes_over_all_rows_together_are_not_too_large_but_those_of_the_two_smallest_sizes(small_target, passes):
    costs = measure_costs(small_target, nodes=(4, 64, 100), rows=(1, 3, 300), contexts=(8,), repeats=1)
    measured = {1: (1, 4, 64, 100), 3: (1, 4, 64), 300: (1, 4)}
    assert sizes(costs) == [(rows, 8, nodes) for rows, found in measured.items() for nodes in found]
    assert all(rows * nodes <= MOST or nodes <= 4 for rows, _, nodes in passes)


def test_many_rows_have_a_slope(small_target, monkeypatch):
    clock = [0.0]

    def score(session, trees):
        clock[0] += 2.0 + 0.5 * trees[0].shape.size
        return SimpleNamespace(logits=torch.zeros(1, 1, 3))

    monkeypatch.setattr(Session, "score", score)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    costs = measure_costs(small_target, rows=(200,), contexts=(8,), repeats=1)
    assert [costs.seconds(200, nodes) for nodes in (1, 2, 8)] == pytest.approx([2.5, 3.0, 6.0])


@pytest.mark.parametrize(
    ("most", "contexts", "measured"), [(56, (200,), [200]), (57, (200, 201), [199]), (255, (9,), [1])]
)
def test_a_context_with_its_tree_is_as_long_as_the_target_allows(small_target, passes, most, contexts, measured):
    costs = measure_costs(small_target, nodes=(most,), contexts=contexts, repeats=1)
    assert costs.contexts(1) == measured
    assert max(context + nodes for _, context, nodes in passes) <= small_target.max_length == 256


def test_what_cannot_be_measured_is_refused(small_target):
    with pytest.raises(ValueError, match=r"a tree of 256 nodes is not below the target's context, 256; measure small"):
        measure_costs(small_target, nodes=(4, 256))
    for options in ({"nodes": (0, 2)}, {"rows": (0,)}, {"contexts": (0,)}, {"contexts": (5, -1)}, {"repeats": 0}):
        with pytest.raises(ValueError, match="numbers of at least 1, got nodes"):
            measure_costs(small_target, **options)


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_medians_and_quartiles_are_those_of_the_rounds_behind_the_first(small_target, monkeypatch, repeats):
    clock = [100.0]
    rounds: dict[tuple[int, int], int] = {}

    def score(session, trees):
        key = (len(trees), trees[0].shape.size)
        number = rounds[key] = rounds.get(key, -1) + 1
        clock[0] += 1000.0 if number == 0 else key[0] + 0.5 * key[1] + (number * number)
        return SimpleNamespace(logits=torch.zeros(len(trees), trees[0].shape.size, 3))

    monkeypatch.setattr(Session, "score", score)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    costs = measure_costs(small_target, nodes=(4,), rows=(2,), contexts=(8,), repeats=repeats)
    quartiles = {1: (1.0, 1.0, 1.0), 2: (1.75, 2.5, 3.25), 5: (4.0, 9.0, 16.0)}[repeats]  # of the first squares
    for point in costs.points:
        own = point.rows + 0.5 * point.nodes
        assert (point.low, point.seconds, point.high) == pytest.approx([own + spread for spread in quartiles])
    assert len(costs.points) == 4


def test_the_largest_pass_has_room_even_in_a_small_context(make_tiny_llama):
    target = Target(make_tiny_llama(vocab_size=16, dtype=torch.float32))
    costs = measure_costs(target, nodes=(1, 128), rows=(2,), contexts=(128, 3), repeats=1)
    assert sizes(costs)[-1] == (2, 128, 128)
    assert costs.contexts(1) == [3, 128]


@pytest.mark.parametrize(("most", "last"), [(4, [2, 3, 4]), (64, [32, 48, 64]), (200, [96, 128, 192])])
def test_larger_passes_are_measured_where_larger_trees_are_asked_for(most, last):
    sizes = pass_sizes(most)
    assert sizes[0] == 1
    assert sizes[-3:] == last
    assert sizes == sorted(set(sizes))
