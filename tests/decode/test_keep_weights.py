"""Targets that give their plain weights up: the same outputs and heads, half the memory, and errors for all else."""

import copy
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel, Qwen3Config

from decode import Chain, Drafting, DraftModel, Target, generate
from heads import FeatureBatch, create_head, head_class, load_head, save_head
from train.new_head import target_sizes

V, D = 320, 32
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS = {
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gpt-neox": GPTNeoXConfig(**SIZES),
}
STAYS = {  # embedding, lm_head if it is not tied, norms
    "llama-tied": V * D + 5 * D,
    "llama-biases": 2 * V * D + 5 * D,
    "qwen3": 2 * V * D + 5 * D + 4 * 16,
    "gpt-neox": 2 * V * D + 5 * 2 * D,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 12], [40, 41, 42]]
HEADS = {
    "medusa": {"num_heads": 3, "losses": {"ce": 1.0}},
    "hydra": {"num_heads": 3, "prefix_layer": True},
    "eagle": {"max_depth": 3, "draft_vocab_size": 46},
    "eagle3": {"max_depth": 3, "feature_layers": (1, 2), "draft_vocab_size": 46},
}
KEEP = "keep_weights=True"


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    """Return the folder of a model."""
    root = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        make_model(name).save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    return lambda name: str(root / name)


@pytest.fixture
def load(folder):
    return lambda name, **options: Target.from_pretrained(folder(name), device="cpu", **options)


def outputs(target: Target) -> list[torch.Tensor]:
    encoded = target.encode_features(torch.tensor(PROMPTS[:1]), [len(PROMPTS[0])], (1, 2))
    prefill = target.session(2, 20).prefill(PROMPTS, chunk_size=4)
    return [*encoded, prefill.logits, prefill.hidden]


