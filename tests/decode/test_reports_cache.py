"""Public reports of state that outlives a rejection, a step or a call; of windows, prefill chunks and draft models."""

import copy
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, Qwen2Config

from decode import DraftModel, PromptLookup, Sampling, StaticTree, Target, generate, stream

WINDOW = 8
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOWED = {
    "all layers slide": MistralConfig(**SIZES, sliding_window=WINDOW),
    "one layer slides": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "two ropes": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=8, sliding_window=WINDOW, tie_word_embeddings=False
    ),
}
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
SAMPLING = Sampling(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def draft(tiny_target) -> DraftModel:
    """The target with some noise on its weights: now right, now wrong."""
    model = copy.deepcopy(tiny_target.model)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    return DraftModel(Target(model, tiny_target.tokenizer), tiny_target)


@pytest.fixture(params=["model", "model-tree", "head", "lookup"])
def options(request, draft, good_head) -> dict:
    return {
        "model": {"draft_model": draft},
        "model-tree": {"draft_model": draft, "grow": TREE},
        "head": {"head": good_head, "grow": TREE},
        "lookup": {"proposer": PromptLookup(length=4)},
    }[request.param]


def summary(results) -> list[tuple]:
    """What two calls must share: tokens, and how many drafts of each depth were offered and accepted."""
    return [(r.token_ids, r.stats.steps, r.stats.offered, r.stats.accepted) for r in results]


def test_calls_one_after_the_other_leave_nothing_behind(tiny_target, oracles, prompts, options):
    """Other prompts, lengths and batches lie between the first call and its repetition."""
    calls = [prompts[:2], prompts[3:4], prompts, prompts[1:2], prompts[::-1]]
    limits = [9, 20, 6, 5, 7]
    settings = {**options, "sampling": SAMPLING, "eos_ids": ()}
    first = [
        summary(generate(tiny_target, call, **settings, max_new_tokens=n))
        for call, n in zip(calls, limits, strict=True)
    ]
    again = [
        summary(generate(tiny_target, call, **settings, max_new_tokens=n))
        for call, n in reversed(list(zip(calls, limits, strict=True)))
    ]
    assert again[::-1] == first
    for row, prompt in enumerate(calls[0]):
        assert first[0][row][0] == oracles.slow_decode(tiny_target, prompt, SAMPLING, 9, seed=3, row=row)
    assert any(sum(accepted) for call in first for *_, accepted in call)


def test_a_second_turn_on_the_first_ones_text_is_decoded_as_if_it_were_new(tiny_target, oracles, prompts, options):
    text = list(prompts[0])
    for turn in ([60, 61], [62], [63, 64, 65]):
        text += turn
        result = generate(tiny_target, text, **options, max_new_tokens=11, eos_ids=())
        assert result.token_ids == oracles.slow_decode(tiny_target, text, Sampling(), 11)
        text += result.token_ids


def test_interleaved_calls_on_one_target_and_one_drafter_do_not_meet(tiny_target, prompts, options):
    """One of them ends early and is begun again with another prompt while the others go on."""
    groups = [prompts[:3], prompts[2:], prompts[1:2], prompts[4:]]
    settings = {**options, "sampling": SAMPLING, "eos_ids": ()}
    limits = [9, 8, 14, 6]
    alone = [
        summary(generate(tiny_target, group, **settings, max_new_tokens=n))
        for group, n in zip(groups, limits, strict=True)
    ]

    def run(numbers):
        for number in numbers:
            yield from (
                (number, d) for d in stream(tiny_target, groups[number], **settings, max_new_tokens=limits[number])
            )

    together: list[dict] = [{}, {}, {}, {}]
    for deltas in itertools.zip_longest(run([0]), run([3, 2]), run([1])):
        for number, delta in filter(None, deltas):
            if delta.result is not None:
                together[number][delta.row] = delta.result
    assert [summary(results[row] for row in range(len(results))) for results in together] == alone


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(WINDOWED[request.param], attn_implementation="sdpa").double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return Target(model)


def test_a_sliding_window_forgets_what_plain_decoding_forgets(windowed, oracles):
    """Forty tokens through a window of eight; half of the trees are rejected, the others are longer than the window."""
    prompts = [[5, 6, 7], list(range(20, 39)), [9] * 8]
    answers = [oracles.slow_decode(windowed, prompt, Sampling(), 40) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    assert all(len(set(answer)) > 4 for answer in answers)
    right = oracles.self_draft(texts, 10)

    def propose(text: list[int]):
        tokens = right.propose(text)
        wrong = [(token + 1) % 97 for token in tokens]
        if len(text) % 2:
            return wrong
        # a wrong sibling before each: a node's slot is not its position
        nodes = [token for pair in zip(wrong, tokens, strict=True) for token in pair]
        return nodes, (-1, *(2 * (node // 2) for node in range(len(nodes))))

    for proposer in (oracles.Scripted(propose, max_nodes=21), right, PromptLookup(length=5)):
        results = generate(windowed, prompts, proposer=proposer, max_new_tokens=40, eos_ids=())
        assert [result.token_ids for result in results] == answers


def test_a_prompt_that_ends_at_or_next_to_a_block_of_the_prefill_is_a_prompt_like_others(make_tiny_llama, oracles):
    model = make_tiny_llama()
    model.config.max_position_embeddings = 2048
    target = Target(model)
    token = torch.randint(2, 320, (1030,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [token[:length] for length in (511, 512, 513, 1024)]
    answers = [oracles.slow_decode(target, prompt, Sampling(), 3) for prompt in prompts]
    draft = DraftModel(target, target)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert generate(target, prompt, draft_model=draft, max_new_tokens=3, eos_ids=()).token_ids == answer
    for batch in ([0, 1, 2], [3, 0]):
        results = generate(target, [prompts[i] for i in batch], draft_model=draft, max_new_tokens=3, eos_ids=())
        assert [result.token_ids for result in results] == [answers[i] for i in batch]
        assert all(set(result.stats.accept_rates) == {1.0} for result in results)
