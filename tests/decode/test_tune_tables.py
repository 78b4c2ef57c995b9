"""What `decode.tune` prints: every way has a name, every figure its place."""

import json

import pytest

from decode import Sampling, Stats, VerifyCosts, tune
from decode.choose import Measured, Search
from decode.costs import Cost
from decode.formulas import speedup
from decode.grow import Chain
from decode.replay import Replayed
from decode.tune_tables import checked_table, name_way, tables
from decode.tuned import Choice, Plan, TunedArm


def test_ways_are_named_by_their_nodes():
    assert name_way([[0], [0, 0], [0, 0, 0]]) == "chain of 3"
    assert name_way([[0], [1], [0, 0]]) == "static tree of 4"
    settings = {"depth": 5, "width": 4, "size": 16, "confidence": 0.0}
    assert name_way(settings) == "dynamic tree of 16, depth 5, width 4"
    assert name_way({**settings, "depth": 1}) == "dynamic tree of 5, depth 1, width 4"  # a root and four children
    assert name_way({**settings, "confidence": 0.06}) == "dynamic tree of 16, depth 5, width 4, confidence 0.06"


def point(rows: int, nodes: int, seconds: float, context: int = 8) -> dict[str, float]:
    return {"rows": rows, "context": context, "nodes": nodes, "seconds": seconds, "low": seconds, "high": 1.5 * seconds}


def test_tables_hold_what_was_measured():
    costs = [point(1, 1, 0.002), point(1, 4, 0.003), point(1, 1, 0.004, 16), point(1, 4, 0.004, 16), point(2, 1, 0.005)]
    found = {
        "acceptance": [[0.5, 0.25], [0.125, 0.0]],
        "accept_rate": {"value": 0.7, "low": 0.6, "high": 0.75},
        "chains": {"1": 0.25, "2": None, "3": 0.0},
        "texts": 9,
    }
    around = {"value": 1.5, "low": 1.25, "high": 2.0}
    checked = {"prompts": 3, "predicted": 1.75, "fixed": around, "adaptive": around, "differences": 2, "unexcused": 1}
    by_temperature = {name: {**found, "checked": checked} for name in ("0", "0.5", "1")}
    choices = [
        Choice(0.0, 1, 1, 2.5, 1.25, 2.0),
        Choice(0.5, 2, 0, 3.0, 2.0, 1.5),
        Choice(1.0, 4, None, 1.0, 1.0, 1.125),
    ]
    arms = [TunedArm([[0], [0, 0]], {}, {}), TunedArm([[0], [1]], {}, {})]
    plan = Plan(arms, choices, costs, made={"by_temperature": by_temperature})
    printed = f"{tables(plan)}\n{checked_table(plan)}"
    rows = [" ".join(line.replace("|", " ").split()) for line in printed.splitlines()]
    for expected in (
        "rows context one node spread 4",
        "1 8 2.0 ms 50% 1.50",
        "1 16 4.0 ms 50% 1.00",
        "2 8 5.0 ms 50%",
        "T depth rank 1 rank 2",
        "0 1 0.50 0.25",
        "0.5 2 0.12 0.00",
        "T=1: a chain's drafts are accepted at a rate of 0.70 [0.60, 0.75] (9 texts); chains of "
        "1 pay from 0.25 on, 2 never pay, 3 pay from 0.00 on",
        "T rows draft tokens per step needed to pay speed-up",
        "0 1 static tree of 3 2.50 2.00 1.25",
        "0.5 2 chain of 2 3.00 1.50 2.00",
        "1 4 nothing 1.00 1.12 1.00",
        "T prompts predicted fixed adaptive texts that differ",
        "0.5 3 1.75 1.50 [1.25, 2.00] 1.50 [1.25, 2.00] 2, 1 without a near tie",
    ):
        assert rows.count(expected) == 1, expected
    unchecked = Plan(arms, choices, costs, made={"by_temperature": {"0": found}})
    assert "Prediction" not in tables(unchecked)


def test_the_rate_of_chains_is_that_of_the_longest(tiny_head):
    search = Search(None, tiny_head, [1, 2], Sampling(), None)
    ways = {
        "chain of 1": ([[0]], [Stats(offered=[10], accepted=[9])] * 2),
        "chain of 2": (
            [[0], [0, 0]],
            [Stats(offered=[10, 4], accepted=[4, 3]), Stats(offered=[6, 0], accepted=[1, 0])],
        ),
        "tree": ([[0], [1], [0, 0]], [Stats(offered=[10], accepted=[10])] * 2),
        "dynamic": ({"depth": 5, "width": 1, "size": 6}, [Stats(offered=[10], accepted=[10])] * 2),
    }
    for name, (way, stats) in ways.items():
        search.found[name] = Measured(way, Replayed(Stats.total(stats), stats, [], 0.0, 0.0), {1: 0.0}, {1: 0.0})
    rate = tune._chain_rate(search)
    assert rate.value == pytest.approx(8 / 20)
    assert rate.low == pytest.approx(1 / 6)
    assert rate.high == pytest.approx(7 / 14)


def test_chains_pay_from_the_rate_at_which_their_tokens_make_up_for_a_steps_time(tiny_head):
    costs = VerifyCosts([Cost(1, 8, 1, 2.0, 2.0, 2.0), Cost(1, 8, 5, 2.8, 2.8, 2.8), Cost(2, 8, 1, 9.0, 9.0, 9.0)])
    search = Search(None, tiny_head, [1, 2], Sampling(), costs)
    for length, drafting in ((1, 0.4), (2, 0.8), (3, 9.0), (4, 0.0)):
        way = [list(path) for path in Chain(length).paths]
        sizes = [[1 if length == 4 else length + 1]]  # texts that end at once offer no tree
        replayed = Replayed(Stats(), [], sizes, 7.0, 7.0)
        search.found[json.dumps(way)] = Measured(way, replayed, {1: drafting, 16: 9.0}, {1: 0.0, 16: 9.0})
    rates = tune._chains(search, costs)
    assert list(rates) == ["1", "2", "3", "4"]
    assert rates["1"] == pytest.approx(0.1 + 0.2)  # 1 + a tokens in the time of 2.2 / 2 + 0.4 / 2 plain steps
    assert rates["2"] ** 2 + rates["2"] == pytest.approx(0.2 + 0.4)
    assert rates["3"] is None
    assert speedup(rates["4"], 4, draft_cost=0.0, verify_cost=lambda nodes: 1.4) == pytest.approx(1.0)
