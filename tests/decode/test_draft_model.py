"""Drafts of a small model never change the text; a target that drafts for itself has every draft accepted."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from decode import Chain, Drafting, DraftModel, Sampling, StaticTree, Target, generate
from decode.session import Session
from decode.tree import TokenTree

LIMIT = 9
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))
SAMPLINGS = ["greedy", "sampled", "penalty"]
DRAFTS = ["itself", "other", "one more", "fewer", "rounded"]
GROWS = [Chain(4, temperature=1.7), replace(TREE, temperature=0.0), replace(TREE, draw="hybrid")]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOW = 5
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "mistral-window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma3-window": Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW),
}


def make_model(config, seed: int = 0, dtype: torch.dtype = torch.float64) -> AutoModelForCausalLM:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def target(tiny_tokenizer, make_tiny_llama) -> Target:
    """A target whose last eight ids are padding that no tokenizer knows."""
    return Target(make_tiny_llama(vocab_size=328), tiny_tokenizer)


@pytest.fixture(scope="module")
def drafts(target, tiny_tokenizer, make_tiny_llama) -> dict[str, DraftModel]:
    """Draft models for `target`."""
    wide = make_tiny_llama(vocab_size=329, seed=2)
    with torch.no_grad():
        wide.lm_head.weight[328] *= 30  # its favourite at half of the places
    models = {
        "other": make_tiny_llama(vocab_size=328, seed=5),
        "one more": wide,
        "fewer": make_tiny_llama(vocab_size=322, seed=3),
        "rounded": make_tiny_llama(vocab_size=328).to(torch.bfloat16),
    }
    made = {name: DraftModel(Target(model, tiny_tokenizer), target) for name, model in models.items()}
    return {"itself": DraftModel(target, target), **made}


@pytest.fixture(scope="module")
def texts(target, oracles, prompts, samplings) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """Prompts, one of them with a padding id, and the slow decoder's answers to them."""
    some = [*prompts[:3], [9, 325, 9]]
    return {
        name: (
            some,
            [oracles.slow_decode(target, p, samplings[name], LIMIT, seed=4, row=row) for row, p in enumerate(some)],
        )
        for name in SAMPLINGS
    }


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_the_slow_decoders(target, drafts, texts, samplings, draft, name):
    some, answers = texts[name]
    options = {"draft_model": drafts[draft], "max_new_tokens": LIMIT, "eos_ids": ()}
    sampling = replace(samplings[name], seed=4)
    for grow in GROWS:
        results = generate(target, some, grow=grow, sampling=sampling, **options)
        assert [result.token_ids for result in results] == answers
    for grow in (None, TREE):
        alone = generate(target, some[0], grow=grow, sampling=sampling, **options)
        assert alone.token_ids == answers[0]


def test_some_but_not_all_drafts_are_accepted_where_the_equalities_are_tested(target, drafts, texts):
    for draft in ("rounded", "itself"):
        options = {"grow": replace(TREE, temperature=1.0), "max_new_tokens": 40, "eos_ids": ()}
        sampling = Sampling(temperature=2.5, seed=4)
        results = generate(target, texts["greedy"][0], draft_model=drafts[draft], sampling=sampling, **options)
        steps = sum(result.stats.steps for result in results)
        assert 1.3 < sum(result.stats.tokens - 1 for result in results) / steps < 3.5


@pytest.mark.parametrize("depth", [1, 3, 4])
@pytest.mark.parametrize(
    ("sampling", "accept", "draw"),
    [
        (Sampling(), "match", "none"),
        (Sampling(), "rejection", "without_replacement"),
        (Sampling(temperature=0.8, seed=1), "match", "none"),
        (Sampling(temperature=0.8, seed=1), "rejection", "without_replacement"),
        (Sampling(temperature=1.3, seed=2), "rejection", "with_replacement"),
        (Sampling(temperature=0.8, seed=1), "block", "without_replacement"),
        (Sampling(temperature=1.3, seed=2), "block", "with_replacement"),
    ],
)
def test_a_target_that_drafts_for_itself_has_every_draft_accepted(
    target, drafts, prompts, depth, sampling, accept, draw
):
    limit = 1 + 4 * (depth + 1)
    for some in (prompts, prompts[:1]):
        results = generate(
            target, some, draft_model=drafts["itself"], grow=Chain(depth, draw=draw), accept=accept,
            sampling=sampling, max_new_tokens=limit, eos_ids=(),
        )  # fmt: skip
        for result in results:
            assert result.stats.accept_rates == [1.0] * depth
            assert result.stats.tokens_per_step == depth + 1


