"""Targets as files: what they lend is the model's, and their fingerprint is the one that `decode` computes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from decode import Target
from heads.fingerprint import fingerprint
from heads.formats.target_files import TargetFiles, find_model

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
CONFIGS = {
    "qwen2-tied": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "gemma3": Gemma3TextConfig(**SHAPE, num_key_value_heads=2, head_dim=8),
    "phi3": Phi3Config(**SHAPE, num_key_value_heads=2),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def assert_lends_the_same(folder, target):
    files = TargetFiles(folder)
    assert files.fingerprint == target.fingerprint
    assert torch.equal(files.embed.weight, target.embed.weight)
    assert torch.equal(files.lm_head.weight, target.lm_head.weight)
    assert files.num_layers == target.model.config.num_hidden_layers
    assert files.name == str(folder)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one-file", "sharded"])
def test_a_llama_is_the_same(lab, tied, dtype, shard):
    sharded = {} if shard is None else {"max_shard_size": shard}
    folder = lab.save_model(dtype=dtype, tie_word_embeddings=tied, num_hidden_layers=3, **sharded)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(shard)
    target = Target(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    assert_lends_the_same(folder, target)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert Target(other).fingerprint == TargetFiles(folder).fingerprint
    other.model.layers[2].mlp.down_proj.weight.data.neg_()
    assert Target(other).fingerprint != TargetFiles(folder).fingerprint


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_other_families_are_the_same(tmp_path, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert_lends_the_same(tmp_path, Target(model))
    assert TargetFiles(tmp_path).number("max_position_embeddings", "n_positions") == 128


@pytest.mark.parametrize("says", [True, None])
def test_a_tied_lm_head_that_is_stored_all_the_same_counts_once(lab, says):
    folder = lab.save_model(tie_word_embeddings=True, num_hidden_layers=2)
    target = Target(AutoModelForCausalLM.from_pretrained(folder))
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    lab.edit(folder, tie_word_embeddings=says)
    assert_lends_the_same(folder, target)


EXPERTS = {
    "mixtral": MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "granitemoe": GraniteMoeConfig(**SHAPE, num_key_value_heads=2, num_local_experts=2),
    "glm4_moe": Glm4MoeConfig(  # whose first layer has no experts
        **SHAPE, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
def test_mixtures_of_experts_are_told_by_what_files_and_modules_name_alike(tmp_path, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert_lends_the_same(tmp_path, Target(model))
    model.model.layers[1].self_attn.o_proj.weight.data.neg_()
    assert Target(model).fingerprint != TargetFiles(tmp_path).fingerprint


def test_files_that_cannot_tell_the_target_are_refused(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    files = TargetFiles(tmp_path)
    assert files.lm_head.weight.shape == (97, 32)
    with pytest.raises(ValueError, match=r"name weights otherwise than transformers' modules \(.*save_pretrained"):
        files.fingerprint  # noqa: B018


def test_the_same_weights_in_files_of_another_kind_are_not_read(lab):
    folder = lab.save_model(num_hidden_layers=2)
    expected = TargetFiles(folder).fingerprint
    save_file({"tok_embeddings.weight": torch.ones(97, 32)}, folder / "consolidated.safetensors")
    assert TargetFiles(folder).fingerprint == expected


def test_no_more_than_one_weight_is_held_for_the_fingerprint():
    asked = []

    def weight(name):
        asked.append(name)
        return torch.ones(3)

    fingerprint(1, 1, 1, {"b": None, "a": None}, weight)
    assert asked == ["a", "b"]


def test_folders_that_are_no_target_are_named(lab, tmp_path):
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        TargetFiles(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold an object"):
        TargetFiles(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        TargetFiles(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        TargetFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    with pytest.raises(ValueError, match="damaged"):
        TargetFiles(tmp_path)


def test_a_missing_shard_is_named(lab):
    folder = lab.save_model(max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = sorted(set(index["weight_map"].values()))[1]
    (folder / lost).unlink()
    with pytest.raises(ValueError, match=f"{lost} is missing"):
        TargetFiles(folder)


def test_a_name_on_the_hub_is_downloaded_and_kept_as_the_name(lab, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(lab.model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    files = TargetFiles("someone/model")
    assert asked == [("someone/model", ["*.json", "*.safetensors"])]
    assert files.name == "someone/model"
    assert files.fingerprint == lab.target.fingerprint


def test_a_name_that_the_hub_has_not_is_a_clear_error():
    with pytest.raises(ValueError, match="no/such-model is neither a model folder nor a model that the hub has"):
        find_model("no/such-model")
    with pytest.raises(ValueError, match=r"\./no/such/folder is neither"):
        find_model("./no/such/folder")
