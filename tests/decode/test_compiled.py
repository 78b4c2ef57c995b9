"""Compiled decoder layers give what the plain ones give, in few compilations; unknown layers are refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from decode import PromptLookup, Target, UnsupportedTargetError, generate
from decode.machine import machine

PROMPTS = [[5, 6, 7, 8, 9] * 3, [7, 8, 9, 7, 8]]


def tiny_qwen3():
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4))
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_give_the_plain_layers_texts_and_logits():
    compiled, plain = Target(tiny_qwen3(), compile=True), Target(tiny_qwen3(), pack=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for prompts in (PROMPTS[0], PROMPTS):
        for proposer in (None, PromptLookup()):
            texts = [
                generate(target, prompts, proposer=proposer, max_new_tokens=20, eos_ids=())
                for target in (compiled, plain)
            ]
            ours, theirs = ([r.token_ids for r in (t if isinstance(t, list) else [t])] for t in texts)
            assert ours == theirs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 8  # not one for every length or layer
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(compiled.encode(ids, [15]), plain.encode(ids, [15]), atol=1e-4, rtol=1e-4)
    compiled.packed.disable()
    torch.testing.assert_close(compiled.encode(ids, [15]), plain.encode(ids, [15]), atol=0, rtol=0)


def test_gradients_go_through_the_plain_layers(make_tiny_llama, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target, plain = Target(make_tiny_llama(), compile=True), Target(make_tiny_llama(), pack=False)
    grads = []
    for model in (target.model, plain.model):
        model(input_ids=torch.tensor([PROMPTS[0]])).logits.sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*grads)
    assert target.fingerprint == plain.fingerprint  # no weights were given up
    assert (machine(target)["layers"], machine(plain)["layers"]) == ("compiled", "plain")


def test_uncompiled_the_two_functions_are_the_layer(make_tiny_llama, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for make in (make_tiny_llama, lambda: tiny_qwen3().double()):
        target, plain = Target(make(), compile=True), Target(make(), pack=False)
        ids = torch.tensor([PROMPTS[0]])
        # the plain layers' norms compute in float32
        torch.testing.assert_close(target.encode(ids, [15]), plain.encode(ids, [15]), atol=1e-5, rtol=1e-5)
        text = generate(target, PROMPTS[1], proposer=PromptLookup(), max_new_tokens=20, eos_ids=()).token_ids
        assert text == generate(plain, PROMPTS[1], max_new_tokens=20, eos_ids=()).token_ids


def test_models_without_known_layers_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64))
    with pytest.raises(UnsupportedTargetError, match=r"knows the decoder layers of llama, .* GPT2LMHeadModel has none"):
        Target(model, compile=True)