@pytest.mark.parametrize("accept", ["match", "rejection", "block"])
def test_by_default_a_chain_of_four_is_drafted_that_suits_the_rule(target, drafts, accept):
    sampling = Sampling(temperature=1.1, seed=3)
    options = {"draft_model": drafts["itself"], "accept": accept, "sampling": sampling, "eos_ids": ()}
    result = generate(target, [5, 6, 7], max_new_tokens=16, **options)
    assert result.stats.accepted == [3] * 4  # a point mass would be accepted with p


def test_the_drafts_temperature_is_their_own(target, drafts, monkeypatch):
    """Draws carry the softmax at the drafts' temperature, not at the target's."""
    seen: list[tuple[int, TokenTree]] = []
    score = Session.score

    def record(self, trees):
        seen.extend(zip(self.lengths, trees, strict=True))
        return score(self, trees)

    monkeypatch.setattr(Session, "score", record)
    for own, expected in ((0.4, 0.4), (None, 1.9)):
        seen.clear()
        generate(
            target, [5, 6, 7], draft_model=drafts["other"], accept="rejection", max_new_tokens=4, eos_ids=(),
            grow=Chain(2, draw="without_replacement", temperature=own), sampling=Sampling(temperature=1.9, seed=0),
        )  # fmt: skip
        tree = next(tree for length, tree in seen if length == 3 and tree.draws is not None)
        assert tree.draws.drawn == (False, True, True)
        text = [5, 6, 7]
        for node in range(2):
            text.append(int(tree.token_ids[node]))
            with torch.no_grad():
                logits = drafts["other"].model.model(torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(tree.draws.probs[node], (logits / expected).softmax(-1), atol=1e-12, rtol=1e-9)


def test_ids_that_only_one_of_the_two_has_are_not_proposed(target, drafts):
    wide, few = drafts["one more"].drafter(), drafts["fewer"].drafter()
    assert (wide.vocabulary, wide.vocab_size) == (None, 328)
    assert few.vocabulary.tolist() == list(range(322))
    assert few.vocab_size == 328
    text = torch.tensor([[5, 325, 40, 41], [9, 9, 9, 327]])
    for drafter, columns in ((wide, 328), (few, 322)):
        assert drafter.sync(text, torch.empty(2, 3, 0), [3, 3]).shape == (2, columns)
        assert drafter.extend(torch.tensor([[3, 4], [5, 6]]), torch.zeros(2, 2, dtype=torch.int64)).shape[-1] == columns
    raw = drafts["one more"].model.model(text, use_cache=False).logits
    assert (raw.argmax(-1) == 328).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_model_of_any_architecture_and_window_drafts(name, oracles):
    model = make_model(LlamaConfig(**SIZES))
    target = Target(model)
    draft = DraftModel(Target(make_model(CONFIGS[name], seed=1)), target)
    itself = Target(make_model(CONFIGS[name]))
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [44], [20, 21, 22]]
    for drafted, with_ in ((target, draft), (itself, DraftModel(itself, itself))):
        plain = [oracles.slow_decode(drafted, prompt, Sampling(), LIMIT) for prompt in prompts]
        for grow in (Chain(3), TREE):
            results = generate(
                drafted, prompts, draft_model=with_, grow=grow, max_new_tokens=LIMIT, eos_ids=(), check=True
            )
            assert [result.token_ids for result in results] == plain
            if drafted is itself:
                assert all(result.stats.accept_rates == [1.0] * 3 for result in results)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox"])
