"""Public reports about ends: of texts, of characters, of streams, wherever in an accepted block they fall."""

import copy

import pytest

from decode import PromptLookup, Sampling, Target, generate, stream

PROMPT = [44, 45]
DEPTH = 8  # blocks of nine tokens
V = 320
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(params=["self", "anti"])
def says(request, oracles, tiny_tokenizer):
    """Text -> its tokens and the arguments with which the target says it; drafts are all right or all wrong."""

    def arguments(text: str, depth: int = DEPTH) -> tuple[list[int], dict]:
        tokens = tiny_tokenizer(text)["input_ids"]
        draft = {"self": oracles.self_draft, "anti": oracles.anti_draft}[request.param]
        sampling = Sampling(processors=[oracles.Forced(tokens, PROMPT)])
        options = {"sampling": sampling, "max_new_tokens": len(tokens), "eos_ids": ()}
        return tokens, {"proposer": draft([PROMPT + tokens], depth), **options}

    return arguments


def streamed(target, **options):
    """The result of a stream whose pieces add up to it."""
    text, ids, result = "", [], None
    for delta in stream(target, PROMPT, **options):
        text, ids, result = text + delta.text, ids + delta.token_ids, delta.result
        assert result is not None or "\N{REPLACEMENT CHARACTER}" not in delta.text
    assert (text, ids) == (result.text, result.token_ids)
    return result


@pytest.mark.parametrize("offset", range(DEPTH + 3))
def test_a_stop_string_at_every_offset_of_a_long_block_cuts_text_and_tokens_alike(tiny_target, says, offset):
    tokens, options = says(LETTERS)
    assert len(tokens) == len(LETTERS)
    for length in (1, 3):
        stop = LETTERS[offset : offset + length]
        taken = offset + length
        for result in (
            generate(tiny_target, PROMPT, stop=stop, logprobs=True, **options),
            streamed(tiny_target, stop=stop, logprobs=True, **options),
        ):
            assert (result.text, result.finish_reason) == (LETTERS[:offset], "stop")
            assert result.token_ids == tokens[:taken]  # the token that completed the stop string is kept
            assert len(result.logprobs) == result.stats.tokens == taken
            assert sum(result.stats.accepted) < taken  # what was accepted behind the end is not counted


@pytest.mark.parametrize("offset", range(1, DEPTH + 3))
def test_an_earlier_end_counts_though_the_limit_falls_into_the_same_block(tiny_target, says, offset):
    tokens, options = says(LETTERS)
    for more in (0, 1, 3):
        options["max_new_tokens"] = offset + 1 + more
        result = generate(tiny_target, PROMPT, stop=LETTERS[offset], **options)
        assert (result.finish_reason, len(result.token_ids)) == ("stop", offset + 1)
        result = generate(tiny_target, PROMPT, **{**options, "eos_ids": [tokens[offset]]})
        assert (result.finish_reason, len(result.token_ids)) == ("eos", offset + 1)
    options["max_new_tokens"] = offset
    result = generate(tiny_target, PROMPT, stop=LETTERS[offset], **options)
    assert (result.finish_reason, result.text) == ("length", LETTERS[:offset])


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("sign", ["😀", "猫é"], ids=["4-bytes", "3-and-2-bytes"])
def test_a_character_of_several_tokens_at_every_offset_of_a_block_comes_whole_and_once(
    tiny_target, tiny_tokenizer, says, before, sign
):
    text = "x" * before + sign + "yz" + sign
    tokens, options = says(text, depth=3)
    assert len(tiny_tokenizer(sign)["input_ids"]) >= 2
    assert streamed(tiny_target, **options).text == text
    assert generate(tiny_target, PROMPT, **options).text == text
    result = streamed(tiny_target, stop=sign, **options)
    assert (result.text, result.finish_reason) == ("x" * before, "stop")
    for limit in range(1, len(tokens)):
        result = streamed(tiny_target, **{**options, "max_new_tokens": limit})
        assert result.text == tiny_tokenizer.decode(tokens[:limit])


def test_an_end_token_in_a_looked_up_continuation_is_the_last(tiny_target, oracles):
    """The prompt holds the answer with an end token in it; lookups draft right through it."""
    answer = [60, 61, 62, 1, 63, 64, 65]
    prompt = [50, *answer, 50, 51]
    for said, taken in ((answer, 4), ([60, 61, 62, 70, 63, 64, 65], 7)):
        sampling = Sampling(processors=[oracles.Forced(said, prompt)])
        for length in range(1, 7):
            lookup = PromptLookup(length=length)
            result = generate(tiny_target, prompt, proposer=lookup, sampling=sampling, max_new_tokens=7)
            assert result.token_ids == said[:taken]
            assert result.finish_reason == ("eos" if taken == 4 else "length")
            assert sum(result.stats.accepted) > 0


@pytest.mark.parametrize("place", range(4))
def test_a_drafted_end_token_that_is_rejected_ends_nothing(tiny_target, oracles, place):
    prompt = [40, 41, 42]
    answer = oracles.slow_decode(tiny_target, prompt, Sampling(), 20)
    assert not {1, 2} & set(answer)
    right = oracles.self_draft([prompt + answer], 3)

    def propose(text: list[int]) -> list[int]:
        draft = right.propose(text)
        return [*draft[:place], 1, 2, *draft[place:]]

    result = generate(tiny_target, prompt, proposer=oracles.Scripted(propose), max_new_tokens=20, eos_ids=[1, 2])
    assert (result.token_ids, result.finish_reason) == (answer, "length")
    assert sum(result.stats.accepted) == 19 - result.stats.steps
    assert (result.stats.steps == 19) == (place == 0)


def test_a_target_without_an_end_token_decodes_to_the_limit(tiny_target, oracles, good_head):
    model = copy.deepcopy(tiny_target.model)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    target = Target(model)
    assert target.eos_ids == frozenset()
    prompt = [7, 8, 9, 7, 8]
    answer = oracles.slow_decode(target, prompt, Sampling(), 30)
    for options in ({}, {"proposer": PromptLookup()}, {"head": good_head}):
        result = generate(target, prompt, **options, max_new_tokens=30)
        assert (result.token_ids, result.finish_reason) == (answer, "length")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["plain", "lookup", "head", "self"])
def test_a_text_that_ended_goes_on_as_if_it_had_not(tiny_target, oracles, good_head, temperature, draft):
    """Noise goes by position: a second call with prompt and text as its prompt continues the first."""
    prompt = [40, 41, 42, 43, 44, 40, 41]
    sampling = Sampling(temperature=temperature, repetition_penalty=1.1, seed=6)
    whole = oracles.slow_decode(tiny_target, prompt, sampling, 20, seed=6)
    options = {
        "plain": {},
        "lookup": {"proposer": PromptLookup(length=4)},
        "head": {"head": good_head},
        "self": {"proposer": oracles.self_draft([prompt + whole], DEPTH)},
    }[draft]
    for first in (1, 10):
        for ends in ({"max_new_tokens": first, "eos_ids": ()}, {"max_new_tokens": 20, "eos_ids": [whole[first - 1]]}):
            begun = generate(tiny_target, prompt, **options, sampling=sampling, **ends)
            taken = len(begun.token_ids)
            assert begun.token_ids == whole[:taken]
            assert taken == first or ends["eos_ids"]
            rest = generate(
                tiny_target, begun.prompt_ids + begun.token_ids, **options, sampling=sampling,
                max_new_tokens=20 - taken, eos_ids=(),
            )  # fmt: skip
            assert begun.token_ids + rest.token_ids == whole
