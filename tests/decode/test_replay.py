"""Replaying a known text counts what real decoding with the same proposer counts, without the target."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from decode import Chain, Drafting, DynamicTree, PromptLookup, Sampling, StaticTree, generate
from decode.replay import Known, known_sampler, replay, write_texts
from decode.sampling import Sampler
from decode.session import Session
from decode.tree import TokenTree, chain_shape

PROMPTS = [[4, 5, 6, 7, 4, 5], [9], [3, 8], [2, 14, 10], [6, 6]]
LIMIT = 12
SAMPLINGS = {"greedy": Sampling(seed=7), "sampled": Sampling(temperature=0.8, seed=7)}
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
GROWS = [Chain(3), TREE, DynamicTree(3, 2, 7), DynamicTree(3, 3, 12, confidence=0.1)]


def decoded(target, text: Known, proposer, sampling, limit: int):
    """Real decoding of a text, alone."""
    own = replace(sampling, seed=[text.seed])
    return generate(target, [text.prompt_ids], proposer=proposer, sampling=own, max_new_tokens=limit)[0]


def counts(stats):
    return stats.rows, stats.steps, stats.tokens, stats.offered, stats.accepted


@pytest.fixture(scope="module", params=SAMPLINGS)
def sampling(request) -> Sampling:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def texts(any_drafts, small_target, sampling) -> list[Known]:
    return write_texts(
        small_target, PROMPTS, sampling=sampling, max_new_tokens=LIMIT, feature_layers=any_drafts.feature_layers
    )


@pytest.fixture
def scored(monkeypatch, small_target) -> list[list[int]]:
    """Nodes of the trees in each pass of the target's."""
    sizes: list[list[int]] = []
    score = Session.score

    def spy(session, trees):
        if session._target is small_target and session.cache.nodes == 0:
            sizes.append([tree.shape.size for tree in trees])
        return score(session, trees)

    monkeypatch.setattr(Session, "score", spy)
    return sizes


@pytest.mark.parametrize("grow", GROWS, ids=["chain", "tree", "dynamic", "confident"])
def test_every_texts_counts_are_those_of_real_decoding(any_drafts, small_target, texts, sampling, grow):
    assert len({len(text.token_ids) for text in texts}) > 1  # rows leave the batch in another order
    proposer = Drafting(any_drafts, grow)
    real = [decoded(small_target, text, proposer, sampling, len(text.token_ids)) for text in texts]
    assert [result.token_ids for result in real] == [text.token_ids for text in texts]
    for rows in (1, 3):
        replayed = replay(small_target, texts, proposer, sampling=sampling, rows=rows)
        assert [counts(stats) for stats in replayed.by_text] == [counts(result.stats) for result in real]
        assert counts(replayed.stats) == counts(type(replayed.stats).total([result.stats for result in real]))
    assert sum(replayed.stats.accepted) > 0


def test_texts_that_an_end_token_cut_short_take_the_same_steps(any_drafts, small_target, texts, sampling):
    proposer = Drafting(any_drafts, TREE)
    replayed = replay(small_target, texts, proposer, sampling=sampling)
    ended = 0
    for text, stats in zip(texts, replayed.by_text, strict=True):
        real = decoded(small_target, text, proposer, sampling, 2 * LIMIT if text.token_ids[-1] == 1 else LIMIT)
        assert real.token_ids == text.token_ids
        assert (stats.steps, stats.tokens) == (real.stats.steps, real.stats.tokens)
        ended += real.finish_reason == "eos"
    assert ended > 0


def test_trees_are_as_large_as_in_real_decoding_of_as_many_tokens(any_drafts, small_target, texts, sampling, scored):
    longest = [text for text in texts if len(text.token_ids) == LIMIT]
    assert len(longest) > 1
    limit = LIMIT - 3
    for grow in (TREE, DynamicTree(3, 3, 12, confidence=0.1)):
        proposer = Drafting(any_drafts, grow)
        scored.clear()
        own = replace(sampling, seed=[text.seed for text in longest])
        prompts = [text.prompt_ids for text in longest]
        real = generate(small_target, prompts, proposer=proposer, sampling=own, max_new_tokens=limit)
        expected = list(scored)
        replayed = replay(small_target, longest, proposer, sampling=sampling, max_new_tokens=limit)
        assert [counts(stats) for stats in replayed.by_text] == [counts(result.stats) for result in real]
        assert replayed.sizes == expected


def write(target, **options) -> list[Known]:
    options = {"max_new_tokens": LIMIT, "feature_layers": (), **options}
    return write_texts(target, options.pop("prompts", PROMPTS), **options)


