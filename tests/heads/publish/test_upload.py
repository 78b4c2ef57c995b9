"""The hub's own client publishes to a small hub, and loads from it by name."""

import json

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

import heads
from decode.__main__ import main as decode_main
from decode.tune import main as tune_main
from heads import load_head, read_notes
from heads.checkpoint import read_plans, read_target
from heads.export.__main__ import main as export_main
from heads.publish.__main__ import main

TUNED = {"cpu": {"format": 0}}


def test_a_published_head_is_loaded_by_name_bit_for_bit(hub, make_head, target):
    folder = make_head(draft_vocab_size=5)
    (folder / "tuned.json").write_text(json.dumps(TUNED))
    (folder / "notes.txt").write_text("mine")
    assert heads.push_to_hub(folder, "jane/head", private=True) == f"{hub.url}/jane/head"
    files = hub.files("jane/head")
    assert files.keys() == {".gitattributes", "README.md", "config.json", "model.safetensors", "tuned.json"}
    for name in ("config.json", "model.safetensors", "tuned.json"):
        assert files[name] == (folder / name).read_bytes()
    assert hub.checked == [files["README.md"].decode()]
    assert (hub.repos["jane/head"].private, hub.repos["jane/head"].said) == (True, ["Publish a head"])
    mine, theirs = load_head(folder, target), load_head("jane/head", target)
    assert theirs.tuned == TUNED
    assert theirs.tree == mine.tree
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    assert read_notes("jane/head") == read_notes(folder)
    assert read_target("jane/head") == ("medusa", target.name)
    assert read_plans("jane/head") == TUNED


def test_commands_take_the_name(hub, make_head, model, tmp_path, capsys):
    heads.push_to_hub(make_head("eagle3"), "jane/head")
    assert decode_main([str(model), "the cat", "--head", "jane/head", "--max-new-tokens", "4"]) == 0
    assert export_main(["jane/head", str(tmp_path / "out"), "--to", "eagle3"]) == 0
    heads.push_to_hub("jane/head", "jane/exported", to="eagle3")
    assert hub.files("jane/exported")["config.json"] == (tmp_path / "out" / "config.json").read_bytes()
    heads.adopt("jane/exported", tmp_path / "adopted", target=model)
    mine, back = (load_file(tmp_path / name / "model.safetensors") for name in ("my-eagle3", "adopted"))
    assert all(torch.equal(tensor, back[name]) for name, tensor in mine.items())
    capsys.readouterr()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the cat"}))
    assert tune_main([str(model), "--head", "jane/head", "--prompts", str(tmp_path / "prompts.jsonl")]) == 2
    assert "no plan can be kept in it; download it (hf download jane/head --local-dir" in capsys.readouterr().err


def test_what_an_earlier_publication_left_goes_in_the_same_commit(hub, make_head):
    hub.add("jane/head", {"README.md": b"---\nlicense: mit\n---\n"})
    heads.push_to_hub(make_head(), "jane/head", to="medusa")
    hub.files("jane/head")["picture.png"] = b"mine"
    assert "medusa_lm_head.safetensors" in hub.files("jane/head")
    heads.push_to_hub(make_head("hydra"), "jane/head")
    kept = {".gitattributes", "README.md", "picture.png"}
    assert hub.files("jane/head").keys() == {*kept, "config.json", "model.safetensors"}
    assert hub.repos["jane/head"].said == ["Publish a head as medusa", "Publish a head"]


def test_a_repository_of_something_else_is_left_alone(hub, make_head):
    repo = hub.add("jane/model", {"model-00001-of-00002.safetensors": b"x", "README.md": b"---\ntags: [llama]\n---\n"})
    with pytest.raises(
        ValueError, match=r"jane/model holds what was not published with Gorgon \(model-00001.*tag gorgon"
    ):
        heads.push_to_hub(make_head(), "jane/model")
    assert len(repo.commits) == 1


