"""Text: stop strings at every place of a block, whole characters only, and pieces that add up to the result."""

import pytest
import torch
from transformers import LogitsProcessor

from decode import Sampling, generate, stream

TEXT = "a cat 😀é! na\u00efve 猫猫 on the mat?\u200d👩\u200d🚀 the end"
PROMPT = [44, 45]
DEPTH = 4


@pytest.fixture(scope="module")
def tokens(tiny_tokenizer) -> list[int]:
    ids = tiny_tokenizer(TEXT)["input_ids"]
    assert tiny_tokenizer.decode(ids) == TEXT
    assert len(ids) > len(TEXT) / 2
    return ids


@pytest.fixture(scope="module", params=["plain", "self", "anti"])
def options(request, oracles, tokens):
    proposers = {
        "plain": {},
        "self": {"proposer": oracles.self_draft([PROMPT + tokens], DEPTH)},
        "anti": {"proposer": oracles.anti_draft([PROMPT + tokens], DEPTH)},
    }
    sampling = Sampling(processors=[oracles.Forced(tokens, PROMPT)])
    return {**proposers[request.param], "sampling": sampling, "max_new_tokens": len(tokens), "eos_ids": ()}


def check_stream(target, options, stop) -> None:
    """Pieces are final as they come, and add up."""
    text, ids, result = "", [], None
    for delta in stream(target, PROMPT, **options, stop=stop):
        assert result is None
        text, ids, result = text + delta.text, ids + delta.token_ids, delta.result
        assert (delta.finish_reason is None) == (result is None)
        assert result is not None or "\N{REPLACEMENT CHARACTER}" not in delta.text
        assert TEXT.startswith(text) or result is not None
        assert not any(s in text for s in stop)
    assert (text, ids) == (result.text, result.token_ids)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_at_every_place_ends_the_text_before_it(tiny_target, tiny_tokenizer, tokens, options, size):
    for start in range(0, len(TEXT) - size + 1, {1: 1, 2: 2, 5: 3}[size]):
        stop = TEXT[start : start + size]
        first = TEXT.find(stop)
        needed = next(n for n in range(1, len(tokens) + 1) if stop in tiny_tokenizer.decode(tokens[:n]))
        result = generate(tiny_target, PROMPT, **options, stop=[stop, "not there"])
        assert result.text == TEXT[:first]
        assert result.token_ids == tokens[:needed]
        assert result.finish_reason == "stop"
        assert result.stats.tokens == needed
        if start % 4 == 0:
            check_stream(tiny_target, options, [stop, "not there"])


def test_the_stop_string_that_ends_first_counts(tiny_target, options):
    for stop in (
        ["cat", "a"],
        ["at", "cat"],
        ["t 😀", "cat"],
        ["cat 😀é! never", "é"],
        ["the mat", "on the"],
        ["zzz", "mat?"],
    ):
        ends = {TEXT.find(s) + len(s): s for s in stop if s in TEXT}
        result = generate(tiny_target, PROMPT, **options, stop=stop)
        assert result.text == TEXT[: min(TEXT.find(s) for e, s in ends.items() if e == min(ends))]
        check_stream(tiny_target, options, stop)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_limit_inside_a_character_gives_all_pieces(tiny_target, tiny_tokenizer, tokens, options, cut):
    short = {**options, "max_new_tokens": cut}
    result = generate(tiny_target, PROMPT, **short)
    assert result.token_ids == tokens[:cut]
    assert result.text == tiny_tokenizer.decode(tokens[:cut])
    assert result.finish_reason == "length"
    check_stream(tiny_target, short, [])
    check_stream(tiny_target, short, ["at the moon", "😀é?"])  # beginnings of these are held back, then given


def test_a_stop_string_and_the_limit_on_one_token_is_a_stop(tiny_target, tiny_tokenizer, tokens, options):
    needed = next(n for n in range(1, len(tokens)) if "cat" in tiny_tokenizer.decode(tokens[:n]))
    result = generate(tiny_target, PROMPT, **{**options, "max_new_tokens": needed}, stop=["cat"])
    assert (result.text, result.finish_reason) == ("a ", "stop")
    result = generate(tiny_target, PROMPT, **{**options, "max_new_tokens": needed - 1}, stop=["cat"])
    assert result.finish_reason == "length"
    assert result.text == tiny_tokenizer.decode(tokens[: needed - 1])


def test_an_end_token_before_the_stop_string_wins(tiny_target, oracles, tokens):
    ended = [*tokens[:3], 1, *tokens[3:]]
    proposer = oracles.self_draft([PROMPT + ended], DEPTH)
    sampling = Sampling(processors=[oracles.Forced(ended, PROMPT)])
    options = {"proposer": proposer, "sampling": sampling, "max_new_tokens": 60, "stop": ["mat"]}
    result = generate(tiny_target, PROMPT, **options)
    assert (result.token_ids, result.finish_reason) == (ended[:4], "eos")
    assert "mat" not in result.text
    assert generate(tiny_target, PROMPT, **options, eos_ids=()).finish_reason == "stop"


def test_rows_stop_apart(tiny_target, oracles, tokens, tiny_tokenizer):
    """One processor serves all rows: each says what its own prompt's first token asks for."""
    others = tiny_tokenizer("two cats, one mat; the rest is silence")["input_ids"]
    scripts = {44: tokens, 50: others}

    class ByPrompt(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            script = scripts[int(input_ids[0, 0])]
            return scores.index_fill(1, torch.tensor([script[min(input_ids.shape[1] - 2, len(script) - 1)]]), 1e9)

    prompts = [[44, 45], [50, 9]]
    proposer = oracles.self_draft([p + scripts[p[0]] for p in prompts], DEPTH)
    options = {"sampling": Sampling(processors=[ByPrompt()]), "stop": ["mat", ","], "max_new_tokens": 60, "eos_ids": ()}
    for extra in ({}, {"proposer": proposer}):
        results = generate(tiny_target, prompts, **options, **extra)
        assert [result.text for result in results] == [TEXT[: TEXT.find("mat")], "two cats"]
        texts = ["", ""]
        for delta in stream(tiny_target, prompts, **options, **extra):
            texts[delta.row] += delta.text
        assert texts == [result.text for result in results]


def test_a_bare_stop_string_is_not_taken_letter_by_letter(tiny_target, oracles, tokens):
    """`stop="mat"` is easily written; "m", "a" and "t" must not each end the text."""
    sampling = Sampling(processors=[oracles.Forced(tokens, PROMPT)])
    try:
        result = generate(tiny_target, PROMPT, sampling=sampling, max_new_tokens=len(tokens), eos_ids=(), stop="mat")
    except (ValueError, TypeError):
        return
    assert result.text == TEXT[: TEXT.find("mat")]
