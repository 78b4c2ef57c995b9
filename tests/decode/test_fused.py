"""Decoder layers that are computed fused give what the plain layers give; every other layer stays as it is."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from decode import PromptLookup, Sampling, Target, generate
from decode.tree import TokenTree, tree_shape

V, WINDOW = 97, 6
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
FAMILIES = {
    "llama": LlamaConfig(**GROUPED),
    "llama-biases": LlamaConfig(**SIZES, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "mistral-window": MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2-windows": Qwen2Config(**GROUPED, **WINDOWS),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "qwen3-windows": Qwen3Config(**SIZES, **WINDOWS, num_key_value_heads=1, head_dim=8, attention_bias=True),
}
OTHERS = {"gemma": GemmaConfig(**GROUPED, head_dim=8), "gpt-neox": GPTNeoXConfig(**SIZES)}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 12], [40, 41, 42], [20, 21, 22, 23, 20, 21, 22, 24, 25, 26, 27, 28, 20, 21]]
SHAPES = [(-1, 0, 0, 1, 1, 2, 4), (-1,), (-1, 0, 1, 2)]


def make_model(name: str, attention: str = "sdpa") -> PreTrainedModel:
    """A float32 model in which no weight, norm or bias is 0 or 1."""
    torch.manual_seed(0)
    config = copy.deepcopy({**FAMILIES, **OTHERS}[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if key.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.4, 1.6)
        else:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def all_outputs(target: Target) -> list[torch.Tensor]:
    """What a pass without a cache, a prefill in chunks and a ragged tree pass give and leave in the cache."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([prompt + [1] * (longest - len(prompt)) for prompt in PROMPTS])
    encoded = target.encode_features(ids, [len(prompt) for prompt in PROMPTS], (1, 2))
    with torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits
    session = target.session(len(PROMPTS), 40, (1, 2))
    first = session.prefill(PROMPTS, chunk_size=5)
    trees = [TokenTree(torch.arange(30, 30 + len(shape)), tree_shape(shape)) for shape in SHAPES]
    second = session.score(trees)
    passes = [part for out in (first, second) for part in (out.logits, out.hidden, out.features)]
    cached = [part for row in range(len(PROMPTS)) for layer in session.cache.contents(row) for part in layer]
    return [logits, *encoded, *passes, *cached]


def assert_equals_plain(target: Target) -> list[torch.Tensor]:
    """Compare all outputs with those of the plain layers, relative to the largest entry, and return them."""
    outputs = all_outputs(target)
    with target.packed.disabled():
        for output, expected in zip(outputs, all_outputs(target), strict=True):
            assert output.shape == expected.shape
            assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    return outputs


def packed_modules(target: Target) -> set[nn.Module]:
    return {module for module in target.model.modules() if "forward" in vars(module)}


def linears(module: nn.Module) -> set[nn.Module]:
    return {part for part in module.modules() if type(part) is nn.Linear}


