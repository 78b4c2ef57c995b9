"""What is published, seen in a dry run: the files, what is refused, and what the publisher is told."""

import json

import pytest
from safetensors.torch import load_file

import heads
from heads.export.__main__ import parser as export_parser
from heads.export.write import FLAGS
from heads.publish.__main__ import main, parser

CONVERTER = "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('GGUF')"


def listed(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_a_dry_run_writes_what_would_be_published_and_asks_nobody(hub, make_head, tmp_path, capsys):
    folder = make_head()
    (folder / "checkpoint.pt").write_text("x")
    assert main([str(folder), "jane/head", "--dry-run", str(tmp_path / "out")]) == 0
    assert hub.asked == 0
    assert "jane/head would be what is in " in capsys.readouterr().out
    assert listed(tmp_path / "out") == ["README.md", "config.json", "model.safetensors"]
    heads.push_to_hub(folder, "jane/head")
    for name, content in hub.files("jane/head").items():
        assert name == ".gitattributes" or (tmp_path / "out" / name).read_bytes() == content


@pytest.mark.parametrize(
    ("kind", "arguments", "files"),
    [
        ("eagle3", ["--to", "eagle3", "--dtype", "bfloat16"], ["config.json", "model.safetensors"]),
        ("medusa", ["--to", "medusa"], ["config.json", "medusa_lm_head.safetensors"]),
        ("eagle", ["--to", "eagle", "--for", "sglang"], ["config.json", "model.safetensors", "token_map.pt"]),
        ("eagle3", ["--to", "gguf", "--llama-cpp", "LLAMA"], ["head.gguf"]),
    ],
)
def test_an_export_is_that_of_heads_export(make_head, tmp_path, kind, arguments, files):
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    folder, out = make_head(kind, draft_vocab_size=5), tmp_path / "out"
    arguments = [str(tmp_path) if argument == "LLAMA" else argument for argument in arguments]
    assert main([str(folder), "jane/head", "--dry-run", str(out), *arguments]) == 0
    assert listed(out) == sorted(["README.md", *files])
    if "--dtype" in arguments:
        assert str(load_file(out / "model.safetensors")["fc.weight"].dtype) == "torch.bfloat16"


def test_a_draft_model_goes_up_without_plans_and_hidden_files(make_tiny_llama, tiny_tokenizer, tmp_path, capsys):
    folder, out = tmp_path / "draft", tmp_path / "out"
    make_tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    before = listed(folder)
    (folder / ".cache" / "deep").mkdir(parents=True)
    for name in ("tuned.json", ".cache/deep/x.json", "README.md"):
        (folder / name).write_text("{}")
    assert main([str(folder), "jane/draft", "--dry-run", str(out)]) == 0
    assert listed(out) == sorted([*before, "README.md"])
    assert "the card takes the place of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER", "head"], "'head' is no name of a repository; give USER/NAME"),
        (["FOLDER", "a/b/c"], "'a/b/c' is no name of a repository"),
        (["FOLDER", "jane/head", "--dtype", "bfloat16"], "dtype (--dtype) is for an export; choose a format (--to)"),
        (["FOLDER", "jane/head", "--tokens", "4"], "tokens (--tokens) is for an export"),
        (["FOLDER", "jane/head", "--to", "eagle3"], "exported to medusa, not to eagle3"),
        (["FOLDER", "jane/head", "--to", "hf"], "exported to medusa, not to hf"),
        (["EAGLE3", "jane/head", "--to", "speculators"], "is no name on the hub; give one with --target"),
        (["MODEL", "jane/head", "--to", "medusa"], "as a draft model it is exported to 'hf'"),
        (["none/such/folder", "jane/head"], "it has no config.json"),
        (["nobody/head", "jane/head"], "nobody/head is neither a head folder nor a head that the hub has"),
        (["FOLDER", "jane/head", "--card", "CARD"], "must have `gorgon` among the tags"),
        (["FOLDER", "jane/head", "--card", "BROKEN"], "is no model card"),
        (["FOLDER", "jane/head", "--card", "missing.md"], "missing.md"),
        (["FOLDER", "jane/head", "--target", "OTHER"], "has other weights (fingerprint"),
    ],
)
def test_what_cannot_be_published_is_one_line(make_head, make_tiny_llama, model, tmp_path, capsys, arguments, message):
    make_tiny_llama(seed=3).save_pretrained(tmp_path / "other")
    (tmp_path / "card.md").write_text("---\ntags: [mine]\n---\n# Mine\n")
    (tmp_path / "broken.md").write_text("---\ntags: [\n---\n# Mine\n")
    places = {"FOLDER": make_head(), "EAGLE3": make_head("eagle3"), "MODEL": model, "OTHER": tmp_path / "other"}
    places |= {"CARD": tmp_path / "card.md", "BROKEN": tmp_path / "broken.md"}
    assert main([*(str(places.get(word, word)) for word in arguments), "--dry-run", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert message in err
    assert not (tmp_path / "out").exists() or not listed(tmp_path / "out")


def test_nothing_is_written_over(make_head, tmp_path, capsys):
    folder = make_head()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert main([str(folder), "jane/head", "--dry-run", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_card_of_ones_own_goes_up_as_it_is(hub, make_head, tmp_path):
    text = "---\ntags: [gorgon, mine]\n---\n# Grüße\n"
    (tmp_path / "card.md").write_text(text, encoding="utf-8")
    heads.push_to_hub(make_head(), "jane/head", card=tmp_path / "card.md")
    heads.push_to_hub(make_head(seed=2), "jane/head", card=tmp_path / "card.md")
    assert hub.files("jane/head")["README.md"].decode() == text


def test_a_target_by_its_name_on_the_hub_is_checked_and_named(hub, make_head, model, tmp_path, capsys):
    hub.add("someone/tiny", {file.name: file.read_bytes() for file in model.iterdir()})
    folder = make_head("eagle3")
    assert main([str(folder), "jane/head", "--target", "someone/tiny", "--dry-run", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: someone/tiny\n" in card
    assert "python -m heads.export jane/head exported --to eagle3 --target someone/tiny\n" in card
    out = capsys.readouterr().out
    assert "no base model" not in out
    assert f"config.json goes up as it is and calls the target {model}, which others do not have" in out
    out = tmp_path / "speculators"
    assert main([str(folder), "jane/s", "--to", "speculators", "--target", "someone/tiny", "--dry-run", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/tiny"
    assert "vllm serve jane/s\n" in (out / "README.md").read_text()


def test_a_target_in_a_folder_that_is_named_as_on_the_hub_is_no_base_model(make_head, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_head(target_name="someone/tiny")
    assert main([str(folder), "jane/head", "--dry-run", "there"]) == 0
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert main([str(folder), "jane/head", "--dry-run", "here"]) == 0
    named = [(tmp_path / name / "README.md").read_text().count("someone/tiny") for name in ("there", "here")]
    assert named == [5, 0]


def test_the_options_of_exports_are_those_of_heads_export():
    mine, theirs = (
        {a.option_strings[0]: (a.dest, a.type, a.choices) for a in made._actions if a.option_strings}
        for made in (parser(), export_parser())
    )
    assert all(mine[flag] == theirs[flag] for flag in (*FLAGS.values(), "--to"))
