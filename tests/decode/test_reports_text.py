"""Public reports of changed or corrupted text: however many drafts a step accepts, the text is the target's own."""

import itertools
import json

import pytest

from decode import PromptLookup, Sampling, Target, generate, stream

DEPTH = 3
PROMPT = [40, 41, 42]
LONGEST, SHORT = 401, 61
V = 320


@pytest.fixture(scope="module")
def long_target(make_tiny_llama) -> Target:
    """With room for hundreds of steps."""
    model = make_tiny_llama()
    model.config.max_position_embeddings = 1024
    return Target(model)


@pytest.fixture(scope="module")
def expected(long_target, oracles):
    sampled = Sampling(temperature=0.8)
    return {
        "greedy": oracles.slow_decode(long_target, PROMPT, Sampling(), LONGEST),
        "sampled": oracles.slow_decode(long_target, PROMPT, sampled, SHORT, seed=6),
    }


def drafts(oracles, answer: list[int], pattern: tuple[int, ...], branches: bool):
    """Drafts of which `pattern` tokens are right, in turn; with branches, a wrong sibling comes before each."""
    turns = itertools.cycle(pattern)

    def propose(text: list[int]) -> tuple[list[int], tuple[int, ...]]:
        start, right = len(text) - len(PROMPT), next(turns)
        tokens, parents, above = [], [-1], 0
        for depth, token in enumerate(answer[start : start + DEPTH]):
            level = [token if depth < right else (token + 1) % V]
            if branches:
                level.insert(0, (token + 2) % V)
            tokens += level
            parents += [above] * len(level)
            above = len(parents) - 1
        return tokens, tuple(parents)

    return oracles.Scripted(propose)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("branches", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("pattern", [(0,), (1,), (2,), (3,), (1, 2, 3), (3, 0), (0, 3, 1, 0, 2)], ids=str)
def test_however_many_drafts_are_accepted_the_text_is_the_same(long_target, oracles, expected, name, branches, pattern):
    """(1,) is 200 steps that each accept one draft of three; (0,) are steps that all reject."""
    answer = expected[name]
    limit = LONGEST if pattern == (1,) and name == "greedy" else SHORT
    sampling = Sampling(temperature=0.8 * (name == "sampled"), seed=6)
    proposer = drafts(oracles, answer, pattern, branches)
    result = generate(long_target, PROMPT, proposer=proposer, sampling=sampling, max_new_tokens=limit, eos_ids=())
    assert result.token_ids == answer[:limit]
    counted, turns = [], itertools.cycle(pattern)
    while 1 + sum(counted) + len(counted) < limit:
        counted.append(min(next(turns), limit - 2 - sum(counted) - len(counted)))
    assert result.stats.steps == len(counted)
    assert sum(result.stats.accepted) == sum(counted)
    assert result.stats.accepted == [sum(n > depth for n in counted) for depth in range(len(result.stats.accepted))]
    if pattern == (3,):
        assert result.stats.tokens_per_step == DEPTH + 1  # the bonus after full acceptance is not lost
    if limit == LONGEST:
        assert result.stats.steps == 200


def test_no_draft_is_committed_unverified(tiny_target, oracles):
    """What always followed in the prompt never follows in the answer: all drafts are wrong."""
    prompt, answer = [50, 9, 50, 9, 50, 9], [50, 60, 50, 61, 50, 62, 50, 63, 50, 64]
    options = {"sampling": Sampling(processors=[oracles.Forced(answer, prompt)]), "max_new_tokens": 10, "eos_ids": ()}
    for proposer in (PromptLookup(length=4, max_ngram=1), oracles.Scripted(lambda text: [9, 9, 9])):
        result = generate(tiny_target, prompt, proposer=proposer, **options)
        assert result.token_ids == answer
        assert result.stats.offered[0] >= 4
        assert not any(result.stats.accepted)


def test_a_call_whose_keys_stand_in_the_prompt_stays_valid_json(tiny_target, tiny_tokenizer, oracles):
    """Lookups find the prompt's keys with the prompt's values behind them."""
    call = {"name": "search", "arguments": {"query": "two cats", "limit": 12, "name": "one"}}
    examples = [{**call, "name": "fetch"}, {"name": "search", "arguments": {"limit": 9, "query": "mats"}}]
    prompt = tiny_tokenizer(json.dumps(examples))["input_ids"]
    answer = tiny_tokenizer(json.dumps(call))["input_ids"]
    assert len(prompt) + len(answer) < 256
    options = {
        "sampling": Sampling(processors=[oracles.Forced(answer, prompt)]),
        "max_new_tokens": len(answer),
        "eos_ids": (),
    }
    for length in (1, 4, 9):
        lookup = PromptLookup(length=length)
        result = generate(tiny_target, prompt, proposer=lookup, **options)
        assert json.loads(result.text) == call
        assert result.token_ids == answer
        assert 0 < sum(result.stats.accepted) < sum(result.stats.offered)
        assert "".join(delta.text for delta in stream(tiny_target, prompt, proposer=lookup, **options)) == result.text


@pytest.mark.parametrize("draft", ["self", "anti", "lookup", "plain"])
def test_special_tokens_inside_blocks_end_and_hide_nothing(tiny_target, tiny_tokenizer, oracles, draft):
    """Channel, tool and thinking marks are tokens like others, unless they are among `eos_ids`."""
    prompt = tiny_tokenizer("<|im_start|>user\nthe cat<|im_end|>\n<|im_start|><|im_start|>")["input_ids"]
    parts = ["the ", "<|im_end|>", "cat", "<|im_start|><|im_end|><|im_start|>", " sat\n", "<|im_end|>", "on"]
    answer = tiny_tokenizer("".join(parts))["input_ids"]
    assert {0, 1} <= set(answer)
    texts = [prompt + answer]
    proposer = {
        "self": oracles.self_draft(texts, DEPTH),
        "anti": oracles.anti_draft(texts, DEPTH),
        "lookup": PromptLookup(length=5),
        "plain": None,
    }[draft]
    options = {"sampling": Sampling(processors=[oracles.Forced(answer, prompt)]), "max_new_tokens": len(answer)}
    result = generate(tiny_target, prompt, proposer=proposer, eos_ids=(), **options)
    assert (result.token_ids, result.finish_reason) == (answer, "length")
    assert result.text == "the cat sat\non"
    pieces = list(stream(tiny_target, prompt, proposer=proposer, eos_ids=(), **options))
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.token_ids] == answer
    ended = generate(tiny_target, prompt, proposer=proposer, **options)  # 1 is the target's own end
    assert (ended.token_ids, ended.finish_reason) == (answer[: answer.index(1) + 1], "eos")
