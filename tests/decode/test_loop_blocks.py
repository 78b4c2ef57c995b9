"""What ends a text cuts inside a block; every step leaves cache, counts and the proposer as a fresh start would."""

import copy
import itertools

import pytest
import torch

from decode import Chain, PromptLookup, Sampling, StaticTree, Target, generate, stream
from decode.sampling import Sampler
from decode.session import Session
from heads.cache import TreeCache

DEPTH = 3
LONG = 24
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.fixture(scope="module")
def answers(tiny_target, oracles, prompts):
    """Greedy answers, by the slow decoder."""
    return [oracles.slow_decode(tiny_target, prompt, Sampling(), LONG) for prompt in prompts]


@pytest.fixture(scope="module")
def texts(prompts, answers):
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("limit", range(1, 2 * DEPTH + 5))
def test_a_self_draft_takes_whole_blocks_and_an_anti_draft_none(tiny_target, oracles, prompts, answers, texts, limit):
    right, wrong = oracles.self_draft(texts, DEPTH), oracles.anti_draft(texts, DEPTH)
    for rows in ([0], [0, 1, 2, 3, 4]):
        some = [prompts[row] for row in rows]
        for result, row in zip(
            generate(tiny_target, some, proposer=right, max_new_tokens=limit, eos_ids=()), rows, strict=True
        ):
            assert result.token_ids == answers[row][:limit]
            assert result.stats.steps == -(-(limit - 1) // (DEPTH + 1))
            assert result.stats.accepted == result.stats.offered
            if limit % (DEPTH + 1) == 1 and limit > 1:
                assert result.stats.tokens_per_step == DEPTH + 1
                assert result.stats.accept_rates == [1.0] * DEPTH
        for result, row in zip(
            generate(tiny_target, some, proposer=wrong, max_new_tokens=limit, eos_ids=()), rows, strict=True
        ):
            assert result.token_ids == answers[row][:limit]
            assert result.stats.steps == limit - 1
            assert not any(result.stats.accepted)
            assert result.stats.offered == ([limit - 2] if limit > 2 else [])
            assert result.stats.tokens_per_step == 1


@pytest.mark.parametrize("draft", ["self", "anti", "none"])
@pytest.mark.parametrize("offset", range(2 * DEPTH + 4))
def test_an_end_token_at_every_offset_of_a_block_is_the_last(
    tiny_target, oracles, prompts, answers, texts, draft, offset
):
    proposer = {"self": oracles.self_draft(texts, DEPTH), "anti": oracles.anti_draft(texts, DEPTH), "none": None}[draft]
    for end in ({answers[0][offset]}, {answers[0][offset], answers[1][offset + 1], 319}):
        results = generate(tiny_target, prompts, proposer=proposer, max_new_tokens=LONG, eos_ids=sorted(end))
        for result, answer in zip(results, answers, strict=True):
            stop = next((i for i, token in enumerate(answer) if token in end), None)
            assert result.token_ids == (answer if stop is None else answer[: stop + 1])
            assert result.finish_reason == ("length" if stop is None else "eos")
            assert result.stats.tokens == len(result.token_ids)
    # the end token is the last that the limit allows, or the first that it does not
    first = answers[0].index(answers[0][offset])
    options = {"proposer": proposer, "eos_ids": [answers[0][offset]]}
    exact = generate(tiny_target, prompts[0], max_new_tokens=first + 1, **options)
    assert (exact.token_ids, exact.finish_reason) == (answers[0][: first + 1], "eos")
    if first:
        short = generate(tiny_target, prompts[0], max_new_tokens=first, **options)
        assert (short.token_ids, short.finish_reason) == (answers[0][:first], "length")


def test_by_default_the_targets_own_end_tokens_count_and_an_empty_list_means_none(tiny_target, prompts, answers):
    ends = [answers[0][5], answers[1][7]]
    model = copy.deepcopy(tiny_target.model)
    model.generation_config.eos_token_id = ends
    target = Target(model, tiny_target.tokenizer)
    assert target.eos_ids == {*ends, 1}  # the tokenizer's too
    own = generate(target, prompts, max_new_tokens=LONG)
    assert [r.token_ids for r in own] == [
        r.token_ids for r in generate(target, prompts, max_new_tokens=LONG, eos_ids=[*ends, 1])
    ]
    assert [own[0].finish_reason, own[1].finish_reason] == ["eos", "eos"]
    none = generate(target, prompts, max_new_tokens=LONG, eos_ids=())
    assert [result.token_ids for result in none] == answers


@pytest.mark.parametrize("draft", ["self", "tree", "lookup", "none"])
def test_the_context_limit_is_reached_exactly(tiny_target, oracles, good_head, draft):
    prompts = [[(7 * i) % 300 + 2 for i in range(n)] for n in (250, 255, 247)]
    answers = [oracles.slow_decode(tiny_target, prompt, Sampling(), 256 - len(prompt)) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    options = {
        "self": {"proposer": oracles.self_draft(texts, DEPTH)},
        "tree": {"head": good_head, "grow": TREE},
        "lookup": {"proposer": PromptLookup(length=9)},
        "none": {},
    }[draft]
    results = generate(tiny_target, prompts, **options, max_new_tokens=1000, eos_ids=())
    assert [result.token_ids for result in results] == answers
    assert [len(result.token_ids) for result in results] == [6, 1, 9]
    assert {result.finish_reason for result in results} == {"length"}


@pytest.fixture(params=["plain", "lookup", "chain", "tree", "self"])
def options(request, oracles, good_head, texts):
    return {
        "plain": {},
        "lookup": {"proposer": PromptLookup(length=4)},
        "chain": {"head": good_head, "grow": Chain(2)},
        "tree": {"head": good_head, "grow": TREE},
        "self": {"proposer": oracles.self_draft(texts, DEPTH)},
    }[request.param]


@pytest.fixture
def watched(monkeypatch, tiny_target):
    """Sessions whose cache is compared with a fresh prefill after every commit; counts the comparisons."""
    texts: dict[int, list[list[int]]] = {}
    counts = []
    prefill, score, commit, keep = Session.prefill, Session.score, Session.commit, Session.keep

    def check(session):
        for row, text in enumerate(texts[id(session)]):
            assert session.lengths[row] == len(text)
            fresh = tiny_target.session(1, len(text))
            prefill(fresh, [text])
            for kept, expected in zip(session.cache.contents(row), fresh.cache.contents(0), strict=True):
                torch.testing.assert_close(kept, expected, atol=1e-9, rtol=1e-9)
            counts.append(row)

    def watch_prefill(session, prompts):
        out = prefill(session, prompts)
        texts[id(session)] = [list(prompt) for prompt in prompts]
        check(session)
        return out

    def watch_score(session, trees):
        session.trees = trees
        return score(session, trees)

    def watch_commit(session, paths):
        commit(session, paths)
        for text, tree, path in zip(texts[id(session)], session.trees, paths, strict=True):
            text += tree.token_ids[list(path)].tolist()
        check(session)

    def watch_keep(session, rows):
        keep(session, rows)
        texts[id(session)] = [texts[id(session)][row] for row in rows]
        check(session)

    monkeypatch.setattr(Session, "prefill", watch_prefill)
    monkeypatch.setattr(Session, "score", watch_score)
    monkeypatch.setattr(Session, "commit", watch_commit)
    monkeypatch.setattr(Session, "keep", watch_keep)
    return texts, counts


def test_after_every_step_the_cache_is_a_fresh_prefill_of_all_but_the_last_token(
    tiny_target, prompts, answers, options, watched
):
    cached, counts = watched
    live: dict[int, list[int]] = {row: list(prompt) for row, prompt in enumerate(prompts)}
    ends = [answers[2][4], answers[0][9]]  # rows leave at different times
    for delta in stream(tiny_target, prompts, **options, max_new_tokens=14, eos_ids=ends):
        live[delta.row] += delta.token_ids
        if delta.finish_reason is not None:
            del live[delta.row]
        (rows,) = cached.values()
        if delta.finish_reason is None and len(rows) == len(live):
            assert rows[list(live).index(delta.row)] == live[delta.row][:-1]
    assert len(counts) > 5


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_what_rejected_and_unused_slots_hold_does_not_matter(
    tiny_target, prompts, answers, options, monkeypatch, samplings, oracles, name
):
    commit = TreeCache.commit

    def poison(cache, paths):
        commit(cache, paths)
        for row, length in enumerate(cache.lengths):
            for block in (*cache._keys, *cache._values):
                block[row, :, length:] = 1e6

    monkeypatch.setattr(TreeCache, "commit", poison)
    settings = samplings[name]
    sampling = Sampling(temperature=settings.temperature, top_p=settings.top_p, seed=9)
    results = generate(tiny_target, prompts, **options, sampling=sampling, max_new_tokens=14, eos_ids=())
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        slow = oracles.slow_decode(tiny_target, prompt, sampling, 14, seed=9, row=row)
        assert results[row].token_ids == slow
        assert name != "greedy" or slow == answer[:14]


def test_counts_agree_with_the_text(tiny_target, prompts, options):
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
        for result in generate(tiny_target, prompts, **options, sampling=sampling, max_new_tokens=17, eos_ids=()):
            stats = result.stats
            assert stats.tokens == len(result.token_ids) == 17
            assert stats.tokens == 1 + stats.steps + sum(stats.accepted)
            assert stats.tokens_per_step == 16 / stats.steps
            assert stats.offered[:1] == [] or stats.offered[0] <= stats.steps
            assert all(b <= a for a, b in itertools.pairwise(stats.offered))
            assert all(accepted <= offered for accepted, offered in zip(stats.accepted, stats.offered, strict=True))
            assert all(0 <= rate <= 1 for rate in stats.accept_rates)
            # what is offered at depth d + 1 was accepted at depth d
            assert all(o <= a for a, o in zip(stats.accepted, stats.offered[1:], strict=False))
            assert sum(stats.parts.values()) > 0
            assert {"prefill", "score", "accept", "commit"} <= set(stats.parts)
            assert stats.seconds > 0


def test_two_interleaved_streams_on_one_target_and_head_do_not_meet(tiny_target, good_head, prompts):
    sampling = Sampling(temperature=0.8, seed=2)
    settings = [{"grow": TREE, "sampling": sampling}, {"grow": Chain(3)}, {"grow": TREE, "sampling": sampling}]
    groups = [prompts[:3], prompts[2:], prompts[1:2]]
    options = [{"head": good_head, "max_new_tokens": 15, "eos_ids": (), **s} for s in settings]
    alone = [generate(tiny_target, group, **o) for group, o in zip(groups, options, strict=True)]
    together: list[dict[int, list[int]]] = [{}, {}, {}]
    pieces = [stream(tiny_target, group, **o) for group, o in zip(groups, options, strict=True)]
    for deltas in itertools.zip_longest(*pieces):
        for texts, delta in zip(together, deltas, strict=True):
            if delta is not None:
                texts.setdefault(delta.row, []).extend(delta.token_ids)
    for texts, results in zip(together, alone, strict=True):
        assert [texts[row] for row in range(len(texts))] == [result.token_ids for result in results]


def test_a_stream_that_is_left_midway_harms_nothing(tiny_target, good_head, prompts, answers):
    pieces = stream(tiny_target, prompts, head=good_head, max_new_tokens=LONG, eos_ids=())
    for _ in range(7):
        next(pieces)
    pieces.close()
    assert not torch.is_inference_mode_enabled()
    assert not tiny_target.lm_head._forward_pre_hooks
    again = generate(tiny_target, prompts, head=good_head, max_new_tokens=LONG, eos_ids=())
    assert [result.token_ids for result in again] == answers


def test_the_callers_prompts_and_gradients_are_left_alone(tiny_target, prompts):
    mine = [list(prompt) for prompt in prompts]
    generate(tiny_target, mine, max_new_tokens=4)
    assert mine == prompts
    assert torch.is_grad_enabled()
    assert isinstance(Sampler(Sampling(seed=0), 0, mine[0]).context, list)
    assert Sampler(Sampling(seed=0), 0, mine[0]).context is not mine[0]
