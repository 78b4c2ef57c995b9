"""Log-probabilities are the model's own, of exactly the tokens that are returned, whatever drafted them."""

import math
from dataclasses import replace

import pytest
import torch

from decode import Chain, DraftModel, PromptLookup, Sampling, StaticTree, Target, generate, stream

LIMIT, DEPTH = 14, 3
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
PROPOSERS = ["plain", "lookup", "head tree", "draft model", "self draft"]


@pytest.fixture(scope="module")
def proposers(tiny_target, make_tiny_llama, good_head) -> dict[str, dict[str, object]]:
    """Arguments of `generate` for each proposer."""
    rounded = DraftModel(Target(make_tiny_llama().bfloat16(), tiny_target.tokenizer), tiny_target)
    return {
        "plain": {},
        "lookup": {"proposer": PromptLookup(length=4)},
        "head tree": {"head": good_head, "grow": TREE},
        "draft model": {"draft_model": rounded, "grow": TREE},
        "self draft": {"draft_model": DraftModel(tiny_target, tiny_target), "grow": Chain(DEPTH)},
    }


def full_logprobs(target: Target, prompt: list[int], answer: list[int]) -> list[float]:
    """By one full forward over the whole text."""
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    scores = logits.log_softmax(-1)
    return [float(scores[len(prompt) + i - 1, token]) for i, token in enumerate(answer)]


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalty"])
def test_every_token_has_the_log_softmax_of_a_full_forward(tiny_target, proposers, prompts, samplings, proposer, name):
    """Of the raw logits: neither temperature nor penalties change them."""
    options = {**proposers[proposer], "sampling": replace(samplings[name], seed=4), "logprobs": True}
    for some in (prompts, prompts[:1]):
        for result in generate(tiny_target, some, max_new_tokens=LIMIT, eos_ids=(), **options):
            assert len(result.token_ids) == LIMIT
            assert result.logprobs == pytest.approx(
                full_logprobs(tiny_target, result.prompt_ids, result.token_ids), abs=1e-9
            )
            assert all(-math.inf < value <= 0 for value in result.logprobs)


@pytest.mark.parametrize("accept", ["rejection", "block", "typical"])
def test_other_rules_report_them_too(tiny_target, proposers, prompts, accept):
    grow = Chain(3, draw="with_replacement")
    results = generate(
        tiny_target, prompts, draft_model=proposers["draft model"]["draft_model"], grow=grow, accept=accept,
        sampling=Sampling(temperature=1.2, seed=1), max_new_tokens=LIMIT, eos_ids=(), logprobs=True,
    )  # fmt: skip
    for result in results:
        expected = full_logprobs(tiny_target, result.prompt_ids, result.token_ids)
        assert result.logprobs == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_they_end_with_the_text_inside_a_block(tiny_target, proposers, prompts, proposer):
    """At an end-of-text token, a stop string or the limit, at every offset of an accepted block of four."""
    options = {**proposers[proposer], "logprobs": True}
    whole = generate(tiny_target, prompts, max_new_tokens=LIMIT, eos_ids=(), **options)
    answer = whole[0].token_ids
    for offset in range(2 * DEPTH + 2):
        text = tiny_target.tokenizer.decode(answer[offset])
        for ending in ({"eos_ids": [answer[offset]]}, {"eos_ids": (), "stop": [text]}):
            for result, full in zip(
                generate(tiny_target, prompts, max_new_tokens=LIMIT, **options, **ending), whole, strict=True
            ):
                assert len(result.logprobs) == len(result.token_ids) <= answer.index(answer[offset]) + LIMIT
                assert result.token_ids == full.token_ids[: len(result.token_ids)]
                assert result.logprobs == pytest.approx(full.logprobs[: len(result.token_ids)], abs=1e-9)
        short = generate(tiny_target, prompts[0], max_new_tokens=offset + 1, eos_ids=(), **options)
        assert short.token_ids == answer[: offset + 1]
        assert short.logprobs == pytest.approx(whole[0].logprobs[: offset + 1], abs=1e-9)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_none_unless_asked_and_a_stream_has_them_in_its_results(tiny_target, proposers, prompts, proposer):
    options = {**proposers[proposer], "max_new_tokens": LIMIT, "eos_ids": ()}
    unasked = generate(tiny_target, prompts[0], **options)
    assert unasked.logprobs is None
    asked = generate(tiny_target, prompts[:2], logprobs=True, **options)
    assert asked[0].token_ids == unasked.token_ids
    deltas = list(stream(tiny_target, prompts[:2], logprobs=True, **options))
    streamed = {delta.row: delta.result.logprobs for delta in deltas if delta.result is not None}
    assert [streamed[row] for row in range(2)] == [result.logprobs for result in asked]
    assert all(delta.result.logprobs is None for delta in stream(tiny_target, prompts[0], **options) if delta.result)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.6)])
def test_half_precision_logits_are_normalised_in_float32(tiny_tokenizer, make_tiny_llama, prompts, dtype, tolerance):
    target = Target(make_tiny_llama(dtype=dtype), tiny_tokenizer)
    for result in generate(target, prompts, max_new_tokens=LIMIT, eos_ids=(), logprobs=True):
        with torch.no_grad():
            ids = torch.tensor([result.prompt_ids + result.token_ids])
            logits = target.model(input_ids=ids, use_cache=False).logits[0].float()
        scores = logits.log_softmax(-1)[len(result.prompt_ids) - 1 : -1]
        expected = scores.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0].tolist()
        assert result.logprobs == pytest.approx(expected, abs=tolerance)
        if dtype == torch.bfloat16:  # more digits than bfloat16 has
            rounded = torch.tensor(result.logprobs).to(dtype).double().tolist()
            assert result.logprobs != rounded