def test_lookup_is_replayed_too(small_target, sampling, scored):
    prompts = [[4, 5, 6, 4, 5, 6, 4], [9], [12, 13, 12, 13, 12]]
    texts = write(small_target, sampling=sampling, prompts=prompts, max_new_tokens=40)
    proposer = PromptLookup(length=4, max_ngram=2)
    scored.clear()
    real = [decoded(small_target, text, proposer, sampling, len(text.token_ids)) for text in texts]
    alone = replay(small_target, texts, proposer, sampling=sampling, rows=1)
    assert [counts(stats) for stats in alone.by_text] == [counts(result.stats) for result in real]
    assert alone.sizes == scored
    assert len({size for (size,) in alone.sizes}) > 2
    together = replay(small_target, texts, proposer, sampling=sampling, rows=3)
    assert [counts(stats) for stats in together.by_text] == [counts(result.stats) for result in real]
    assert sum(alone.stats.accepted) > 0


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_texts_are_cut_at_a_limit(small_target, sampling, limit):
    texts = write(small_target, sampling=sampling)
    replayed = replay(small_target, texts, PromptLookup(), sampling=sampling, max_new_tokens=limit)
    assert [stats.tokens for stats in replayed.by_text] == [min(limit, len(text.token_ids)) for text in texts]
    if limit == 1:  # which the prefill gives
        assert replayed.stats.steps == len(replayed.sizes) == replayed.draft_seconds == 0
        assert replayed.stats.tokens_per_step == 1


def test_texts_are_the_targets_own_with_its_states(small_target, sampling):
    texts = write(small_target, sampling=sampling, feature_layers=(1, 2), batch=2)
    numbers = []
    for text in texts:
        number = PROMPTS.index(text.prompt_ids)
        numbers.append(number)
        assert text.seed == 7 + number  # of its prompt, whichever were left out
        own = replace(sampling, seed=text.seed)
        assert text.token_ids == generate(small_target, text.prompt_ids, sampling=own, max_new_tokens=LIMIT).token_ids
        ids = torch.tensor([[*text.prompt_ids, *text.token_ids]])
        hidden, features = small_target.encode_features(ids, [ids.shape[1]], (1, 2))
        assert torch.equal(text.hidden, hidden[0])
        assert torch.equal(text.features, features[0])
    assert numbers == sorted(numbers)
    assert write(small_target, sampling=sampling)[0].features is None
    assert [text.token_ids for text in write(small_target, sampling=sampling, batch=16)] == [
        text.token_ids for text in texts
    ]


def test_texts_that_end_at_once_take_no_step_and_are_left_out(small_target, monkeypatch):
    answers = [generate(small_target, ids, max_new_tokens=2).token_ids for ids in PROMPTS]
    firsts = [ids[0] for ids in answers]
    monkeypatch.setattr(small_target, "eos_ids", frozenset({firsts[0]}))
    kept = [ids for ids, first in zip(PROMPTS, firsts, strict=True) if first != firsts[0]]
    assert 0 < len(kept) < len(PROMPTS)
    texts = write(small_target, sampling=Sampling(seed=3))
    assert [text.prompt_ids for text in texts] == kept
    assert [text.seed - 3 for text in texts] == [PROMPTS.index(ids) for ids in kept]
    assert write(small_target, sampling=Sampling(), max_new_tokens=1) == []


def test_the_target_is_not_run(small_target, sampling, monkeypatch):
    texts = write(small_target, sampling=sampling)

    def fail(*args, **options):
        raise AssertionError("the target was run")

    for name in ("forward", "encode_features"):
        monkeypatch.setattr(small_target, name, fail)
    monkeypatch.setattr(small_target.model, "forward", fail)
    assert replay(small_target, texts, PromptLookup(), sampling=sampling).stats.steps > 0


def test_behind_its_end_a_text_chooses_nothing(small_target):
    sampling = Sampling(temperature=0.8, seed=7)
    text = write(small_target, sampling=sampling)[1]
    sampler = known_sampler(text, sampling)
    assert sampler.key(1, 5) == Sampler(replace(sampling, seed=text.seed), 0, text.prompt_ids).key(1, 5)
    path = []
    for token in text.token_ids:
        assert sampler.choose(torch.empty(0), path) == token
        path.append(token)
    assert sampler.choose(torch.empty(0), path) == sampler.choose(torch.empty(0), [*path, 3]) == -1


@dataclass
class Timed:
    """A proposer of chains of one wrong token, whose work takes time by a clock of the test's."""

    clock: list[float]
    max_nodes: int = 2
    feature_layers: tuple[int, ...] = ()
    synced: int = 0

    def begin(self, rows: int, *, shared_noise: bool) -> "Timed":
        self.synced = 0
        return self

    def sync(self, *args) -> None:
        self.clock[0] += 0.25 if self.synced else 100.0  # that of the prompt is no part of a step
        self.synced += 1

    def propose(self, roots: torch.Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        self.clock[0] += 1.0
        return [TokenTree(torch.tensor([int(root), -7]), chain_shape(2)) for root in roots]

    def keep(self, rows: Sequence[int]) -> None:
        self.clock[0] += 0.0


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_drafting_takes_the_time_of_proposing_and_absorbing(small_target, monkeypatch, rows):
    texts = write(small_target, sampling=Sampling(seed=7))
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    replayed = replay(small_target, texts, Timed(clock), sampling=Sampling(seed=7), rows=rows)
    batches = [texts[start : start + rows] for start in range(0, len(texts), rows)]
    steps = [max(len(text.token_ids) for text in batch) - 1 for batch in batches]
    assert len(replayed.sizes) == sum(steps)
    # the last step of a batch is not absorbed
    assert replayed.draft_seconds == pytest.approx(1.0 + 0.25 * sum(n - 1 for n in steps) / sum(steps))
    assert replayed.other_seconds == 0
