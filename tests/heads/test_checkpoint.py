"""Head folders: bit-equal round trips, and a ValueError that names the problem for everything else."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from decode import Target
from heads import HeadNotes, create_head, load_head, read_notes, save_head
from heads import checkpoint as checkpoint_module
from heads.medusa import MedusaConfig, MedusaHead
from heads.packing import pack_linears

NOTES = HeadNotes(training={"steps": 7, "data": ["a", "b"]}, measured={"tokens_per_step": 1.9}, tree=[[0], [1], [0, 0]])


def make_head(target, *, seed: int = 0, num_heads: int = 2, own: bool = False, size: int | None = 5):
    config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=num_heads, own_lm_head=own, draft_vocab_size=size)
    head = create_head("medusa", config, target)
    if size is not None:
        head.set_vocabulary(torch.tensor([3, 9, 27, 81, 243][:size]))
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return head


@pytest.fixture
def folder(tiny_target, tmp_path):
    path = tmp_path / "head"
    save_head(make_head(tiny_target), path, target=tiny_target, notes=NOTES)
    return path


def edit(folder, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("size", [None, 5])
def test_save_then_load_is_bit_equal(tiny_target, tmp_path, own, size):
    head = make_head(tiny_target, own=own, size=size)
    save_head(head, tmp_path / "new" / "head", target=tiny_target, notes=NOTES)
    loaded = load_head(tmp_path / "new" / "head", tiny_target)
    assert type(loaded) is type(head)
    assert loaded.config == head.config
    assert loaded.tree == NOTES.tree
    assert not loaded.training
    assert read_notes(tmp_path / "new" / "head") == NOTES
    expected = head.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    pack_linears(head)  # as what was loaded
    hidden = torch.randn(1, 3, 32)
    drafts = [h.drafter().sync(torch.zeros(1, 4, dtype=torch.int64), hidden, [3]) for h in (head, loaded)]
    assert torch.equal(*drafts)


@pytest.mark.parametrize("own", [None, {"depth": 2, "width": 3, "size": 7}, [[0], [1]]], ids=str)
@pytest.mark.parametrize("tree", [None, {"depth": 1, "width": 2, "size": 3, "confidence": 0.25}, [[0]]], ids=str)
def test_the_folders_tree_replaces_the_head_types_own_if_there_is_one(tiny_target, tmp_path, monkeypatch, own, tree):
    made = MedusaHead.__init__

    def with_a_tree(self, *args) -> None:
        made(self, *args)
        self.tree = own

    monkeypatch.setattr(MedusaHead, "__init__", with_a_tree)
    save_head(make_head(tiny_target), tmp_path, target=tiny_target, notes=HeadNotes(tree=tree))
    assert read_notes(tmp_path) == HeadNotes(tree=tree)
    assert load_head(tmp_path, tiny_target).tree == (own if tree is None else tree)


@pytest.mark.parametrize(
    "tree",
    [7, "chain", True, [0], [[0], None], [["0"]], [[0.5]], {"depth": [5]}, {"depth": "5"}, {"depth": {}}],
    ids=str,
)
def test_a_tree_that_is_none_is_shown_with_what_one_looks_like(tiny_target, folder, tree):
    edit(folder, lambda c: c.update(tree=tree))
    for read in (lambda: load_head(folder, tiny_target), lambda: read_notes(folder)):
        with pytest.raises(ValueError, match=r"`tree` must be a list of paths .* settings .*\"depth\": 5.* got"):
            read()


def test_weights_are_stored_and_loaded_in_the_precision_asked_for(tiny_target, tmp_path):
    head = make_head(tiny_target)
    save_head(head, tmp_path, target=tiny_target, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["blocks.0.0.linear.weight"].dtype == torch.bfloat16
    assert stored["vocabulary"].dtype == torch.int64
    loaded = load_head(tmp_path, tiny_target, dtype=torch.float64)
    weight = head.blocks[0][0].linear.weight
    assert torch.equal(loaded.blocks[0][0].linear.weight, weight.to(torch.bfloat16).double())
    assert weight.dtype == torch.float32  # saving changes nothing
    assert loaded.vocabulary.tolist() == [3, 9, 27, 81, 243]
    assert read_notes(tmp_path) == HeadNotes()


def test_a_head_of_other_weights_is_refused_unless_asked_for(tiny_target, tiny_tokenizer, folder):
    other = LlamaForCausalLM(tiny_target.model.config).double()
    target = Target(other, tiny_tokenizer, name="elsewhere")
    with pytest.raises(ValueError, match=r"trained for tiny .*elsewhere has other weights"):
        load_head(folder, target)
    assert load_head(folder, target, check_target=False).config.num_heads == 2


@pytest.mark.parametrize(("hidden", "vocab"), [(16, 320), (32, 97)])
def test_a_target_of_other_sizes_is_refused_always(folder, hidden, vocab):
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config).double(), name="small")
    for check_target in (True, False):
        with pytest.raises(ValueError, match=rf"hidden size 32, vocabulary 320.*small has {hidden} and {vocab}"):
            load_head(folder, target, check_target=check_target)


def test_missing_unexpected_and_misshapen_weights_are_named(tiny_target, folder):
    weights = load_file(folder / "model.safetensors")
    weights["strange"] = torch.zeros(1)
    del weights["blocks.1.0.linear.bias"]
    weights["blocks.0.0.linear.weight"] = torch.zeros(32, 31)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as error:
        load_head(folder, tiny_target)
    text = str(error.value)
    assert "missing ['blocks.1.0.linear.bias']" in text
    assert "unexpected ['strange']" in text
    assert "blocks.0.0.linear.weight: (32, 31) instead of (32, 32)" in text


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_are_called_damaged(tiny_target, folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_head(folder, tiny_target)


@pytest.mark.parametrize("keep", [0, 1, 50, -3])
def test_a_truncated_config_is_named(tiny_target, folder, keep):
    path = folder / "config.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_head(folder, tiny_target)


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b'"text"', b"{}", b'{"model_type": "llama"}', b"\xff\xfe\x00\x01binary"]
)
def test_a_foreign_config_is_named(tiny_target, folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_head(folder, tiny_target)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_notes(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(type="hydraa"), "unknown head type 'hydraa'"),
        (lambda c: c.update(type="checkpoint"), "not a head type"),
        (lambda c: c.update(type="nothing.there"), "must name a head type, got 'nothing.there'"),
        (lambda c: c.update(type=7), "head type"),
        (lambda c: c.update(format=2), "format 2, this version reads 1"),
        (lambda c: c["config"].update(nmu_heads=3), r"unknown fields \['nmu_heads'\]"),
        (lambda c: c["config"].pop("hidden_size"), "hidden_size"),
        (lambda c: c.update(config=[]), "config"),
        (lambda c: c["config"].update(num_heads=0), "num_heads must be at least 1"),
        (lambda c: c["config"].update(num_heads=3), "missing .*blocks.2.0.linear.weight"),
        (lambda c: c["config"].update(num_heads="2"), "num_heads"),
        (lambda c: c["config"].update(draft_vocab_size=None), "unexpected .*vocabulary"),
        (lambda c: c["target"].pop("fingerprint"), "fingerprint"),
        (lambda c: c.update(target=None), "target"),
        (lambda c: c.pop("tree"), "expected the keys"),
    ],
)
def test_an_edited_config_is_refused_by_name(tiny_target, folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        load_head(folder, tiny_target)


def test_no_folder_an_empty_folder_and_a_file_are_no_heads(tiny_target, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    for path in (tmp_path / "absent", tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(ValueError, match=f"{path.name} is not a head folder"):
            load_head(path, tiny_target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_head(folder, tiny_target)


class Crash(BaseException):
    """A killed process: no handler may swallow it."""


@pytest.mark.parametrize("new_heads", [2, 3], ids=["same-sizes", "other-sizes"])
@pytest.mark.parametrize("fails_at", ["first", "second"])
def test_a_crash_while_saving_leaves_a_head_or_a_clear_error(tiny_target, folder, monkeypatch, new_heads, fails_at):
    old = load_head(folder, tiny_target)
    new = make_head(tiny_target, seed=1, num_heads=new_heads)
    replace, calls = checkpoint_module.write_atomically, []

    def dying(path, write) -> None:
        calls.append(path)
        if len(calls) == (1 if fails_at == "first" else 2):
            path.with_name(path.name + ".tmp").write_bytes(b"half a fi")
            raise Crash
        replace(path, write)

    monkeypatch.setattr(checkpoint_module, "write_atomically", dying)
    with pytest.raises(Crash):
        save_head(new, folder, target=tiny_target)
    monkeypatch.undo()
    if fails_at == "second" and new_heads == 3:
        with pytest.raises(ValueError, match="does not fit its config"):
            load_head(folder, tiny_target)
    else:
        expected = old if fails_at == "first" else new
        loaded = load_head(folder, tiny_target)
        assert torch.equal(loaded.blocks[1][0].linear.weight, expected.blocks[1][0].linear.weight)
    save_head(new, folder, target=tiny_target)  # and saving again repairs it
    assert load_head(folder, tiny_target).config.num_heads == new_heads


def test_notes_that_are_not_json_do_not_harm_the_head_that_is_there(tiny_target, folder):
    before = load_head(folder, tiny_target)
    with pytest.raises(TypeError):
        save_head(make_head(tiny_target, seed=1), folder, target=tiny_target, notes=HeadNotes(training={"x": object()}))
    after = load_head(folder, tiny_target)
    assert torch.equal(before.blocks[0][0].linear.weight, after.blocks[0][0].linear.weight)


class Explosive:
    """Unpickling this writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_loading_never_unpickles(tiny_target, folder, tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "model.pt", "medusa_lm_head.pt"):
        (folder / name).write_bytes(pickle.dumps(Explosive(str(tmp_path / "exploded"))))
    with pytest.raises(ValueError, match="damaged"):
        load_head(folder, tiny_target)
    torch.save(Explosive(str(tmp_path / "exploded")), folder / "model.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        load_head(folder, tiny_target)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_a_head_may_be_read_by_whom_the_umask_allows(tiny_target, tmp_path, mask):
    before = os.umask(mask)
    try:
        save_head(make_head(tiny_target), tmp_path / "head", target=tiny_target)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()} == {0o666 & ~mask}