def test_a_public_repository_is_not_taken_for_a_private_one(hub, make_head):
    heads.push_to_hub(make_head(), "jane/head")
    with pytest.raises(ValueError, match="jane/head is there already and is public"):
        heads.push_to_hub(make_head(), "jane/head", private=True)
    assert len(hub.repos["jane/head"].commits) == 2


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "cannot publish jane/head: the hub does not know who you are; log in with `hf auth login`"),
        (403, "cannot publish jane/head: you may not write there; log in with a token that may"),
        (418, "418"),
    ],
)
def test_a_refusal_says_what_to_do(hub, make_head, capsys, status, message):
    folder = make_head()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    hub.refuse = status
    assert main([str(folder), "jane/head"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(hub, make_head, monkeypatch):
    heads.push_to_hub(make_head(), "jane/head")
    ask = HfApi.model_info

    def and_change(self, name):
        found = ask(self, name)
        hub.repos[name].commits.append({**hub.files(name), "other.json": b"{}"})
        return found

    monkeypatch.setattr(HfApi, "model_info", and_change)
    with pytest.raises(ValueError, match="somebody else has changed it meanwhile; run the same again"):
        heads.push_to_hub(make_head(seed=2), "jane/head")
    assert "other.json" in hub.files("jane/head")


def test_offline_and_unreachable_hubs_are_named(hub, make_head, monkeypatch):
    folder = make_head()
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ValueError, match=r"cannot publish jane/head: .*run the same again when that is mended"):
        heads.push_to_hub(folder, "jane/head")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot publish jane/head: .*unset the `HF_HUB_OFFLINE`"):
        heads.push_to_hub(folder, "jane/head")


def test_the_command_says_where_it_is_and_what_to_know(hub, make_head, capsys, model):
    assert main([str(make_head()), "jane/head", "--license", "mit"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [f"published {hub.url}/jane/head", "README.md, config.json, model.safetensors"]
    assert [line[:40] for line in out[2:]] == [
        "note: the card names no base model: "[:40] + str(model)[:4],
        "note: config.json goes up as it is and c",
        "note: config.json goes up as it is, with",
    ]
    assert b"license: mit" in hub.files("jane/head")["README.md"]


def test_a_name_that_is_neither_here_nor_there_is_named(hub, target, monkeypatch, tmp_path):
    for name in ("jane/none", "jane/none/deeper", "models/none", "./none", tmp_path / "none"):
        there = r"neither a head folder nor a head that the hub has \(it has none .*`hf auth login`"
        with pytest.raises(ValueError, match=there if name == "jane/none" else "is not a head folder"):
            load_head(name, target)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for read in (read_notes, read_target, read_plans):
        with pytest.raises(ValueError, match=r"jane/none is neither a head folder nor .*HF_HUB_OFFLINE"):
            read("jane/none")


def test_a_folder_here_goes_before_one_there(hub, make_head, target, tmp_path, monkeypatch):
    heads.push_to_hub(make_head(seed=1), "jane/head")
    monkeypatch.chdir(tmp_path)
    make_head(name="jane/head", seed=2)
    (tmp_path / "empty" / "head").mkdir(parents=True)
    mine = load_file("jane/head/model.safetensors")
    loaded = load_head("jane/head", target).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in mine.items())
    with pytest.raises(ValueError, match=r"empty/head is not a head folder: it has no config\.json"):
        load_head("empty/head", target)


def test_what_was_downloaded_is_loaded_offline(hub, make_head, target, monkeypatch):
    heads.push_to_hub(make_head(), "jane/head")
    load_head("jane/head", target)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_head("jane/head", target).tuned == {}


def test_a_repository_that_is_no_head_is_named(hub, target):
    hub.add("jane/model", {"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(ValueError, match="is of a model, not of a head; pass the folder as a draft model"):
        load_head("jane/model", target)


def test_a_damaged_head_is_not_published(hub, make_head):
    folder = make_head()
    weights = load_file(folder / "model.safetensors")
    weights.popitem()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit its config"):
        heads.push_to_hub(folder, "jane/head")
    assert not hub.repos
