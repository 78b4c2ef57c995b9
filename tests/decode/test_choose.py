"""The search for the fastest tree: what it measures, what it predicts, and that it finds the best."""

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from decode import Drafting, DynamicTree, Sampling, Stats, VerifyCosts, choose
from decode.choose import CHAINS, LADDERS, SHORT, Measured, Search, ladder
from decode.costs import Cost
from decode.formulas import expected_tokens_by_depth
from decode.propose import to_grow
from decode.ranks import NOT_RANKED, Ranked, best_tree, rank_texts
from decode.replay import Replayed, write_texts
from heads import create_head
from heads.medusa import MedusaConfig

FLAT = VerifyCosts([Cost(1, 256, 1, 1.0, 1.0, 1.0)])
"""Every pass takes a second."""
TEXTS = list(range(20))
"""What the replay below never looks at."""


@dataclass(frozen=True)
class Drafts:
    """What the search asks a head for."""

    max_depth: int
    columns: int
    few: bool = False
    tree: None = None
    feature_layers: tuple[int, ...] = ()
    vocab_size: int = 320

    def drafter(self) -> "Drafts":
        return self if self.few else Drafts(self.max_depth, self.columns, vocab_size=self.columns)

    @property
    def vocabulary(self) -> torch.Tensor | None:
        return torch.arange(self.columns) if self.few else None


def steps(tokens_per_step: float, accepted: list[int] | None = None) -> Stats:
    return Stats(rows=1, steps=10**6, tokens=1 + round(1e6 * tokens_per_step), accepted=accepted or [])


def fake_replay(monkeypatch, value) -> list[tuple[str, int]]:
    """Let a way give `value(grow)` tokens per step; returns what is asked for."""
    calls: list[tuple[str, int]] = []

    def replayed(target, texts, proposer, *, sampling, rows, max_new_tokens=None):
        assert isinstance(proposer, Drafting)
        calls.append((repr(proposer.grow), rows))
        assert list(texts) == (TEXTS if rows > 1 else TEXTS[:SHORT])
        stats = steps(value(proposer.grow))
        return Replayed(stats, [stats], [[1] * rows], 0.001 * rows, 0.0001 * rows)

    monkeypatch.setattr(choose, "replay", replayed)
    return calls


def guesses(depth: int, columns: int, *, seed: int = 0) -> list[Ranked]:
    chance = random.Random(seed)
    ranks = [[min(int(chance.expovariate(1.0)), columns) for _ in range(depth)] for _ in range(200)]
    return [Ranked(torch.tensor([[NOT_RANKED if rank == columns else rank for rank in row] for row in ranks]))]


def search(drafts: Drafts, *, most_nodes: int = 64, costs: VerifyCosts = FLAT) -> Search:
    found = Search(None, drafts, TEXTS, Sampling(), costs)
    found.run(guesses(min(drafts.max_depth, 6), drafts.columns), most_nodes=most_nodes)
    return found


def index(grow, name: str) -> int:
    return LADDERS[name].index(getattr(grow, name))


PEAKS = list(itertools.product(*(LADDERS[name] for name in LADDERS)))


@pytest.mark.parametrize("seed", range(12))
def test_the_best_setting_of_a_landscape_with_one_peak_is_found_and_nothing_is_measured_twice(monkeypatch, seed):
    peak = dict(zip(LADDERS, random.Random(seed).choice(PEAKS), strict=True))

    def value(grow) -> float:
        if not isinstance(grow, DynamicTree):
            return 1.5
        return 2 + 1 / (1 + sum(abs(index(grow, name) - LADDERS[name].index(peak[name])) for name in LADDERS))

    calls = fake_replay(monkeypatch, value)
    found = search(Drafts(8, 320))
    assert found.best(1).way == peak
    assert found.best(1).speedup(FLAT, 1) == pytest.approx(3.0, rel=0.01)
    assert set(Counter(calls).values()) == {1}
    assert {rows for _, rows in calls} == {1, 16}
    assert len(calls) == 2 * len(found.found) < 150


def test_settings_that_depend_on_each_other_are_visited_again(monkeypatch):
    def value(grow) -> float:
        if not isinstance(grow, DynamicTree):
            return 1.0
        mismatch = abs(index(grow, "size") - index(grow, "depth") - 2)
        return 8 - 0.25 * mismatch - 0.5 * abs(index(grow, "depth") - 6) - (grow.confidence > 0) - (grow.width != 4)

    fake_replay(monkeypatch, value)
    found = search(Drafts(8, 320))
    assert found.best(1).way == {"depth": 8, "width": 4, "size": LADDERS["size"][8], "confidence": 0.0}