@pytest.fixture
def calls():
    """Replace a module by a subclass of its own, and record the calls of its forward."""
    seen: list[nn.Module] = []

    def watch(module: nn.Module) -> list[nn.Module]:
        kind = type(module)

        def forward(self, *args, **kwargs):
            seen.append(self)
            return kind.forward(self, *args, **kwargs)

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
        return seen

    return watch


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_is_fused_and_gives_what_the_plain_one_gives(name):
    target = Target(make_model(name))
    assert packed_modules(target) == {*target.model.model.layers, target.lm_head}
    assert len(target.packed) == 3
    called = []
    for linear in linears(target.model.model):
        linear.register_forward_hook(lambda module, args, output: called.append(module))
    all_outputs(target)
    assert not called
    assert_equals_plain(target)
    assert set(called) == linears(target.model.model)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_generate_of_transformers_writes_the_same_texts(name, cache):
    target = Target(make_model(name))
    padded = torch.tensor([[1] * (14 - len(prompt)) + prompt for prompt in PROMPTS])
    options = {"min_new_tokens": 16, "max_new_tokens": 16, "do_sample": False, "cache_implementation": cache}
    for ids in (torch.tensor(PROMPTS[:1]), padded):
        mask = (ids != 1).long()
        answers = target.model.generate(ids, attention_mask=mask, **options)
        with target.packed.disabled():
            assert answers.tolist() == target.model.generate(ids, attention_mask=mask, **options).tolist()
        assert len(set(answers[0, -16:].tolist())) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_text_written_with_trees_is_that_of_the_plain_layers(name, oracles):
    target = Target(make_model(name))
    with target.packed.disabled():
        answers = [oracles.slow_decode(target, prompt, Sampling(), 20) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def propose(text):  # the right tokens and wrong ones beside them
        right = next(whole for whole in texts if whole[: len(text)] == text)[len(text) : len(text) + 3]
        tokens = [token for pair in ((r, (r + 1) % V) for r in right) for token in pair]
        return tokens, (-1, 0, 0, 1, 1, 3, 3)[: len(tokens) + 1]

    for proposer in (oracles.Scripted(propose), PromptLookup(length=4)):
        results = generate(target, PROMPTS, proposer=proposer, max_new_tokens=20, eos_ids=())
        assert [result.token_ids for result in results] == answers
    drafted = generate(target, PROMPTS[0], proposer=oracles.Scripted(propose), max_new_tokens=20, eos_ids=())
    assert drafted.stats.steps == 5  # four tokens a pass


@pytest.mark.parametrize("name", FAMILIES)
def test_of_layers_with_eager_attention_only_the_linears_are_packed(name):
    target = Target(make_model(name, "eager"))
    assert packed_modules(target) == linears(target.model)
    assert_equals_plain(target)


@pytest.mark.parametrize("name", OTHERS)
def test_of_other_families_only_the_linears_are_packed(name):
    target = Target(make_model(name))
    assert packed_modules(target) == linears(target.model)
    assert_equals_plain(target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_in_other_precisions_nothing_is_packed(dtype):
    target = Target(make_model("llama").to(dtype))
    assert not target.packed
    assert not packed_modules(target)


PARTS = ["", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "self_attn.k_norm"]


@pytest.mark.parametrize("part", [*PARTS, "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_layer_with_a_subclass_inside_is_left_alone(part, calls):
    model = make_model("qwen3")
    first, second = model.model.layers
    seen = calls(first.get_submodule(part))
    target = Target(model)
    assert packed_modules(target) == {second, model.lm_head, *linears(first)}
    seen.clear()
    with torch.no_grad():
        model(torch.tensor([[5, 6]]))
    assert len(seen) == 1
    assert_equals_plain(target)


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("linear", ["q_proj", "down_proj"])
def test_an_adapter_is_followed_whether_it_is_put_in_before_or_after(linear, later):
    model = make_model("llama")
    without = all_outputs(Target(copy.deepcopy(model)))
    early = Target(model) if later else None
    config = LoraConfig(r=4, target_modules=[linear], layers_to_transform=[0], init_lora_weights=False)
    inject_adapter_in_model(config, model)
    target = early or Target(model)
    assert len(target.packed) == (3 if later else 2 + 7 + 2)
    outputs = assert_equals_plain(target)
    assert (outputs[0] - without[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_the_plain_layers_and_what_an_optimizer_steps_to_is_followed(name):
    plain, model = make_model(name), make_model(name)
    target = Target(model)
    ids = torch.tensor([PROMPTS[0], PROMPTS[2][:11]])
    for each in (plain, model):
        each(ids, labels=ids).loss.backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-6, rtol=1e-4)
    before = assert_equals_plain(target)
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        model(ids, labels=ids).loss.backward()
        optimizer(model.parameters(), lr=0.05, fused=True).step()  # which does not count the change
        after = assert_equals_plain(target)
        assert (after[0] - before[0]).abs().max() > 0.01
        before = after


@pytest.mark.parametrize("name", FAMILIES)
def test_every_edit_of_a_weight_a_bias_or_a_norm_is_followed(name):
    target = Target(make_model(name))
    before = all_outputs(target)
    for key, parameter in target.model.named_parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        after = assert_equals_plain(target)
        changed = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
        assert changed > 1e-3, key
        before = after


def test_a_target_that_keeps_its_weights_can_be_copied():
    target = Target(make_model("qwen3"))
    expected = all_outputs(target)
    copied = copy.deepcopy(target)
    for output, wanted in zip(assert_equals_plain(copied), expected, strict=True):
        torch.testing.assert_close(output, wanted)
    assert packed_modules(copied).isdisjoint(packed_modules(target))


@pytest.mark.parametrize("name", ["llama", "qwen3-windows"])
def test_on_a_device_whose_attention_takes_no_groups_keys_are_repeated(name, monkeypatch):
    model = make_model(name)
    outputs = []
    asked = []
    for shares in (True, False):
        monkeypatch.setattr("decode.fused.may_share", lambda device, shares=shares: asked.append(shares) or shares)
        session = Target(model, name="tiny").session(1, 40)
        session.prefill([PROMPTS[0]])
        shape = tree_shape(SHAPES[0])
        outputs.append(session.score([TokenTree(torch.arange(30, 30 + shape.size), shape)]).logits)
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    assert set(asked) == {True, False}
