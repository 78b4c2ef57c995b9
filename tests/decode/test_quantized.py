"""Targets in 8 and 4 bits: what is rounded, that drafts change nothing, and what heads of other roundings say."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from decode import Chain, Drafting, Sampling, StaticTree, Target, UnsupportedTargetError, generate
from decode.compare import first_difference
from decode.quantized import predicted_bytes, quantization_config, weight_bytes
from decode.tuned import plan_key
from heads import create_head, load_head, save_head
from heads.medusa import MedusaConfig

ROUNDINGS = ("8bit", "4bit")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 0}
SIZES |= {"eos_token_id": 1, "pad_token_id": 1}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [20, 21]]
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
Load = Callable[..., Target]


@pytest.fixture(scope="module")
def folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def load(folder: Path) -> Load:
    made: dict[object, Target] = {}

    def load(quantize: str | None, dtype: str = "float32") -> Target:
        if (quantize, dtype) not in made:
            made[quantize, dtype] = Target.from_pretrained(str(folder), dtype=dtype, device="cpu", quantize=quantize)
        return made[quantize, dtype]

    return load


def random_head(target: Target):
    head = create_head("medusa", MedusaConfig(hidden_size=64, vocab_size=320, num_heads=3), target)
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return head


@pytest.mark.parametrize("quantize", ROUNDINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=[1, 2, 3, 4])], ids=["greedy", "drawn"]
)
def test_drafts_leave_the_text_of_a_rounded_target_as_it_is(load: Load, quantize: str, dtype: str, sampling: Sampling):
    target = load(quantize, dtype)
    head = random_head(target)
    plain = generate(target, PROMPTS, sampling=sampling, max_new_tokens=24)
    same = 0
    for grow in (TREE, Chain(2)):
        drafted = generate(target, PROMPTS, proposer=Drafting(head, grow), sampling=sampling, max_new_tokens=24)
        for row, (one, other) in enumerate(zip(plain, drafted, strict=True)):
            difference = first_difference(target, PROMPTS[row], one.token_ids, other.token_ids, sampling, row=row)
            assert difference is None or difference.near_tie, difference
            same += difference is None
    assert same == 8 or dtype == "bfloat16"
    assert same > 0


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_logits_of_a_token_depend_on_no_other_row_and_on_no_draft(load: Load, quantize: str):
    model = load(quantize).model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 320, (4, 24), generator=generator)
    with torch.inference_mode():
        alone = torch.cat([model(ids[:1, : n + 1]).logits[:, -1:] for n in range(24)], dim=1)
        together = model(ids).logits[:1]
    torch.testing.assert_close(together, alone, atol=2e-5 * float(alone.abs().max()), rtol=0)


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_linear_layers_are_rounded_and_what_heads_read_is_not(load: Load, folder: Path, quantize: str):
    plain, target = load(None), load(quantize)
    assert target.quantize == quantize
    assert target.packed is None
    for part, whole in ((target.embed, plain.embed), (target.lm_head, plain.lm_head)):
        assert torch.equal(part.get_parameter("weight"), whole.get_parameter("weight"))
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    for name in (f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names):
        weight = LlamaForCausalLM.from_pretrained(folder).get_submodule(name).weight
        with torch.inference_mode():
            found = target.model.get_submodule(name)(torch.eye(weight.shape[1])).T
        assert 1e-4 < (found - weight).norm() / weight.norm() < {"8bit": 0.01, "4bit": 0.12}[quantize]
    assert target.precision == f"float32, weights in {quantize}"


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_bytes_are_predicted_before_a_model_is_rounded(load: Load, folder: Path, quantize: str):
    whole = LlamaForCausalLM.from_pretrained(folder)
    stored = weight_bytes(load(quantize).model)
    assert stored < 0.75 * weight_bytes(whole)
    assert predicted_bytes(whole, quantize, torch.float32) == pytest.approx(stored, rel=0.02, abs=14 * 1100)
    assert predicted_bytes(whole, None, torch.float32) == weight_bytes(whole)


def test_a_rounded_copy_is_the_same_target_and_other_states(load: Load):
    targets = [load(None), *map(load, ROUNDINGS)]
    assert len({target.fingerprint for target in targets}) == 1
    assert len({target.precision for target in targets}) == 3
    assert len({plan_key(target) for target in targets}) == 3


@pytest.mark.parametrize(("trained", "served"), [("4bit", None), (None, "8bit"), ("8bit", "4bit")])
def test_a_head_says_that_it_was_trained_on_another_rounding(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture, trained: str | None, served: str | None
):
    save_head(random_head(load(trained)), tmp_path / "head", target=load(trained))
    with caplog.at_level(logging.WARNING, "heads"):
        load_head(tmp_path / "head", load(trained))
        assert not caplog.records
        load_head(tmp_path / "head", load(served))
    (record,) = caplog.records
    names = {None: "not quantized", "8bit": "in 8bit", "4bit": "in 4bit"}
    before, after = record.getMessage().split("weights are")
    assert names[trained] in before
    assert names[served] in after
    assert "drafts may be accepted less often" in after


def test_a_rounding_that_mixes_the_tokens_of_a_pass_is_refused(folder: Path):
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"}
    )
    with pytest.raises(UnsupportedTargetError, match=r"LLM.int8.*quantize=\"8bit\""):
        Target(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "3bit"}, "unknown quantize '3bit'; use one of 8bit, 4bit"),
        ({"quantize": "8bit", "dtype": "float64"}, "8bit computes in float32, bfloat16 or float16, not in float64"),
        ({"quantize": "8bit", "compile": True}, "leave quantize, device_map and shard out"),
    ],
)
def test_what_cannot_be_rounded_is_a_clear_error(folder: Path, options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Target.from_pretrained(str(folder), device="cpu", **options)


def test_rows_that_the_library_would_unpack_wrongly_are_refused(tmp_path: Path, tiny_tokenizer):
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 96})).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"in_features=96.* no multiple of 64.* use 8bit"):
        Target.from_pretrained(str(tmp_path), device="cpu", quantize="4bit")
    Target.from_pretrained(str(tmp_path), device="cpu", quantize="8bit")


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_a_model_that_is_stored_rounded_is_a_target_of_its_own(load: Load, tmp_path: Path, quantize: str):
    rounded = load(quantize)
    rounded.model.save_pretrained(tmp_path)
    rounded.tokenizer.save_pretrained(tmp_path)
    stored = Target(LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}), pack=True)
    assert stored.quantize is None
    assert stored.packed is None
    assert stored.fingerprint != rounded.fingerprint
    with pytest.raises(ValueError, match="is stored with rounded weights; leave quantize out"):
        Target.from_pretrained(str(tmp_path), device="cpu", quantize=quantize)


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_a_model_whose_weights_would_stay_as_they_are_is_refused(tmp_path: Path, tiny_tokenizer, quantize: str):
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"quantize={quantize} rounds [\d,]+ of the [\d,]+ weights between embedding"):
        Target.from_pretrained(str(tmp_path), device="cpu", quantize=quantize)


def test_a_missing_library_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("decode.quantized.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'4bit needs bitsandbytes: pip install -e "\.\[quantized\]"'):
        quantization_config("4bit", "auto")
