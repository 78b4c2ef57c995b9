"""Whatever is wrong with a head from elsewhere is an error that says so, and nothing is written."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

import heads

IDS = "eagle_aux_hidden_state_layer_ids"
BROKEN = {
    "missing": ({"fc__weight": None, "norm__weight": None}, {}, "no known format|fc.weight is missing"),
    "missing-norm": ({"norm__weight": None}, {}, "norm.weight is missing"),
    "missing-layer": ({"midlayer__mlp__up_proj__weight": None}, {}, r"missing \['layers\.0\.mlp\.up_proj\.weight'\]"),
    "missing-lm_head": ({"lm_head__weight": None}, {}, "lm_head.weight is missing"),
    "missing-d2t": ({"d2t": None}, {}, "t2d leaves tokens out, but d2t is missing"),
    "shape": (
        {"midlayer__hidden_norm__weight": torch.ones(31)},
        {},
        r"hidden_norm\.weight: \(31,\) instead of \(32,\)",
    ),
    "fc-shape": ({"fc__weight": torch.ones(32, 64)}, {}, r"fc.weight has shape \(32, 64\), expected \(32, 96\)"),
    "lm_head-shape": ({"lm_head__weight": torch.ones(12, 32)}, {}, r"shape \(12, 32\), expected \(13, 32\)"),
    "unexpected": ({"extra": torch.ones(1)}, {}, r"unexpected \['extra'\]"),
    "attention-bias": (
        {"midlayer__self_attn__q_proj__bias": torch.ones(24)},
        {},
        r"unexpected \['layers\.0\.self_attn",
    ),
    "second-layer": ({"layers__1__mlp__up_proj__weight": torch.ones(1)}, {}, r"unexpected \['layers\.1"),
    "fc-bias": ({"fc__bias": torch.ones(32)}, {}, r"fc\.bias is not zero"),
    "embedding": ({"embed_tokens__weight": torch.ones(97, 32)}, {}, "embed_tokens.weight is not the target's"),
    "embedding-shape": ({"embed_tokens__weight": torch.ones(98, 32)}, {}, r"embed_tokens.weight has shape \(98, 32\)"),
    "float-d2t": ({"d2t": torch.zeros(13)}, {}, r"d2t must be \[U\] integers"),
    "flat-d2t": ({"d2t": torch.zeros(13, 1, dtype=torch.int64)}, {}, r"d2t must be \[U\] integers"),
    "other-t2d": ({"t2d": torch.arange(97) < 13}, {}, "t2d and d2t name different tokens"),
    "hidden_size": ({}, {"hidden_size": 64}, "hidden_size is 64, but that of the target .* is 32"),
    "vocab_size": ({}, {"vocab_size": 98}, "vocab_size is 98, but that of the target .* is 97"),
    "target_hidden_size": ({}, {"target_hidden_size": 64}, "target_hidden_size is 64"),
    "draft_vocab_size": ({}, {"draft_vocab_size": 14}, "draft_vocab_size is 14, but d2t and lm_head have 13"),
    "layers": ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2; heads here have 1"),
    "activation": ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "biases": ({}, {"attention_bias": True}, "attention_bias is set"),
    "twice": ({"layers__0__hidden_norm__weight": torch.ones(32)}, {}, "is there under both names of the layer"),
    "no-object": ({}, {"eagle_config": [1, 2, 3]}, r"must have an object as eagle_config, got \[1, 2, 3\]"),
    "no-object-rope": ({}, {"rope_scaling": "linear"}, "must have an object as rope_scaling"),
    "no-size": ({}, {"intermediate_size": None}, "must have intermediate_size, an integer above 0"),
    "scaled": ({}, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling asks for 'llama3' positions"),
    "yarn": ({}, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters asks for 'yarn' positions"),
    "norm_before_fc": ({}, {"norm_before_fc": True}, "norm_before_fc is set"),
    "fc_norm": ({}, {"eagle_config": {"fc_norm": True}}, "fc_norm is set"),
    "norm_output": ({}, {"norm_output": True}, "norm_output is set, .* SpecForge .* delete it there"),
    "no-aux": ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    "falling-ids": ({}, {IDS: [4, 2, 6]}, r"layers \[4, 2, 6\], which must ascend from 1 to the target's 9"),
    "embedding-ids": ({}, {IDS: [0, 2, 6]}, "must ascend from 1"),
    "high-ids": ({}, {IDS: [2, 6, 10]}, "must ascend from 1"),
    "text-ids": ({}, {IDS: "246"}, "must be a list of numbers"),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_an_eagle3_head_is_said_with_the_convention(lab, eagle3, case):
    tensors, fields, message = case
    _, out = eagle3
    with pytest.raises(ValueError, match=message) as error:
        lab.adopt(lab.edit(lab.replace(out, **tensors), **fields))
    assert "SafeAILab's EAGLE-3" in str(error.value)
    assert not (lab.folder / f"{out.name}-adopted").exists()


@pytest.mark.parametrize("mask", [True, False])
def test_absolute_ids_in_d2t_are_refused(lab, eagle3, mask):
    _, out = eagle3
    lab.replace(out, d2t=lab.vocabulary, **({} if mask else {"t2d": None}))
    with pytest.raises(ValueError, match=r"absolute ids, .*another convention"):
        lab.adopt(out)


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({"0__0__linear__weight": None}, {}, r"0\.0\.linear\.weight is missing"),
        ({"1__0__linear__weight": None}, {}, r"unexpected \['1\.0\.linear\.bias'\]"),
        ({"0__0__linear__weight": torch.ones(3, 3)}, {}, r"\(3, 3\) instead of \(32, 32\)"),
        ({"0__1__weight": torch.ones(97, 32)}, {}, r"1\.1\.weight is missing"),
        ({"0__1__weight": torch.ones(9, 32), "1__1__weight": torch.ones(9, 32)}, {}, r"0\.1\.weight has shape"),
        ({"lm_head__weight": torch.ones(97, 32)}, {}, r"lm_head\.weight is not the target's"),
        ({"extra": torch.ones(1)}, {}, r"unexpected \['extra'\]"),
        ({"token_map": torch.tensor([1, 1, 2])}, {}, "token_map must hold distinct token ids below 97"),
        ({"token_map": torch.tensor([1, 97])}, {}, "token_map must hold distinct"),
        ({"blocks__0__layers__0__weight": torch.ones(32, 32)}, {}, "under FasterDecoding's names and under vLLM's"),
        ({}, {"hidden_size": 64}, "hidden_size is 64"),
        ({}, {"logit_scale": 0.5}, "logit_scale is 0.5"),
    ],
)
def test_what_is_wrong_with_medusa_heads_is_said_with_the_convention(lab, tensors, fields, message):
    out = lab.export(lab.head("medusa", num_heads=2), "medusa")
    with pytest.raises(ValueError, match=message) as error:
        lab.adopt(lab.edit(lab.replace(out, **tensors), **fields))
    assert "FasterDecoding" in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({"layers__0__input_layernorm__weight": torch.ones(32)}, {}, r"unexpected \['layers\.0\.input_layernorm"),
        ({"lm_head__weight": torch.ones(97, 32)}, {}, r"lm_head\.weight is not the target's"),
        ({"fc__weight": torch.ones(32, 32)}, {}, r"fc\.weight: \(32, 32\) instead of \(32, 64\)"),
        ({}, {"hot_vocab_size": 12}, "hot_vocab_size is 12, but token_map.pt has no ids"),
    ],
)
def test_what_is_wrong_with_an_eagle_head_is_said_with_the_convention(lab, tensors, fields, message):
    out = lab.export(lab.head("eagle"), "eagle", engine="vllm")
    with pytest.raises(ValueError, match=message) as error:
        lab.adopt(lab.edit(lab.replace(out, **tensors), **fields))
    assert "SafeAILab's EAGLE-1" in str(error.value)


@pytest.mark.parametrize("to", ["eagle3", "speculators", "medusa"])
def test_another_target_of_the_same_sizes_is_noticed_by_what_the_head_carries(lab, to):
    out = lab.export(lab.head("medusa" if to == "medusa" else "eagle3"), to)
    with pytest.raises(ValueError, match="is it the right target"):
        lab.adopt(out, target=lab.save_model())


def test_other_speculators_and_whole_or_own_folders_are_refused(lab):
    head = lab.head("eagle3")
    out = lab.edit(lab.export(head, "speculators"), speculators_model_type="dflash")
    with pytest.raises(ValueError, match="speculators_model_type is 'dflash'"):
        lab.adopt(out)
    out = lab.edit(out, speculators_model_type="eagle3", transformer_layer_config=None)
    with pytest.raises(ValueError, match="no transformer_layer_config"):
        lab.adopt(out)
    with pytest.raises(ValueError, match="a head folder already"):
        lab.adopt(lab.head("medusa"))
    with pytest.raises(ValueError, match="no known format of heads has the tensors"):
        lab.adopt(lab.model)
    with pytest.raises(ValueError, match="format medusa, which takes no aux"):
        lab.adopt(lab.export(lab.head("medusa", seed=3), "medusa"), aux="vllm")
    with pytest.raises(ValueError, match="which this config does not need"):
        lab.adopt(lab.export(head, "eagle3"), aux="vllm")


class Evil:
    def __reduce__(self):
        return open, ("ran", "w")


def test_code_in_pickles_does_not_run(lab, monkeypatch, eagle3):
    monkeypatch.chdir(lab.folder)
    _, out = eagle3
    (out / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.ones(1), "evil": Evil()}, out / "pytorch_model.bin")
    with pytest.raises(ValueError, match="as weights only, it is damaged or holds more"):
        lab.adopt(out)
    (out / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(ValueError, match="as weights only"):
        lab.adopt(out)
    assert not (lab.folder / "ran").exists()
    pickle.loads(pickle.dumps(Evil())).close()
    assert (lab.folder / "ran").exists()


def test_damaged_and_missing_files_are_named(lab, eagle3):
    _, out = eagle3
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[:-50])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        lab.adopt(out)
    (out / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        lab.adopt(out)
    for content in (b"", b"text", whole, b"PK\x03\x04" + bytes(60)):
        (out / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin as weights only"):
            lab.adopt(out)
    torch.save([torch.ones(1)], out / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no mapping of names to tensors"):
        lab.adopt(out)
    (out / "config.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="not valid JSON"):
        lab.adopt(out)
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        lab.adopt(out)


def test_weights_of_two_files_are_not_mixed(lab, eagle3):
    _, out = eagle3
    save_file({"norm.weight": torch.ones(32)}, out / "other.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight.*which other files of its folder hold too"):
        lab.adopt(out)


def test_only_an_earlier_adoption_is_replaced(lab, eagle3):
    head, out = eagle3
    adopted = lab.adopt(out)
    lab.adopt(out)
    lab.assert_same(head, adopted)
    for other in (lab.head("medusa"), lab.model):
        before = (other / "model.safetensors").read_bytes()
        with pytest.raises(ValueError, match=r"something else than an adopted head|of a model, not of a head"):
            heads.adopt(out, other, target=lab.model)
        assert (other / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="the head's own folder"):
        heads.adopt(out, out, target=lab.model)
