"""What is exported and adopted again is the same head, bit for bit, and drafts the same; or what is lost is said."""

import pytest
import torch
from safetensors.torch import load_file

import heads
from heads import load_head, read_notes

EAGLE3 = {
    "own": {},
    "lent": {"own_lm_head": False},
    "other-layers": {"feature_layers": (1, 5, 9)},
    "two-layers": {"feature_layers": (3, 8)},
    "normed": {"norm_before_residual": True},
    "bfloat16": {"dtype": torch.bfloat16},
}
CASES = {
    **{
        f"{to}-{name}-{'small' if small else 'all'}": ("eagle3", to, {}, {**options, "small": small})
        for to in ("eagle3", "speculators")
        for name, options in EAGLE3.items()
        for small in (False, True)
    },
    "medusa": ("medusa", "medusa", {}, {"num_heads": 3}),
    "medusa-small": ("medusa", "medusa", {}, {"num_heads": 2, "small": True}),
    "medusa-own": ("medusa", "medusa", {}, {"num_heads": 3, "own_lm_head": True}),
    "medusa-layers": ("medusa", "medusa", {}, {"num_heads": 2, "num_layers": 3}),
    "medusa-own-layers": ("medusa", "medusa", {}, {"num_heads": 12, "num_layers": 2, "own_lm_head": True}),
    "medusa-bfloat16": ("medusa", "medusa", {}, {"dtype": torch.bfloat16}),
    "eagle-vllm": ("eagle", "eagle", {"engine": "vllm"}, {}),
    "eagle-sglang": ("eagle", "eagle", {"engine": "sglang"}, {}),
    "eagle-sglang-bias": ("eagle", "eagle", {"engine": "sglang"}, {"fc_bias": True}),
    "eagle-sglang-small": ("eagle", "eagle", {"engine": "sglang"}, {"small": True}),
    "eagle-bfloat16": ("eagle", "eagle", {"engine": "sglang"}, {"dtype": torch.bfloat16}),
}


def drafts(lab, folder):
    """All logits of a sync over two rows, a tree of two levels, and a second sync."""
    head = load_head(folder, lab.target)
    drafter, generator = head.drafter(), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 97, (2, 14), generator=generator)
    hidden, features = lab.target.encode_features(ids, [14, 14], head.feature_layers)
    some = None if features is None else features[:, :9]
    found = [drafter.sync(ids[:, :10], hidden[:, :9], [9, 7], some)]
    found.append(drafter.extend(ids[:, :3], torch.zeros(2, 3, dtype=torch.int64)))
    if head.kind != "medusa" or head.config.num_heads > 2:
        found.append(drafter.extend(ids[:, 3:5], torch.tensor([[1, 2], [3, 1]])))
    more = None if features is None else features[:, 9:13]
    return [*found, drafter.sync(ids[:, 9:14], hidden[:, 9:13], [4, 2], more)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exported_and_adopted_again_a_head_is_the_same_and_drafts_the_same(lab, case):
    kind, to, options, made = case
    head = lab.head(kind, **made)
    adopted = lab.adopt(lab.export(head, to, **options))
    lab.assert_same(head, adopted)
    first, second = drafts(lab, head), drafts(lab, adopted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].std() > 0.01
    training = read_notes(adopted).training
    assert training["format"] == to
    assert training["adopted from"].endswith(f"{head.name}-{to}")


@pytest.mark.parametrize("case", ["eagle3-own-small", "medusa-small", "eagle-sglang-small", "speculators-lent-all"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickles_are_read_as_safetensors_are(lab, case, name):
    kind, to, options, made = CASES[case]
    head = lab.head(kind, **made)
    lab.assert_same(head, lab.adopt(lab.pickle(lab.export(head, to, **options), name)))


def test_vllm_drafts_from_all_tokens_with_an_eagle_head_and_that_is_said(lab):
    head = lab.head("eagle", small=True)
    out = lab.folder / "out"
    (note,) = heads.export(head, out, to="eagle", engine="vllm")
    assert note == "the draft vocabulary of 13 tokens is lost: vLLM drafts from all tokens"
    stored = load_file(head / "model.safetensors")
    adopted = load_file(lab.adopt(out) / "model.safetensors")
    assert stored.keys() - adopted.keys() == {"vocabulary"}
    assert all(torch.equal(adopted[name], stored[name]) for name in adopted)


def test_a_draft_vocabulary_of_all_tokens_is_none_elsewhere(lab):
    head = lab.head("eagle3", draft_vocab_size=97)
    out = lab.export(head, "eagle3")
    assert not {"d2t", "t2d"} & lab.read(out)[1].keys()
    assert load_head(lab.adopt(out), lab.target).vocabulary is None


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_what_readers_get_wrong_is_said(lab, kind):
    made = {"eagle": {}, "eagle3": {"norm_before_residual": True, "feature_layers": (1, 8)}, "medusa": {}}[kind]
    made |= {"num_layers": 2, "small": True} if kind == "medusa" else {}
    options = {"engine": "vllm"} if kind == "eagle" else {}
    notes = heads.export(lab.head(kind, **made), lab.folder / "out", to=kind, **options)
    expected = {
        "eagle": [],
        "eagle3": [
            "rt_info of its model is [0, 7]",
            "llama.cpp reads heads of 3 decoder layers only",
            "SGLang and OpenVINO GenAI do not know norm_before_residual",
        ],
        "medusa": [
            "TGI reads one layer",
            "the draft vocabulary of 13 tokens is not used: all readers draft from all tokens",
        ],
    }[kind]
    assert len(notes) == len(expected)
    assert all(part in note for part, note in zip(expected, notes, strict=True))


def test_the_layers_that_openvino_takes_are_said(lab):
    (note,) = heads.export(lab.head("eagle3"), lab.folder / "out", to="eagle3")
    assert note.endswith("hidden_layers_list in the rt_info of its model is [1, 3, 5]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", ["eagle3", "medusa"])
def test_weights_are_stored_in_the_precision_asked_for_and_ids_stay(lab, to, dtype):
    head = lab.head(to, small=True)
    config, tensors = lab.read(lab.export(head, to, dtype=dtype))
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    assert floats == {dtype}
    adopted = load_file(lab.adopt(lab.folder / f"{head.name}-{to}") / "model.safetensors")
    for name, tensor in load_file(head / "model.safetensors").items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(adopted[name], expected)
