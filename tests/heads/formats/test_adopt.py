"""Heads as other trainers write them become the same head."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import heads
from heads import load_head

IDS = "eagle_aux_hidden_state_layer_ids"


def rename(lab, folder, change):
    """Rename the tensors of an export; None drops one."""
    (weights,) = folder.glob("*.safetensors")
    renamed = {change(name): tensor for name, tensor in load_file(weights).items()}
    renamed.pop(None, None)
    save_file(renamed, weights)
    return folder


def test_modelopts_layout(lab, eagle3):
    head, out = eagle3
    rename(
        lab, out, lambda name: None if name in ("t2d", "embed_tokens.weight") else name.replace("midlayer", "layers.0")
    )
    nested = {IDS: [1, 3, 5], "use_aux_hidden_state": True, "norm_output": False}
    lab.edit(out, architectures=["LlamaForCausalLMEagle3"], eagle_config=nested, norm_output=None)
    lab.assert_same(head, lab.adopt(out, aux="sglang"))


def test_safeailabs_layout(lab, eagle3):
    head, out = eagle3
    rename(lab, out, lambda name: None if name == "embed_tokens.weight" else name)
    extra = {"target_hidden_size", "num_aux_hidden_states", "rope_parameters", "fc_norm", "norm_output", "mlp_bias"}
    lab.edit(out, architectures=["LlamaForCausalLM"], **dict.fromkeys(extra))
    lab.assert_same(head, lab.adopt(lab.pickle(out, "pytorch_model.bin")))


@pytest.mark.parametrize("way", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize("to", ["eagle3", "speculators", "eagle"])
def test_rotary_positions_are_read_in_the_old_way_and_in_the_new(lab, to, way):
    head = lab.head("eagle" if to == "eagle" else "eagle3")
    out = lab.export(head, to, **({"engine": "vllm"} if to == "eagle" else {}))
    config, _ = lab.read(out)
    layer = config.get("transformer_layer_config", config)
    del layer[way]
    lab.edit(out, **(config | {way: None}))
    lab.assert_same(head, lab.adopt(out))


@pytest.mark.parametrize("way", ["missing", "written"])
def test_a_missing_norm_before_residual_is_the_speculators_librarys_and_that_is_said(lab, way):
    head = lab.head("eagle3")
    out = lab.edit(lab.export(head, "speculators"), norm_before_residual=None if way == "missing" else False)
    notes = heads.adopt(out, lab.folder / "back", target=lab.model)
    assert [note.split(":")[0] for note in notes] == ["norm_before_residual is not in config.json"] * (way == "missing")
    lab.assert_same(head, lab.folder / "back")


def test_rows_of_a_draft_vocabulary_in_any_order(lab, eagle3):
    head, out = eagle3
    _, tensors = lab.read(out)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))
    ids = lab.vocabulary[order]
    lab.replace(out, d2t=ids - torch.arange(13), lm_head__weight=tensors["lm_head.weight"][order])
    lab.assert_same(head, lab.adopt(out))


def test_a_d2t_of_all_tokens_is_no_draft_vocabulary(lab):
    head = lab.head("eagle3")
    out = lab.export(head, "eagle3")
    lab.assert_same(head, lab.adopt(lab.replace(out, d2t=torch.zeros(97, dtype=torch.int64))))


@pytest.mark.parametrize("aux", ["vllm", "sglang"])
def test_a_nested_list_alone_has_the_meaning_that_is_asked_for(lab, aux):
    nested = {"vllm": [1, 5, 8], "sglang": [0, 4, 7]}[aux]
    head = lab.head("eagle3", feature_layers=(1, 5, 8))
    out = lab.edit(lab.export(head, "eagle3"), **{IDS: None, "eagle_config": {IDS: nested}})
    with pytest.raises(ValueError, match=r"which vLLM reads .* SGLang .* aux='vllm' or 'sglang' \(--aux\)"):
        lab.adopt(out)
    lab.assert_same(head, lab.adopt(out, aux=aux))


def test_eagle_in_vllms_wrapping_and_with_old_buffers(lab):
    head = lab.head("eagle")
    out = lab.export(head, "eagle", engine="vllm")
    config, _ = lab.read(out)
    lab.replace(
        out, layers__0__self_attn__rotary_emb__inv_freq=torch.ones(3), embed_tokens__weight=lab.target.embed.weight
    )
    lab.edit(out, **dict.fromkeys(config), model=None)
    lab.edit(out, model_type="eagle", method="eagle", model=config)
    lab.assert_same(head, lab.adopt(out))


def test_safeailabs_bias_of_eagle(lab):
    head = lab.head("eagle", fc_bias=True)
    out = lab.export(head, "eagle", engine="sglang")
    lab.assert_same(head, lab.adopt(lab.edit(out, bias=True)))
    with pytest.raises(ValueError, match=r"fc\.bias is not zero, but `bias` is false"):
        lab.adopt(lab.edit(out, bias=False))


@pytest.mark.parametrize(
    "made", [{}, {"own_lm_head": True, "num_layers": 2}, {"small": True}], ids=["v2", "v1", "small"]
)
def test_medusa_under_vllms_names(lab, made):
    head = lab.head("medusa", num_heads=2, **made)
    out = lab.export(head, "medusa")
    layers = made.get("num_layers", 1)
    vllm = {f"{i}.{layers}.weight": f"lm_heads.{i}.weight" for i in range(2)}
    vllm |= {
        f"{i}.{k}.linear.{w}": f"blocks.{i}.layers.{k}.{w}"
        for i in range(2)
        for k in (0, 1)
        for w in ("weight", "bias")
    }
    vllm["lm_head.weight"] = "lm_heads.0.weight"
    rename(lab, out, lambda name: f"medusa_heads.{vllm.get(name, name)}")
    lab.assert_same(head, lab.adopt(out))


def test_medusa_of_fasterdecoding_with_its_own_config(lab):
    for name, own in (("v2", False), ("v1", True)):
        head = lab.head("medusa", num_heads=3, own_lm_head=own, seed=int(own))
        out = lab.export(head, "medusa")
        rename(lab, out, lambda name: None if name == "lm_head.weight" else name)
        keys = dict.fromkeys(("model_type", "hidden_size", "vocab_size", "medusa_fc_bias", "original_lm_head"))
        lab.edit(out, **keys, version="2" if name == "v2" else None, medusa_num_heads=5)
        lab.assert_same(head, lab.adopt(lab.pickle(out, "medusa_lm_head.pt")))


@pytest.mark.parametrize("pickled", [False, True])
def test_medusa_within_a_whole_model(lab, pickled):
    head = lab.head("medusa", num_heads=2, own_lm_head=True)
    out = lab.export(head, "medusa")
    (weights,) = out.glob("*.safetensors")
    heads_only = {f"medusa_head.{name}": tensor for name, tensor in load_file(weights).items()}
    model = load_file(lab.model / "model.safetensors")
    weights.unlink()
    names = ("model-1", "model-2")
    for name, tensors in zip(names, (model, heads_only), strict=True):
        save = torch.save if pickled else save_file
        save(tensors, out / f"{name}.{'bin' if pickled else 'safetensors'}")
    lab.edit(out, model_type="llama", architectures=["LlamaForCausalLM"], medusa_fc_bias=None)
    lab.assert_same(head, lab.adopt(out))


def test_medusa_rows_of_a_token_map_in_any_order_and_of_all_tokens(lab):
    head = lab.head("medusa", small=True, own_lm_head=True)
    stored = load_file(head / "model.safetensors")
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))
    out = lab.export(lab.head("medusa", own_lm_head=True, seed=2), "medusa")
    blocks = {name[7:].replace(".", "__"): tensor for name, tensor in stored.items() if name.startswith("blocks.")}
    rows = stored["projection"]
    full = torch.zeros(97, 32)
    full[lab.vocabulary] = rows[0]
    own = {"0__1__weight": full} | {f"{i}__1__weight": rows[i, order] for i in (1, 2, 3)}
    lab.replace(out, token_map=lab.vocabulary[order], **own, **blocks)
    lab.assert_same(head, lab.adopt(out))


def test_vllm_ignores_biases_unless_told(lab):
    head = lab.head("medusa", num_heads=1)
    out = lab.edit(lab.export(head, "medusa"), medusa_fc_bias=False)
    with pytest.raises(ValueError, match=r"0\.0\.linear\.bias is not zero, but vLLM ignores it"):
        lab.adopt(out)
    lab.replace(out, **{"0__0__linear__bias": None})
    assert not load_head(lab.adopt(out), lab.target).blocks[0][0].linear.bias.any()


def test_a_projection_that_is_the_targets_is_borrowed(lab, eagle3):
    _, out = eagle3
    lab.replace(out, lm_head__weight=lab.target.lm_head.weight[lab.vocabulary].detach().clone())
    assert load_head(lab.adopt(out), lab.target).projection is None


def test_the_target_may_be_stored_in_another_precision(lab, eagle3):
    _, out = eagle3
    bfloat16 = {
        name.replace(".", "__"): tensor.bfloat16() for name, tensor in lab.read(out)[1].items() if tensor.dim() > 1
    }
    adopted = lab.adopt(lab.replace(out, **bfloat16))
    stored = load_file(adopted / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.float32  # with the norms, which are
    assert torch.equal(stored["fc.weight"], lab.read(out)[1]["fc.weight"].float())
