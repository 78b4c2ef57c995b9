"""Lookup that chooses its length: equal to a slow version of itself, long where text repeats, absent where it fails."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from decode import AdaptiveLookup, PromptLookup, Sampling, VerifyCosts, generate
from decode.adaptive_lookup import AgreementRates, Found, _AdaptiveState, pass_seconds
from decode.checks import StateError
from decode.costs import Cost
from decode.formulas import expected_tokens_by_depth
from decode.sampling import Sampler

SIZES = (1, 2, 4, 8, 16, 32)
PRIORS = {1: 0.15, 2: 0.3, 3: 0.5, 5: 0.7, 9: 0.85, 17: 0.95}


def made_costs(seconds: Callable[[int, int], float], rows: tuple[int, ...] = (1,)) -> VerifyCosts:
    return VerifyCosts([Cost(b, 256, n, seconds(b, n), 0.0, 0.0) for b in rows for n in SIZES])


def sloped(slope: float) -> VerifyCosts:
    return made_costs(lambda rows, nodes: 1.0 + slope * (nodes - 1))


def sampler(text: list[int]) -> Sampler:
    return Sampler(Sampling(seed=0), 0, text)


def bucket_of(length: int) -> int:
    return max(start for start in PRIORS if start <= length)


class Slow:
    """The proposer again: it keeps all outcomes, searches all of the text, and tries all sizes."""

    def __init__(self, settings: AdaptiveLookup, rows: int) -> None:
        self.settings = settings
        self.outcomes: list[tuple[int, bool]] = []
        self.last: list[tuple[list[int], int, int] | None] = [None] * rows

    def propose(self, texts: list[list[int]]) -> list[list[int]]:
        for text, last in zip(texts, self.last, strict=True):
            if last is not None:
                before, place, length = last
                predicted = self.continuation(before, place)
                for depth, (guess, token) in enumerate(zip(predicted, text[len(before) :], strict=False)):
                    agreed = guess == token
                    self.outcomes.append((length + depth, agreed))
                    if not agreed:
                        break
        self.last = [self.match(*pair) for pair in zip(texts, self.last, strict=True)]
        self.rates = {bucket: self.rate(bucket) for bucket in PRIORS}
        drafts = max(range(self.settings.longest + 1), key=self.gain)  # the smallest of equals
        return [[] if found is None else self.continuation(*found[:2])[:drafts] for found in self.last]

    def match(self, text, last):
        size = next((n for n in (3, 2, 1) if text[-n:] in [text[i : i + n] for i in range(len(text) - n)]), None)
        if size is None:
            return None
        places = [max(i + size for i in range(len(text) - size) if text[i : i + size] == text[-size:])]
        if last is not None:
            places.append(last[1] + len(text) - len(last[0]))
        lengths = []
        for place in places:
            pairs = zip(reversed(text[:place]), reversed(text), strict=False)
            lengths.append(min(32, len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))))
        longer = lengths[-1] > lengths[0]
        return list(text), places[-longer], lengths[-longer]

    def continuation(self, text: list[int], place: int) -> list[int]:
        text, end = list(text), len(text)
        for ahead in range(self.settings.longest):
            text.append(text[place + ahead])
        return text[end:]

    def rate(self, bucket: int) -> float:
        results = [agreed for length, agreed in self.outcomes if bucket_of(length) == bucket]
        weights = [0.5 ** (age / 100) for age in reversed(range(len(results)))]
        agreed = sum(weight for weight, result in zip(weights, results, strict=True) if result)
        strength = self.settings.prior_strength
        return (PRIORS[bucket] * strength + agreed) / (strength + sum(weights))

    def gain(self, drafts: int) -> float:
        lengths = [None if found is None else found[2] for found in self.last]
        rates = [[] if n is None else [self.rates[bucket_of(n + depth)] for depth in range(drafts)] for n in lengths]
        tokens = sum(map(expected_tokens_by_depth, rates))
        return tokens / pass_seconds(self.settings.costs, len(self.last), drafts + 1, 256)


def proposed(state, rows: list[Sampler]) -> list[list[int]]:
    trees = state.propose(torch.tensor([row.context[-1] for row in rows]), rows)
    assert [int(tree.token_ids[0]) for tree in trees] == [row.context[-1] for row in rows]
    assert all(tree.shape.parents == tuple(range(-1, tree.shape.size - 1)) for tree in trees)
    return [tree.token_ids[1:].tolist() for tree in trees]


def advance(row: Sampler, drafts: list[int], whole: list[int]) -> int:
    """Give a row the drafts that its text really has and one token more; return the number of those drafts."""
    ahead = whole[len(row.context) :]
    accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(drafts, ahead, strict=False))))
    row.context += ahead[: accepted + 1]
    return accepted


def steps(proposer, whole: list[int], start: int) -> list[tuple[int, int]]:
    """Decode a text from some token on; for each step, how many tokens were proposed and how many accepted."""
    row, state, counts = sampler(whole[:start]), proposer.begin(1, shared_noise=True), []
    while len(row.context) < len(whole):
        (drafts,) = proposed(state, [row])
        counts.append((len(drafts), advance(row, drafts, whole)))
    return counts


def some_text(chance: random.Random, size: int) -> list[int]:
    """Noise and copies of what was there before, both in pieces."""
    text = [chance.randrange(9) for _ in range(6)]
    while len(text) < size:
        start, length = chance.randrange(len(text)), chance.choice((2, 5, 12, 50))
        copied = chance.random() < 0.7
        for ahead in range(length):
            text.append(text[start + ahead] if copied else chance.randrange(9))
    return text[:size]


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_its_slow_version_while_texts_grow_and_rows_leave(seed):
    chance = random.Random(seed)
    settings = AdaptiveLookup(
        made_costs(lambda rows, nodes: rows**0.3 + chance.uniform(0, 0.3) * nodes, rows=(1, 2)),
        longest=(32, 7, 1, 32)[seed],
        prior_strength=(8.0, 1.0)[seed % 2],
    )
    wholes = [some_text(chance, size) for size in (50, 90, 130, 170)]
    rows = [sampler(whole[: chance.randint(1, 40)]) for whole in wholes]
    state, slow, lengths = settings.begin(len(rows), shared_noise=True), Slow(settings, len(rows)), set()
    while rows:
        drafts = proposed(state, rows)
        assert drafts == slow.propose([row.context for row in rows])
        assert proposed(state, rows) == drafts  # asking again teaches nothing
        lengths |= set(map(len, drafts))
        for row, tokens, whole in zip(rows, drafts, wholes, strict=True):
            advance(row, tokens, whole)
        state.check(rows, torch.empty(0))
        kept = [b for b, row in enumerate(rows) if len(row.context) < len(wholes[b])]
        chance.shuffle(kept)
        state.keep(kept)
        rows, wholes, slow.last = ([some[b] for b in kept] for some in (rows, wholes, slow.last))
    assert 0 in lengths
    assert len(lengths) > 1


@pytest.mark.parametrize("measured", [(1,), (1, 4)])
def test_rows_beyond_those_measured_cost_as_many_nodes_in_fewer_rows(measured):
    costs = made_costs(lambda rows, nodes: 1.0 + 0.1 * rows * nodes, measured)
    for rows, nodes in ((1, 5), (3, 7), (4, 20), (6, 2), (40, 9)):
        assert pass_seconds(costs, rows, nodes, 256) == pytest.approx(1.0 + 0.1 * rows * nodes)


@pytest.mark.parametrize(("dear", "cheap"), [(20, 200), (200, 20)])
def test_costs_are_those_of_the_context_nearest_to_the_longest_text(dear, cheap):
    slopes = {dear: 1.0, cheap: 0.0}
    costs = VerifyCosts([Cost(1, c, n, 1.0 + s * (n - 1), 0.0, 0.0) for c, s in slopes.items() for n in SIZES])
    state = AdaptiveLookup(costs).begin(2, shared_noise=True)
    for length in (40, 109, 110, 111, 190, 400):  # 110 is as far from both: the smaller one counts
        rows = [sampler(([1, 2, 3] * 200)[:size]) for size in (12, length)]
        assert {*map(len, proposed(state, rows))} == {32 if (length > 110) == (cheap == 200) else 0}


def test_steep_costs_stop_all_drafts_and_a_slope_stops_those_that_do_not_pay():
    text = [1, 2, 3, 4, 5] * 30
    assert {drafts for drafts, _ in steps(AdaptiveLookup(sloped(1.0)), text, 10)} == {0}
    counts = steps(AdaptiveLookup(sloped(0.9)), text, 6)  # the match grows from 1 token to 17
    first = next(number for number, (drafts, _) in enumerate(counts) if drafts)
    assert 5 < first < 20
    assert all(drafts == accepted for drafts, accepted in counts[:-1])


def test_a_repeating_text_soon_has_the_longest_drafts_and_far_more_tokens_per_step_than_a_fixed_length():
    chance = random.Random(3)
    period = [chance.randrange(50) for _ in range(60)]
    whole = period * 30
    adaptive, fixed = (steps(p, whole, 63) for p in (AdaptiveLookup(sloped(0.02)), PromptLookup(6)))
    assert next(number for number, (drafts, _) in enumerate(adaptive) if drafts == 32) <= 3
    assert [drafts for drafts, _ in adaptive[4:-2]] == [32] * (len(adaptive) - 6)
    assert len(fixed) > 4 * len(adaptive)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_drafts_repeat_a_period_that_is_shorter_than_they_are(period):
    whole = list(range(period)) * (200 // period)
    assert steps(AdaptiveLookup(sloped(0.0)), whole, period + 1)[0] == (32, 32)


def test_the_place_that_was_followed_stays_although_its_n_grams_occur_elsewhere():
    source = list(range(100, 140))
    misleading = [120, 121, 122, 7, 8, 9]  # the last place of an n-gram from the middle of the source
    counts = steps(AdaptiveLookup(sloped(0.05), longest=8), source + misleading + source, 46 + 4)
    assert all(drafts == accepted for drafts, accepted in counts[1:-1])


def test_a_text_without_repetition_wastes_few_nodes():
    for seed in range(5):
        chance = random.Random(seed)
        whole = [chance.randrange(40) for _ in range(600)]
        counts = steps(AdaptiveLookup(sloped(0.1)), whole, 50)
        assert sum(drafts - accepted for drafts, accepted in counts) <= 60
        assert sum(1.0 + 0.1 * drafts for drafts, _ in counts) < 1.01 * (len(whole) - 50)  # plain steps take 1 each
        fixed = steps(PromptLookup(6), whole, 50)
        assert sum(drafts - accepted for drafts, accepted in fixed) > 2000


def test_what_was_found_and_not_proposed_teaches_too():
    """A word pair among words that never return: the second follows the first, which is a match of one token."""
    whole = [token for number in range(100, 140) for token in (1, 2, number)]
    counts = steps(AdaptiveLookup(sloped(0.4)), whole, 3)
    drafts = [drafts for drafts, _ in counts]
    assert not any(drafts[:5])
    assert drafts[-10:].count(1) >= 4
    assert sum(accepted for _, accepted in counts) == sum(drafts)


def test_nothing_is_learned_behind_the_first_token_that_differs():
    found = Found(end=9, place=3, length=1, tokens=[4, 5, 6, 7])
    short, long = AgreementRates(8.0), AgreementRates(8.0)
    short.learn(found, [4, 9])
    long.learn(found, [4, 9, 6, 7])
    assert short.survivals(1, 9) == long.survivals(1, 9) != AgreementRates(8.0).survivals(1, 9)


def test_sessions_share_no_estimates():
    settings = AdaptiveLookup(sloped(0.3))
    first = steps(settings, [1, 2, 3, 4] * 20, 5)
    steps(settings, [1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7] * 5, 5)
    assert steps(settings, [1, 2, 3, 4] * 20, 5) == first


@pytest.mark.parametrize("harm", ["lost", "stale", "match"])
def test_a_stale_state_is_named(tiny_target, prompts, monkeypatch, harm):
    propose = _AdaptiveState.propose

    def harmful(self, roots, rows):
        trees = propose(self, roots, rows)
        ends = self._index.ends[1]
        if harm == "match" and self._matches[1] is not None:
            self._matches[1] = replace(self._matches[1], place=1)
        elif harm != "match":
            ends.update(dict.fromkeys(ends, 1)) if harm == "stale" else ends.clear()
        return trees

    monkeypatch.setattr(_AdaptiveState, "propose", harmful)
    message = "row 1: its text has no match" if harm == "match" else "row 1: the index of n-grams finds place"
    with pytest.raises(StateError, match=message):
        generate(
            *(tiny_target, [[5], prompts[3]]),
            proposer=AdaptiveLookup(sloped(0.1)),
            max_new_tokens=40,
            eos_ids=(),
            check=True,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 0}, "longest >= 1 and <= 1024, .* got longest 0"),
        ({"longest": 2000}, "got longest 2000"),
        ({"min_ngram": 0}, "min_ngram 0"),
        ({"min_ngram": 4}, "min_ngram <= max_ngram"),
        ({"costs": 0.1}, r"as measure_costs\(target\) returns, got float"),
        ({"prior_strength": 0.0}, "trials above 0, got 0.0"),
        ({"prior_strength": float("nan")}, "trials above 0, got nan"),
        ({"prior_strength": "8"}, "trials above 0, got '8'"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveLookup(**{"costs": sloped(0.1), **options})