@pytest.mark.parametrize("most_nodes", [2, 3, 4, 5, 7, 9, 11, 64])
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (1, 320), (3, 2), (4, 3), (256, 320)])
@pytest.mark.parametrize("few", [False, True])
def test_limits_are_kept(monkeypatch, most_nodes, depth, columns, few):
    fake_replay(monkeypatch, lambda grow: 1 + grow.max_nodes + grow.depth + grow.width)  # more is better
    found = search(Drafts(depth, columns, few), most_nodes=most_nodes)
    grows = [to_grow(measured.way) for measured in found.found.values()]
    assert all(grow.depth <= min(depth, 8) and grow.width <= columns for grow in grows)
    assert all(grow.max_nodes <= most_nodes for grow in grows)
    static = {json.dumps(m.way) for m in found.found.values() if isinstance(m.way, list)}
    chains = [json.dumps([[0] * (d + 1) for d in range(n)]) for n in range(1, 9)]
    allowed = min(depth, most_nodes - 1, CHAINS)
    assert static >= set(chains[:allowed])
    ranked = guesses(min(depth, 6), columns)
    sizes = [size for size in choose.STATIC_SIZES if size <= most_nodes]
    assert static - set(chains) == {json.dumps(best_tree(ranked, size)) for size in sizes} - set(chains)
    dynamic = [m.way for m in found.found.values() if not isinstance(m.way, list)]
    assert min(10, most_nodes) in {way["size"] for way in dynamic}


def test_a_head_that_drafts_one_token_can_be_tuned(small_target):
    head = create_head(
        "medusa", MedusaConfig(hidden_size=32, vocab_size=16, num_heads=2, draft_vocab_size=1), small_target
    ).double()
    head.set_vocabulary(torch.tensor([12]))
    sampling = Sampling(temperature=0.8, seed=1)
    texts = write_texts(small_target, [[3], [5, 9]], sampling=sampling, max_new_tokens=6, feature_layers=())
    found = Search(small_target, head, texts, sampling, FLAT)
    found.run(rank_texts(head, texts, sampling=sampling), most_nodes=5)
    assert found.best(1).tokens_per_step >= 1
    assert {to_grow(measured.way).width for measured in found.found.values()} == {1}
    assert all(set(measured.draft_seconds) == {1, 2} for measured in found.found.values())


def test_one_text_is_measured_alone(monkeypatch):
    results = [Replayed(steps(1.5), [], [[1]], seconds, seconds / 2) for seconds in (9.0, 0.5)]
    monkeypatch.setattr(choose, "replay", lambda *args, **options: results.pop())
    found = Search(None, Drafts(2, 8), TEXTS[:1], Sampling(), FLAT)
    assert found.measure([[0]]).draft_seconds == {1: 0.5}
    assert found.measure([[0]]).other_seconds == {1: 0.25}
    assert len(results) == 1


def test_drafting_and_the_loop_are_timed_for_batches_and_for_single_rows(monkeypatch):
    fake_replay(monkeypatch, lambda grow: 2.0)
    measured = Search(None, Drafts(2, 8), TEXTS, Sampling(), FLAT).measure([[0]])
    assert measured.draft_seconds == {1: 0.001, 16: 0.016}
    assert measured.other_seconds == {1: 0.0001, 16: 0.0016}


COSTS = VerifyCosts(
    [Cost(rows, 256, nodes, rows + 0.1 * rows * (nodes - 1), 0.0, 0.0) for rows in (1, 3) for nodes in (1, 11)]
)
"""rows + 0.1 for every further node of every row."""
TEXTS_OF_THREE = [Stats(steps=steps, tokens=tokens) for steps, tokens in ((3, 8), (2, 4), (1, 3))]
MEASURED = Measured(
    [[0]],
    Replayed(Stats(rows=3, steps=6, tokens=15, accepted=[4, 2]), TEXTS_OF_THREE, [[3, 5, 2], [4, 4], [7]], 9.0, 9.0),
    {1: 0.2, 3: 0.6},
    {1: 0.1, 3: 0.5},
)