def test_a_text_may_fill_the_context_of_both_models(name):
    target = Target(make_model(CONFIGS[name]))
    assert target.max_length == 32
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [9] * 25, [10] * 31]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        plain = generate(target, prompts, sampling=sampling, max_new_tokens=100, eos_ids=())
        assert [len(result.prompt_ids) + len(result.token_ids) for result in plain] == [32] * 3
        for seed in (0, 1):
            draft = DraftModel(Target(make_model(CONFIGS[name], seed)), target)
            for grow in (Chain(6), TREE):
                results = generate(
                    target, prompts, draft_model=draft, grow=grow, sampling=sampling, max_new_tokens=100, eos_ids=()
                )
                assert [result.token_ids for result in results] == [result.token_ids for result in plain]


def test_a_text_longer_than_the_draft_models_context_is_refused_up_front(monkeypatch):
    target = Target(make_model(LlamaConfig(**SIZES)))
    draft = DraftModel(Target(make_model(LlamaConfig(**{**SIZES, "max_position_embeddings": 20}))), target)
    assert len(generate(target, [5] * 8, draft_model=draft, max_new_tokens=12, eos_ids=()).token_ids) == 12
    assert len(generate(target, [5] * 8, proposer=Drafting(draft, TREE), max_new_tokens=12, eos_ids=()).token_ids) == 12
    monkeypatch.setattr(Session, "prefill", lambda *_: pytest.fail("a pass was made"))
    for options in ({"draft_model": draft}, {"proposer": Drafting(draft, Chain(2))}):
        with pytest.raises(ValueError, match=r"may reach 21 tokens, but the draft model was made for 20; .*without it"):
            generate(target, [[5], [5] * 8], max_new_tokens=13, **options)


def with_vocabulary(tokenizer: PreTrainedTokenizerFast, **changed: int) -> PreTrainedTokenizerFast:
    """The tokenizer with other ids for some tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["model"]["vocab"].update(changed)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))


def test_another_tokenizer_is_refused_with_a_token_that_differs(target, tiny_tokenizer):
    ids = tiny_tokenizer.get_vocab()
    model = target.model
    permuted = with_vocabulary(tiny_tokenizer, a=ids["b"], b=ids["a"])
    message = rf"2 tokens differ, such as 'a', which is {ids['a']} to the target and {ids['b']} to the draft"
    with pytest.raises(ValueError, match=message):
        DraftModel(Target(model, permuted), target)
    larger = with_vocabulary(tiny_tokenizer)
    larger.add_tokens(["extra"])
    with pytest.raises(ValueError, match="1 tokens differ, such as 'extra', which is unknown to the target and 298"):
        DraftModel(Target(model, larger), target)
    with pytest.raises(ValueError, match="such as 'extra', which is 298 to the target and unknown to the draft"):
        DraftModel(target, Target(model, larger))
    assert DraftModel(Target(model, with_vocabulary(tiny_tokenizer)), target).num_drafted == 328


def test_without_tokenizers_only_equal_sizes_will_do(target, drafts, tiny_tokenizer):
    fewer = drafts["fewer"].model.model
    for model, other in ((Target(fewer), target), (Target(fewer, tiny_tokenizer), Target(target.model))):
        with pytest.raises(ValueError, match=r"has 322 tokens and the target 328; give both their tokenizers"):
            DraftModel(model, other)
    assert DraftModel(Target(drafts["other"].model.model), target).num_drafted == 328


def test_models_on_two_devices_are_refused(target, drafts, monkeypatch):
    model = drafts["other"].model
    place = {id(model): torch.device("cuda", 1)}
    monkeypatch.setattr(Target, "device", property(lambda self: place.get(id(self), torch.device("cpu"))))
    with pytest.raises(ValueError, match=r"on cuda:1, but the target on cpu; put both on one device"):
        DraftModel(model, target)


def test_a_draft_model_may_be_a_folder_and_takes_the_targets_precision(target, drafts, texts, tmp_path):
    folder = tmp_path / "draft"
    drafts["fewer"].model.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    some, answers = texts["greedy"]
    for path in (folder, str(folder)):
        results = generate(target, some, draft_model=path, max_new_tokens=LIMIT, eos_ids=())
        assert [result.token_ids for result in results] == answers
    assert DraftModel.from_pretrained(folder, target).model.dtype == torch.float64
    assert DraftModel.from_pretrained(folder, target, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(OSError, match="nothing"):
        generate(target, some, draft_model=tmp_path / "nothing")
