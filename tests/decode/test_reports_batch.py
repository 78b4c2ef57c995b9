"""Public reports about batches, seeds, sizes and short prompts: a row of a batch is the row alone."""

import itertools

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import LogitsProcessor

from decode import Chain, DraftModel, PromptLookup, Sampling, Target, generate
from decode.session import Session

V = 320


class SaysZero(LogitsProcessor):
    """Token 0 is what trees are padded with."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([0]), 1e9)


class SaysFirst(LogitsProcessor):
    """The prompt's first token again and again."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, input_ids[0, :1], 1e9)


@pytest.fixture
def trees(monkeypatch, tiny_target) -> list[list[list[int]]]:
    """The tokens of the trees that the target (not a draft model) scores in every step."""
    scored: list[list[list[int]]] = []
    score = Session.score

    def record(session, trees):
        if session._target is tiny_target:
            scored.append([tree.token_ids.tolist() for tree in trees])
        return score(session, trees)

    monkeypatch.setattr(Session, "score", record)
    return scored


def test_a_batch_without_a_seed_tells_the_seed_that_gives_it_again(tiny_target, prompts, good_head):
    options = {"head": good_head, "max_new_tokens": 9, "eos_ids": ()}
    first = generate(tiny_target, prompts, sampling=Sampling(temperature=1.0), **options)
    (seed,) = {result.seed for result in first}
    sampling = Sampling(temperature=1.0, seed=seed)
    again = generate(tiny_target, prompts, sampling=sampling, **options)
    assert [result.token_ids for result in again] == [result.token_ids for result in first]
    alone = generate(tiny_target, prompts[0], sampling=sampling, **options)
    assert alone.token_ids == first[0].token_ids


@pytest.mark.parametrize("seeds", [[1, None], [None, 2]], ids=str)
def test_a_seed_for_some_rows_only_is_refused_by_name(tiny_target, seeds):
    with pytest.raises(ValueError, match="seed"):
        generate(tiny_target, [[5, 6], [7, 8]], sampling=Sampling(temperature=1.0, seed=seeds), max_new_tokens=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_with_few_many_and_no_drafts_share_a_step(tiny_target, oracles, prompts, temperature):
    """Each step, one row has nothing to propose and another is rejected at once; lengths are all different."""
    sampling = Sampling(temperature=temperature, seed=4)
    answers = [
        oracles.slow_decode(tiny_target, prompt, sampling, 16, seed=4, row=row) for row, prompt in enumerate(prompts)
    ]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    right = oracles.self_draft(texts, 5)

    def propose(text: list[int]) -> list[int]:
        tokens = right.propose(text)
        kind = (len(text) + text[0]) % 4
        return [tokens[:0], [(token + 1) % V for token in tokens], tokens[:2], tokens][kind]

    results = generate(
        tiny_target, prompts, proposer=oracles.Scripted(propose), sampling=sampling, max_new_tokens=16, eos_ids=()
    )
    assert [result.token_ids for result in results] == answers
    assert len({result.stats.steps for result in results}) > 1


def test_padding_of_a_short_tree_is_not_taken_for_a_draft(tiny_target, oracles):
    """The target says token 0, which pads the trees of short rows; their drafts are 7, which it does not say."""
    drafts = {10: [], 11: [7], 12: [0, 0, 0, 0], 13: [0, 7]}
    result = generate(
        tiny_target,
        [[token] for token in drafts],
        proposer=oracles.Scripted(lambda text: drafts[text[0]]),
        sampling=Sampling(processors=[SaysZero()]),
        max_new_tokens=11,
        eos_ids=(),
    )
    assert [r.token_ids for r in result] == [[0] * 11] * 4
    assert [sum(r.stats.accepted) for r in result] == [0, 0, 8, 5]


def test_a_step_may_hold_more_than_two_thousand_nodes(tiny_target, oracles, trees):
    prompts = [[row, 2 * row + 1] for row in range(2, 44)]
    plain = [result.token_ids for result in generate(tiny_target, prompts, max_new_tokens=51, eos_ids=())]
    trees.clear()
    proposer = oracles.self_draft([prompt + answer for prompt, answer in zip(prompts, plain, strict=True)], 49)
    results = generate(tiny_target, prompts, proposer=proposer, max_new_tokens=51, eos_ids=())
    assert [result.token_ids for result in results] == plain
    assert [result.stats.steps for result in results] == [1] * len(prompts)  # all rows accept all
    assert sum(map(len, trees[0])) == 42 * 50


@pytest.mark.parametrize("length", [1, 2, 5])
def test_as_many_tokens_are_drafted_as_were_asked_for_and_the_same_in_every_call(tiny_target, prompts, trees, length):
    """No heuristic that a call leaves behind, no default instead of what was given."""
    draft = DraftModel(Target(tiny_target.model, tiny_target.tokenizer), tiny_target)  # always right
    calls = []
    for batch in (prompts[:1], prompts[1:], prompts[:1], prompts[1:]):
        trees.clear()
        options = {"grow": Chain(length), "max_new_tokens": 1 + 3 * (length + 1), "eos_ids": ()}
        generate(tiny_target, batch, draft_model=draft, **options)
        calls.append(list(trees))
        assert [[len(tree) for tree in step] for step in trees] == [[length + 1] * len(batch)] * 3
    assert calls[:2] == calls[2:]


@pytest.mark.parametrize("max_ngram", [1, 3, 5])
def test_prompts_shorter_than_the_n_gram_are_looked_up_like_others(tiny_target, oracles, max_ngram):
    prompts = [[300], [40, 41], [7, 8, 7], [5, 5, 6, 5]]
    lookup = PromptLookup(max_ngram=max_ngram, length=9)
    results = generate(tiny_target, prompts, proposer=lookup, max_new_tokens=12, eos_ids=())
    assert [r.token_ids for r in results] == [oracles.slow_decode(tiny_target, p, Sampling(), 12) for p in prompts]
    sampling = Sampling(processors=[SaysFirst()])
    for result in generate(tiny_target, prompts, proposer=lookup, sampling=sampling, max_new_tokens=12, eos_ids=()):
        assert result.token_ids == result.prompt_ids[:1] * 12
        assert result.stats.steps <= 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain-layers", "packed-layers"])
def test_a_target_with_a_lora_adapter_is_decoded_with_it(make_tiny_llama, tiny_target, oracles, dtype):
    prompt = [40, 41, 42, 43, 44, 40, 41]
    model = make_tiny_llama(dtype=dtype)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]), model)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    target = Target(model)
    answer = oracles.slow_decode(target, prompt, Sampling(), 16)
    assert answer != oracles.slow_decode(tiny_target, prompt, Sampling(), 16)
    proposers = [None, PromptLookup(), oracles.self_draft([prompt + answer], 3)]
    for proposer, batch in itertools.product(proposers, ([prompt], [prompt, prompt[:3]])):
        result = generate(target, batch, proposer=proposer, max_new_tokens=16, eos_ids=())[0]
        assert result.token_ids == answer
