"""What is refused, what is replaced, copies of draft models, GGUF by a converter, and the commands."""

import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import heads
from heads import files as files_module
from heads.adopt.__main__ import main as adopt_main
from heads.export.__main__ import main as export_main

CONVERTER = """
import argparse, json, pathlib, sys
p = argparse.ArgumentParser()
p.add_argument("folder"); p.add_argument("--target-model-dir"); p.add_argument("--outfile"); p.add_argument("--outtype")
args = p.parse_args()
config = json.loads(pathlib.Path(args.folder, "config.json").read_text())
names = sorted(file.name for file in pathlib.Path(args.folder).iterdir())
seen = {"config": config, "names": names, "target": args.target_model_dir, "type": args.outtype}
pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
pathlib.Path(args.outfile).write_bytes(b"GGUF rest")
"""


@pytest.mark.parametrize(
    ("kind", "to", "options", "message"),
    [
        ("medusa", "eagle3", {}, "of type medusa, which is exported to medusa, not to eagle3"),
        ("eagle3", "eagle", {"engine": "vllm"}, "of type eagle3, which is exported to eagle3 or speculators or gguf"),
        ("eagle", "gguf", {"llama_cpp": "x"}, "of type eagle, which is exported to eagle, not to gguf"),
        ("hydra", "medusa", {}, r"no inference engine loads Hydra heads; .*zankner/Hydra"),
        ("medusa", "hf", {"target": None}, "exported to medusa, not to hf"),
        ("medusa", "onnx", {}, "unknown format 'onnx'; there are eagle3, speculators"),
        ("medusa", "medusa", {"tokens": 3}, r"medusa takes no tokens \(--tokens\)"),
        ("medusa", "medusa", {"engine": "vllm"}, r"medusa takes no engine \(--for\)"),
        ("eagle3", "eagle3", {"llama_cpp": "x"}, r"eagle3 takes no llama_cpp"),
        ("eagle3", "speculators", {"tokens": 0}, "tokens must be at least 1, got 0"),
        ("eagle", "eagle", {}, r"needs engine \(--for\): 'vllm' or 'sglang'"),
        ("eagle", "eagle", {"engine": "tgi"}, "for one of vllm, sglang, got 'tgi'"),
        ("eagle3", "gguf", {}, r"needs llama_cpp \(--llama-cpp\)"),
        ("medusa", "medusa", {"dtype": torch.int8}, "dtype must be one of torch.float32"),
    ],
)
def test_what_a_format_does_not_take_is_refused(lab, kind, to, options, message):
    with pytest.raises(ValueError, match=message):
        lab.export(lab.head(kind), to, **options)
    assert not (lab.folder / f"{kind}-1-{to}").exists()


def test_the_target_is_the_recorded_one_and_another_is_refused(lab):
    head = lab.head("eagle3")
    heads.export(head, lab.folder / "out", to="eagle3")
    with pytest.raises(ValueError, match="has other weights"):
        heads.export(head, lab.folder / "other-out", to="eagle3", target=lab.save_model())
    lab.edit(head, target={"name": "no/such", "fingerprint": "0"})
    with pytest.raises(ValueError, match="no/such is neither a model folder nor a model that the hub has"):
        heads.export(head, lab.folder / "other-out", to="eagle3")
    with pytest.raises(ValueError, match="the head's own folder"):
        heads.export(head, head, to="eagle3")


def test_an_earlier_export_is_replaced_whole(lab):
    out = lab.folder / "out"
    small = lab.head("eagle", small=True)
    heads.export(small, out, to="eagle", engine="sglang")
    assert (out / "token_map.pt").exists()
    heads.export(lab.head("eagle3"), out, to="eagle3")
    heads.export(lab.head("medusa"), out, to="medusa")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    heads.export(lab.head("eagle3"), out, to="speculators")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]


def test_anything_else_is_not_replaced(lab):
    exported = lab.export(lab.head("medusa"), "medusa")
    head = lab.head("eagle3")
    tokenizer = lab.folder / "with-tokenizer"
    heads.export(head, tokenizer, to="eagle3")
    (tokenizer / "tokenizer.json").write_text("{}")
    config = lab.folder / "config-only"
    config.mkdir()
    (config / "config.json").write_text("{}")
    (config_file := lab.folder / "file").write_text("x")
    for other in (lab.model, lab.head("hydra"), tokenizer, config, config_file):
        before = {file: file.read_bytes() for file in ([other] if other.is_file() else other.iterdir())}
        with pytest.raises(ValueError, match=r"no export has written|not written by an export|is a file"):
            heads.export(head, other, to="eagle3")
        assert all(file.read_bytes() == content for file, content in before.items())
    save_file(
        load_file(exported / "medusa_lm_head.safetensors"), exported / "medusa_lm_head.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match="not written by an export"):
        heads.export(head, exported, to="eagle3")


@pytest.mark.parametrize("crash_at", range(5))
def test_after_a_crash_no_reader_finds_a_mixture_and_the_same_command_mends_it(lab, monkeypatch, crash_at):
    out, first, second = lab.folder / "out", lab.head("medusa"), lab.head("eagle", small=True)
    heads.export(first, out, to="medusa")
    count, sync = iter(range(99)), files_module.sync_entry

    def crash(path):
        if next(count) == crash_at:
            raise KeyboardInterrupt
        sync(path)

    monkeypatch.setattr(files_module, "sync_entry", crash)
    with pytest.raises(KeyboardInterrupt):
        heads.export(second, out, to="eagle", engine="sglang")
    monkeypatch.undo()
    assert not (out / "config.json").exists()
    assert not (out / "medusa_lm_head.safetensors").exists()
    heads.export(second, out, to="eagle", engine="sglang")
    lab.assert_same(second, lab.adopt(out))
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "token_map.pt"]


