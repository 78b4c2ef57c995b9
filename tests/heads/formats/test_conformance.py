"""Exports against tables of what each reader wants: keys, shapes, types and config entries, written down by hand.

Sizes of the target: D 32, V 97, 9 layers, I 48, 4 and 2 heads of 6; the draft vocabulary has 13 tokens.
"""

import pytest
import torch

F32, I64, BOOL = torch.float32, torch.int64, torch.bool
LAYER = {
    "self_attn.o_proj.weight": (F32, 32, 24),
    "mlp.gate_proj.weight": (F32, 48, 32),
    "mlp.up_proj.weight": (F32, 48, 32),
    "mlp.down_proj.weight": (F32, 32, 48),
    "post_attention_layernorm.weight": (F32, 32),
}
EAGLE3_LAYER = {
    **LAYER,
    "self_attn.q_proj.weight": (F32, 24, 64),
    "self_attn.k_proj.weight": (F32, 12, 64),
    "self_attn.v_proj.weight": (F32, 12, 64),
    "input_layernorm.weight": (F32, 32),
    "hidden_norm.weight": (F32, 32),
}
EAGLE3_ALL = {
    "fc.weight": (F32, 32, 96),
    "norm.weight": (F32, 32),
    "lm_head.weight": (F32, 97, 32),
    "embed_tokens.weight": (F32, 97, 32),
}
EAGLE3_SMALL = {**EAGLE3_ALL, "lm_head.weight": (F32, 13, 32), "d2t": (I64, 13), "t2d": (BOOL, 97)}
EAGLE = {
    "fc.weight": (F32, 32, 64),
    "layers.0.self_attn.q_proj.weight": (F32, 24, 32),
    "layers.0.self_attn.k_proj.weight": (F32, 12, 32),
    "layers.0.self_attn.v_proj.weight": (F32, 12, 32),
    **{f"layers.0.{name}": shape for name, shape in LAYER.items()},
}
ROPE = {
    "rope_theta": 5e4,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-4,
    **ROPE,
    "max_position_embeddings": 128,
    "vocab_size": 97,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VARIANTS = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
EAGLE3_CONFIG = {
    **LLAMA,
    **VARIANTS,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 97,
    "target_hidden_size": 32,
    "num_aux_hidden_states": 3,
    "norm_before_residual": False,
    "torch_dtype": "float32",
}
IDS = "eagle_aux_hidden_state_layer_ids"


def shapes(tensors):
    return {name: (tensor.dtype, *tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("own", [True, False], ids=["own", "lent"])
@pytest.mark.parametrize("small", [True, False], ids=["small", "all"])
def test_eagle3_has_exactly_these_tensors_and_entries(lab, own, small):
    config, tensors = lab.read(lab.export(lab.head("eagle3", small=small, own_lm_head=own), "eagle3"))
    layer = {f"midlayer.{name}": shape for name, shape in EAGLE3_LAYER.items()}
    assert shapes(tensors) == {**layer, **(EAGLE3_SMALL if small else EAGLE3_ALL)}
    assert config == {**EAGLE3_CONFIG, "draft_vocab_size": 13 if small else 97}
    assert "bias" not in config
    assert torch.equal(tensors["embed_tokens.weight"], lab.target.embed.weight)
    rows = lab.target.lm_head.weight[lab.vocabulary if small else slice(None)]
    assert torch.equal(tensors["lm_head.weight"], rows) is not own


@pytest.mark.parametrize("to", ["eagle3", "speculators"])
def test_d2t_holds_offsets_and_t2d_the_tokens(lab, to):
    _, tensors = lab.read(lab.export(lab.head("eagle3", small=True), to))
    assert [draft + offset for draft, offset in enumerate(tensors["d2t"].tolist())] == lab.vocabulary.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == lab.vocabulary.tolist()


def test_default_layers_are_left_out_and_others_are_written_for_both_ways_of_counting(lab):
    config, _ = lab.read(lab.export(lab.head("eagle3", feature_layers=(2, 4, 6)), "eagle3"))
    assert IDS not in config
    assert "eagle_config" not in config
    config, tensors = lab.read(lab.export(lab.head("eagle3", feature_layers=(1, 4, 7, 9), seed=2), "eagle3"))
    vllm = config[IDS]  # k is hidden_states[k], the input of layer k from 0 on
    sglang = [k + 1 for k in config["eagle_config"][IDS]]  # k is the output of layer k from 0 on
    assert vllm == sglang == [1, 4, 7, 9]
    assert config["eagle_config"] == {IDS: [0, 3, 6, 8], "use_aux_hidden_state": True}
    assert config["num_aux_hidden_states"] == 4
    assert tensors["fc.weight"].shape == (32, 128)


def test_norm_before_residual_is_always_written(lab):
    for to in ("eagle3", "speculators"):
        for seed, norm in enumerate((True, False)):
            head = lab.head("eagle3", norm_before_residual=norm, seed=seed)
            assert lab.read(lab.export(head, to))[0]["norm_before_residual"] is norm


@pytest.mark.parametrize("small", [True, False], ids=["small", "all"])
def test_speculators_has_exactly_these_tensors_and_entries(lab, small):
    out = lab.export(lab.head("eagle3", small=small), "speculators", tokens=6)
    config, tensors = lab.read(out)
    layer = {f"layers.0.{name}": shape for name, shape in EAGLE3_LAYER.items()}
    assert shapes(tensors) == {**layer, **(EAGLE3_SMALL if small else EAGLE3_ALL)}
    assert config == {
        **VARIANTS,
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 13 if small else 97,
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        IDS: [2, 4, 6],
        "transformer_layer_config": {**LLAMA, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 6,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": str(lab.model), "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def test_speculators_draft_four_tokens_unless_told_and_vllm_learns_of_other_numbers_of_layers(lab):
    config, _ = lab.read(lab.export(lab.head("eagle3", feature_layers=(2, 5)), "speculators"))
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eagle_has_exactly_these_tensors_and_entries(lab, engine):
    config, tensors = lab.read(lab.export(lab.head("eagle"), "eagle", engine=engine))
    bias = {"fc.bias": (F32, 32)} if engine == "sglang" else {}
    assert shapes(tensors) == {**EAGLE, **bias}
    architecture = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[engine]
    assert config == {**LLAMA, "architectures": [architecture], "torch_dtype": "float32"}
    assert "bias" not in config  # vLLM would take it for a bias of attention
    assert not tensors.get("fc.bias", torch.zeros(1)).any()


def test_a_bias_of_fc_goes_to_sglang_and_vllm_refuses_it(lab):
    head = lab.head("eagle", fc_bias=True)
    assert lab.read(lab.export(head, "eagle", engine="sglang"))[1]["fc.bias"].any()
    with pytest.raises(ValueError, match=r"vLLM has no fc\.bias"):
        lab.export(head, "eagle", engine="vllm")


def test_sglang_gets_the_draft_vocabulary_in_a_file_of_its_own(lab):
    out = lab.export(lab.head("eagle", small=True), "eagle", engine="sglang")
    assert torch.load(out / "token_map.pt", weights_only=True).tolist() == lab.vocabulary.tolist()
    assert lab.read(out)[0]["hot_vocab_size"] == 13
    assert "token_map" not in lab.read(out)[1]
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "token_map.pt"]


MEDUSA = {"0.0.linear.weight": (F32, 32, 32), "0.0.linear.bias": (F32, 32)}
MEDUSA |= {name.replace("0", "1", 1): shape for name, shape in MEDUSA.items()}
MEDUSA_CONFIG = {
    "model_type": "medusa",
    "hidden_size": 32,
    "vocab_size": 97,
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "medusa_fc_bias": True,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("made", "tensors", "entries"),
    [
        ({}, {"lm_head.weight": (F32, 97, 32)}, {"version": "2", "original_lm_head": True}),
        (
            {"small": True},
            {"lm_head.weight": (F32, 97, 32), "token_map": (I64, 13)},
            {"version": "2", "original_lm_head": True},
        ),
        ({"own_lm_head": True}, {"0.1.weight": (F32, 97, 32), "1.1.weight": (F32, 97, 32)}, {}),
        (
            {"num_layers": 2, "own_lm_head": True},
            {
                **{name.replace(".0.", ".1."): shape for name, shape in MEDUSA.items()},
                **{"0.2.weight": (F32, 97, 32), "1.2.weight": (F32, 97, 32)},
            },
            {"medusa_num_layers": 2},
        ),
    ],
    ids=["lent", "small", "own", "layers"],
)
def test_medusa_has_exactly_these_tensors_and_entries(lab, made, tensors, entries):
    out = lab.export(lab.head("medusa", num_heads=2, **made), "medusa")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    config, found = lab.read(out)
    assert shapes(found) == {**MEDUSA, **tensors}
    assert config == {**MEDUSA_CONFIG, **entries, "base_model_name_or_path": str(lab.model)}
    assert "architectures" not in config  # TGI takes the heads for a model with it
    numbers = [name for name in config if "num" in name and ("heads" in name or "layers" in name)]
    assert numbers == ["medusa_num_heads", "medusa_num_layers"]  # vLLM renames all such entries
    if "token_map" in found:
        assert found["token_map"].tolist() == lab.vocabulary.tolist()


def test_no_reader_of_medusa_heads_takes_own_projections_with_a_draft_vocabulary(lab):
    with pytest.raises(ValueError, match="own_lm_head and a draft vocabulary together"):
        lab.export(lab.head("medusa", small=True, own_lm_head=True), "medusa")


def test_weights_say_that_they_are_of_torch(lab):
    from safetensors import safe_open

    out = lab.export(lab.head("eagle3"), "eagle3")
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