def new_head(kind: str, target: Target):
    torch.manual_seed(1)
    config = head_class(kind).Config
    head = create_head(kind, config(**HEADS[kind], **target_sizes(target, config)), target)
    if head.vocabulary is not None:
        head.set_vocabulary(torch.tensor([1, *range(5, 320, 7)]))
    for parameter in head.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    return head


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_target_keeps_no_plain_weights_but_embedding_lm_head_and_norms(load, name):
    target, kept = load(name), load(name, keep_weights=True)
    assert len(target.packed) == len(kept.packed)
    inside = [linear for layer in target._decoder_layers for linear in layer.modules() if type(linear) is nn.Linear]
    assert {p for p in target.model.parameters() if p.is_meta} == {p for linear in inside for p in linear.parameters()}
    real = [p for p in target.model.parameters() if not p.is_meta]
    assert sum(p.nbytes for p in real) == sum(p.untyped_storage().nbytes() for p in real) == 4 * STAYS[name]
    assert not any(p.is_meta for p in kept.model.parameters())
    assert list(target.model.state_dict()) == list(kept.model.state_dict())


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_texts_and_fingerprint_are_those_of_a_target_that_keeps_them(load, name):
    target, kept = load(name), load(name, keep_weights=True)
    for _ in range(2):  # the second time after what the first may have changed
        for output, expected in zip(outputs(target), outputs(kept), strict=True):
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        target.packed.repack()
    assert target.fingerprint == kept.fingerprint == Target(make_model(name), pack=False).fingerprint
    results, expected = (generate(each, PROMPTS, max_new_tokens=12, eos_ids=()) for each in (target, kept))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_holds_the_memory_that_the_model_was_loaded_into(name):
    model = make_model(name)
    memory = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    target = Target(model, keep_weights=False)
    assert [held() for held in memory] == [None] * len(memory)
    outputs(target)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_reads_the_memory_that_the_model_was_loaded_into(name):
    model = make_model(name)
    originals = [parameter.detach() for parameter in model.parameters()]
    target = Target(model, keep_weights=False)
    expected = outputs(target)
    for original in originals:
        original.fill_(7.0)
    for output, wanted in zip(outputs(target), expected, strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_a_head_drafts_on_it_as_on_one_that_keeps_them(load, tmp_path, name, kind):
    target, kept = load(name), load(name, keep_weights=True)
    save_head(new_head(kind, target), tmp_path / "head", target=target)
    heads = [load_head(tmp_path / "head", each, keep_weights=each is kept) for each in (target, kept)]
    hidden = torch.randn(1, 3, D)
    features = torch.randn(1, 3, 2 * D) if heads[0].feature_layers else None
    drafted, expected = (head.drafter().sync(torch.tensor([[5, 6, 7, 8]]), hidden, [3], features) for head in heads)
    torch.testing.assert_close(drafted, expected)
    plain = generate(kept, PROMPTS, max_new_tokens=12, eos_ids=())
    results = generate(target, PROMPTS, head=heads[0], max_new_tokens=12, eos_ids=())
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert sum(results[0].stats.offered) > 0


def test_what_was_given_up_goes_back_to_the_system(load, tmp_path, monkeypatch):
    calls = []
    for module in ("decode.fused", "heads.checkpoint"):
        monkeypatch.setattr(f"{module}.give_back", lambda module=module: calls.append(module))
    target = load("llama-tied")
    assert calls == ["decode.fused"]
    save_head(new_head("medusa", target), tmp_path / "head", target=target)
    for keep in (False, True):
        load_head(tmp_path / "head", target, keep_weights=keep)
    load("llama-tied", keep_weights=True)
    assert calls == ["decode.fused", "heads.checkpoint"]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_gave_its_weights_up_refuses_all_but_drafting(load, tmp_path, kind):
    target = load("llama-tied")
    save_head(new_head(kind, target), tmp_path / "head", target=target)
    head, kept = (load_head(tmp_path / "head", target, keep_weights=keep) for keep in (False, True))
    linear = {name for name, module in head.named_modules() if type(module) is nn.Linear}
    assert linear
    assert {name.rpartition(".")[0] for name, p in head.named_parameters() if p.is_meta} == linear
    assert not any(p.is_meta for p in kept.parameters())
    torch.testing.assert_close(head.drafter().sync(*some_text(head)), kept.drafter().sync(*some_text(kept)))
    with pytest.raises(ValueError, match=f"was given up when the head was loaded; load it with {KEEP}"):
        save_head(head, tmp_path / "again", target=target)
    assert not (tmp_path / "again").exists()
    ids = torch.tensor(PROMPTS[:1])
    features = target.encode_features(ids, [ids.shape[1]], head.feature_layers)
    with pytest.raises(RuntimeError, match=KEEP):
        head(FeatureBatch(ids, torch.ones_like(ids).bool(), *features))


def some_text(head) -> tuple:
    """What a drafter takes of a text of three tokens and its root."""
    torch.manual_seed(3)
    return (
        torch.tensor([[5, 6, 7, 8]]),
        torch.randn(1, 3, D),
        [3],
        torch.randn(1, 3, 2 * D) if head.feature_layers else None,
    )


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_trains_on_it(load, kind):
    gradients = []
    for keep in (False, True):
        target = load("llama-tied", keep_weights=keep)
        head = new_head(kind, target)
        ids = torch.tensor(PROMPTS[:1])
        head(FeatureBatch(ids, torch.ones_like(ids).bool(), target.encode(ids, [ids.shape[1]]))).loss.backward()
        gradients.append([parameter.grad for parameter in head.parameters() if parameter.grad is not None])
    assert len(gradients[0]) > 2
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_it_can_be_a_draft_model(load, folder):
    target = load("qwen3")
    draft = DraftModel.from_pretrained(folder("qwen3"), target)
    assert any(parameter.is_meta for parameter in draft.model.model.parameters())
    plain = generate(target, PROMPTS[0], max_new_tokens=16, eos_ids=())
    result = generate(target, PROMPTS[0], proposer=Drafting(draft, Chain(3)), max_new_tokens=16, eos_ids=())
    assert result.token_ids == plain.token_ids
    assert result.stats.steps == 4  # as it is the target itself, every draft is accepted


def forward(target: Target) -> None:
    target.model(torch.tensor(PROMPTS[:1]))


def forward_in_float64(target: Target) -> None:
    with torch.no_grad():
        target.model.double()(torch.tensor(PROMPTS[:1]))


REFUSED = {
    "computing with gradients": forward,
    "disable": lambda target: target.packed.disable(),
    "disabled": lambda target: target.packed.disabled().__enter__(),
    "copying": copy.deepcopy,
    "copying the model": lambda target: copy.deepcopy(target.model),
    "pickling": lambda target: pickle.dumps(target.model),
    "casting": forward_in_float64,
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", ["llama-tied", "gpt-neox"])
def test_what_needs_plain_weights_is_refused_and_harms_nothing(load, name, what):
    target = load(name)
    expected = outputs(target)
    with pytest.raises(RuntimeError, match=KEEP):
        REFUSED[what](target)
    if what != "casting":
        for output, wanted in zip(outputs(target), expected, strict=True):
            torch.testing.assert_close(output, wanted)


def test_an_adapter_that_is_put_in_later_is_refused(load):
    target = load("llama-tied")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"]), target.model)
    with pytest.raises(RuntimeError, match=KEEP):
        outputs(target)


@pytest.mark.parametrize("options", [{"pack": False}, {"dtype": "float64"}, {"keep_weights": True}], ids=str)
def test_weights_stay_where_nothing_is_packed_or_they_are_asked_for(load, options):
    target = load("llama-tied", **options)
    assert bool(target.packed) == ("keep_weights" in options)
    target.model(torch.tensor(PROMPTS[:1])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in target.model.parameters())
    for output, wanted in zip(outputs(copy.deepcopy(target)), outputs(target), strict=True):
        torch.testing.assert_close(output, wanted)