def test_of_an_earlier_export_the_config_goes_first(lab, monkeypatch):
    out, gone, unlink = lab.folder / "out", [], Path.unlink
    heads.export(lab.head("eagle", small=True), out, to="eagle", engine="sglang")

    def record(self, **options):
        gone.extend([self.name] if self.exists() else [])
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", record)
    heads.export(lab.head("medusa"), out, to="medusa")
    assert gone[0] == "config.json"
    assert sorted(gone) == ["config.json", "model.safetensors", "token_map.pt"]


def test_files_are_readable_as_the_umask_says(lab):
    out = lab.export(lab.head("eagle", small=True), "eagle", engine="sglang")
    (lab.folder / "new").touch()
    expected = stat.S_IMODE((lab.folder / "new").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {expected}


def test_a_draft_model_is_copied_without_its_plans(lab):
    model = lab.save_model("draft", num_hidden_layers=2, max_shard_size="20KB")
    for name in ("tuned.json", "tokenizer.json"):
        (model / name).write_text("{}")
    out = lab.folder / "out"
    assert heads.export(model, out, to="hf", target=lab.model) == []
    assert {file.name for file in model.iterdir()} - {file.name for file in out.iterdir()} == {"tuned.json"}
    assert all(file.read_bytes() == (model / file.name).read_bytes() for file in out.iterdir())
    with pytest.raises(ValueError, match="is not empty"):
        heads.export(model, out, to="hf")
    with pytest.raises(
        ValueError, match="is a model, not a head; as a draft model it is exported to 'hf', not to 'eagle3'"
    ):
        heads.export(model, lab.folder / "other-out", to="eagle3")
    with pytest.raises(ValueError, match="hf takes no dtype"):
        heads.export(model, lab.folder / "other-out", to="hf", dtype=torch.float16)
    other = lab.save_model("wide", num_hidden_layers=2, vocab_size=99)
    (note,) = heads.export(other, lab.folder / "other-out", to="hf", target=lab.model)
    assert note == "vLLM refuses it: its vocabulary has 99 tokens, the target's 97"


@pytest.fixture
def llama_cpp(lab):
    """A folder with a converter that tells what it was given."""
    folder = lab.folder / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


@pytest.mark.parametrize(("dtype", "expected"), [(None, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_gguf_comes_from_the_converter(lab, llama_cpp, dtype, expected):
    out = lab.folder / "new" / "head.gguf"
    head = lab.head("eagle3", small=True)
    assert heads.export(head, out, to="gguf", llama_cpp=llama_cpp, dtype=dtype) == []
    assert out.read_bytes() == b"GGUF rest"
    assert list(out.parent.iterdir()) == [out]
    seen = json.loads((llama_cpp / "seen.json").read_text())
    assert (seen["type"], seen["target"]) == (expected, str(lab.model))
    assert seen["names"] == ["config.json", "model.safetensors"]
    assert seen["config"] == lab.read(lab.export(head, "eagle3", dtype=dtype))[0]
    with pytest.raises(ValueError, match=r"head\.gguf exists; delete it"):
        heads.export(head, out, to="gguf", llama_cpp=llama_cpp)


@pytest.mark.parametrize(
    "script", ["raise SystemExit('no such model')", "pass", CONVERTER.replace("GGUF rest", "text")]
)
def test_a_converter_that_fails_is_quoted_and_leaves_nothing(lab, llama_cpp, script):
    (llama_cpp / "convert_hf_to_gguf.py").write_text(script)
    out = lab.folder / "head.gguf"
    status = 1 if "SystemExit" in script else 0
    with pytest.raises(ValueError, match=rf"wrote no GGUF file \(exit status {status}\)") as error:
        heads.export(lab.head("eagle3"), out, to="gguf", llama_cpp=llama_cpp)
    assert ("no such model" in str(error.value)) == bool(status)
    assert not list(lab.folder.glob("head.gguf*"))


def test_what_llama_cpp_cannot_have_is_refused_before(lab, llama_cpp):
    out = lab.folder / "head.gguf"
    with pytest.raises(ValueError, match="exactly 3 decoder layers; this one has 2"):
        heads.export(lab.head("eagle3", feature_layers=(2, 3)), out, to="gguf", llama_cpp=llama_cpp)
    with pytest.raises(ValueError, match=r"has no convert_hf_to_gguf\.py"):
        heads.export(lab.head("eagle3"), out, to="gguf", llama_cpp=lab.model)
    assert not (llama_cpp / "seen.json").exists()


COMMANDS = {
    "eagle3": (
        "eagle3",
        [],
        [
            'vllm serve {t} --speculative-config \'{{"method": "eagle3", "model": "{o}"',
            "sglang serve --model-path {t} --dtype float32 --speculative-algorithm EAGLE3 ",
            "--speculative-draft-model-path {o} ",
            "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5\n",
            "    python convert_hf_to_gguf.py {o} --target-model-dir {t} --outtype f32 --outfile head.gguf\n"
            "    python convert_hf_to_gguf.py {t} --outtype f32 --outfile target.gguf\n"
            "    llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max 4\n",
        ],
    ),
    "speculators": ("eagle3", ["--tokens", "5"], ["vllm serve {o}\n", "note: vLLM takes the target from {t}"]),
    "medusa": (
        "medusa",
        ["--dtype", "bfloat16"],
        ['"method": "medusa", "model": "{o}", "num_speculative_tokens": 4}}'],
    ),
    "eagle": (
        "eagle",
        ["--for", "sglang"],
        ["EAGLE --speculative-draft-model-path {o} ", "--speculative-token-map {o}/token_map.pt\n"],
    ),
}


@pytest.mark.parametrize("to", COMMANDS)
def test_the_command_prints_how_to_serve_and_its_adoption_decodes(lab, capsys, to):
    kind, options, expected = COMMANDS[to]
    head, out = lab.head(kind, small=kind == "eagle"), lab.folder / "out"
    assert export_main([str(head), str(out), "--to", to, *options]) == 0
    printed = capsys.readouterr().out
    for line in expected:
        assert line.format(t=lab.model, o=out) in printed
    assert f"wrote {out} ({to})\n" in printed
    assert adopt_main([str(out), str(lab.folder / "back"), "--target", str(lab.model)]) == 0
    assert f"python -m decode {lab.model} PROMPT --head {lab.folder / 'back'}" in capsys.readouterr().out


def test_errors_are_one_line_and_a_status(lab, capsys):
    head = lab.head("medusa")
    assert export_main([str(head), str(lab.folder / "out"), "--to", "eagle3"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert export_main([str(lab.folder / "none"), str(lab.folder / "out"), "--to", "medusa"]) == 2
    assert "it has no config.json" in capsys.readouterr().err
    assert adopt_main([str(head), str(lab.folder / "out"), "--target", str(lab.model), "--aux", "vllm"]) == 2
    assert "a head folder already" in capsys.readouterr().err


def test_weights_that_may_not_be_read_are_not_called_missing(lab, monkeypatch):
    out = lab.export(lab.head("medusa"), "medusa")
    open_path = Path.open

    def refuse(self, *arguments, **options):
        if self.name == "medusa_lm_head.safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return open_path(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match="medusa_lm_head"):
        lab.adopt(out)


@pytest.mark.parametrize(("kind", "to"), [("medusa", "medusa"), ("eagle3", "eagle3")])
def test_a_path_by_which_vllm_would_mistake_a_head_is_said(lab, kind, to):
    head = lab.head(kind)
    notes = heads.export(head, lab.folder / "EAGLE-heads", to=to)
    said = [note for note in notes if "vLLM takes it for something else as long as 'eagle-' is in its path" in note]
    assert len(said) == (kind == "medusa")
    assert not any("something else" in note for note in heads.export(head, lab.folder / "out", to=to))


@pytest.mark.parametrize(("kind", "said"), [("llama", False), ("qwen2", True)])
def test_targets_for_which_llama_cpp_cannot_draft_are_said(lab, llama_cpp, kind, said):
    model = lab.save_model("other", seed=0)
    head = lab.head("eagle3")
    lab.edit(model, model_type=kind)
    for to, options in (("eagle3", {}), ("gguf", {"llama_cpp": llama_cpp})):
        notes = heads.export(head, lab.folder / f"out-{to}", to=to, target=model, **options)
        assert [note for note in notes if "llama.cpp drafts for targets of some types only" in note] == [
            note for note in notes if said and f"{kind} was not among them" in note
        ]
        assert any("llama.cpp drafts" in note for note in notes) == said


def test_missing_packages_of_the_converter_are_named_with_a_way_out(lab, llama_cpp):
    (llama_cpp / "convert_hf_to_gguf.py").write_text("import a_package_that_is_nowhere")
    with pytest.raises(ValueError, match=r"No module named 'a_package_that_is_nowhere'\n.* pip install sentencepiece"):
        heads.export(lab.head("eagle3"), lab.folder / "head.gguf", to="gguf", llama_cpp=llama_cpp)