@pytest.mark.parametrize(
    ("rows", "nodes", "draft", "verify", "plain", "other"),
    [
        (1, [3, 5, 2, 4, 4, 7], 0.2, 1 + 0.1 * 19 / 6, 1.0, 0.1),
        (2, [5, 2, 4, 7], 0.4, 2 + 0.2 * 14 / 4, 2.0, 0.3),
        (3, [5, 4, 7], 0.6, 3 + 0.3 * 13 / 3, 3.0, 0.5),
        (4, [5, 4, 7], 0.8, 4 + 0.4 * 13 / 3, 4.0, 0.7),
    ],
)
def test_predictions_are_sums_of_what_was_measured(rows, nodes, draft, verify, plain, other):
    assert MEASURED.nodes(rows) == nodes
    assert MEASURED.step_seconds(COSTS, rows) == pytest.approx(draft + verify + other)
    assert MEASURED.plain_seconds(COSTS, rows) == pytest.approx(plain + other)
    assert MEASURED.tokens_per_step == 2.0
    assert MEASURED.reach == (4 / 6, 2 / 6)


def step_by_step(lengths: list[int], seconds) -> float:
    """The time of a batch whose rows take so many steps each."""
    return sum(seconds(COSTS, sum(length > step for length in lengths)) for step in range(max(lengths)))


@pytest.mark.parametrize(
    ("rows", "batches"), [(1, ((0,), (1,), (2,))), (2, ((0, 1),)), (3, ((0, 1, 2),)), (5, ((0, 1, 2, 0, 1),))]
)
def test_batches_go_on_until_their_last_text_ends(rows, batches):
    plain, drafted = (
        sum(step_by_step([lengths[i] for i in batch], seconds) for batch in batches)
        for lengths, seconds in (((7, 3, 2), MEASURED.plain_seconds), ((3, 2, 1), MEASURED.step_seconds))
    )
    assert MEASURED.speedup(COSTS, rows) == pytest.approx(plain / drafted)
    assert MEASURED.cost(COSTS, rows) == pytest.approx(2.0 * drafted / plain)


def test_a_text_without_accepted_drafts_eats_up_the_gain_of_its_batch():
    texts = [Stats(steps=2, tokens=11), Stats(steps=10, tokens=11)]
    measured = Measured([[0]], Replayed(Stats.total(texts), texts, [[1]], 0.0, 0.0), {1: 0.0}, {1: 0.0})
    assert measured.speedup(FLAT, 1) == pytest.approx(20 / 12)
    assert measured.speedup(FLAT, 2) == pytest.approx(10 / 10)


def test_what_took_no_step_gains_nothing():
    nothing = Measured([[0]], Replayed(Stats(), [], [], 0.0, 0.0), {1: 0.0}, {1: 0.0})
    assert (nothing.reach, nothing.nodes(2), nothing.tokens_per_step) == ((), [], 1.0)
    assert nothing.speedup(COSTS, 2) == 1


def filled(seed: int) -> Search:
    """A search that has measured ways of all kinds."""
    chance = random.Random(seed)
    found = Search(None, Drafts(8, 320), TEXTS, Sampling(), COSTS)
    for number in range(12):
        falling = sorted((chance.randint(0, 10**6) for _ in range(chance.randint(0, 6))), reverse=True)
        tokens = 1 + sum(falling) / 10**6
        sizes = [[chance.randint(1, 3 * number + 1) for _ in range(4)] for _ in range(5)]
        way = {"depth": 6, "width": 2, "size": number + 1}
        stats = steps(tokens, falling)
        replayed = Replayed(stats, [stats], sizes, 0.1, 0.01)
        drafting, loop = {1: chance.random(), 16: 3 * chance.random()}, {1: 0.01, 16: 0.05}
        found.found[json.dumps(way)] = Measured(way, replayed, drafting, loop)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_ladder_holds_the_best_of_every_temperature_and_batch_size(seed):
    searches = {0.0: filled(seed), 1.0: filled(seed + 100)}
    rows = (1, 2, 8)
    ways = ladder(searches, COSTS, rows)
    assert all(found.best(batch).way in ways for found in searches.values() for batch in rows)
    assert len(ways) == len({json.dumps(way) for way in ways})
    for found, batch, factor in itertools.product(searches.values(), rows, (0.5, 0.75, 1.0, 1.25)):

        def gain(measured: Measured, batch: int = batch, factor: float = factor) -> float:
            """If drafts were accepted so much more or less often at every depth."""
            rates = [now / (before or 1) for before, now in itertools.pairwise((1.0, *measured.reach))]
            return expected_tokens_by_depth([min(1.0, factor * r) for r in rates]) / measured.cost(COSTS, batch)

        assert max(found.found.values(), key=gain).way in ways
    assert len(ladder({0.0: searches[0.0]}, COSTS, (1,))) <= 4
