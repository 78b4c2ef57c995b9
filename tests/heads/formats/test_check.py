"""`heads.export --check`: the export is reloaded and drafts beside its head."""

import json
import math
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import Target
from decode.exported import compare_export
from heads import create_head, head_class, save_head
from heads.export.__main__ import main
from train.new_head import target_sizes

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
FORMATS = {"eagle3": "eagle3", "speculators": "eagle3", "medusa": "medusa", "eagle": "eagle"}
OF = {"eagle": {"engine": "sglang"}}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("to", FORMATS)
def test_an_export_drafts_what_its_head_drafts(lab, to, small):
    head = lab.head(FORMATS[to], small=small)
    found = compare_export(lab.target, head, lab.export(head, to, **OF.get(to, {})), PROMPTS, to=to, max_new_tokens=20)
    assert found.same == found.steps > 10
    assert found.head == found.export >= 1
    assert found.passed
    assert found.excuses == []
    assert found.lines()[0] == f"the same drafts in {found.steps} of {found.steps} steps"


@pytest.mark.parametrize("weight", ["fc.weight", "midlayer.self_attn.v_proj.weight", "lm_head.weight"])
def test_a_weight_that_differs_is_found(lab, weight):
    head = lab.head("eagle3", small=True)
    out = lab.export(head, "eagle3")
    _, tensors = lab.read(out)
    lab.replace(out, **{weight.replace(".", "__"): -tensors[weight]})
    found = compare_export(lab.target, head, out, PROMPTS, to="eagle3", max_new_tokens=20)
    assert found.same < found.steps
    assert not found.passed


def test_a_head_that_loses_its_draft_vocabulary_may_draft_otherwise(lab):
    head = lab.head("eagle", small=True)
    out = lab.export(head, "eagle", engine="vllm")
    found = compare_export(lab.target, head, out, PROMPTS, to="eagle", max_new_tokens=20)
    assert found.same < found.steps
    assert found.passed
    assert found.lines()[1] == "they may differ: the head drafts from 13 tokens, the export from 97"


def test_a_head_that_is_rounded_may_draft_otherwise(lab):
    head = lab.head("eagle3")
    out = lab.export(head, "eagle3", dtype=torch.bfloat16)
    found = compare_export(lab.target, head, out, PROMPTS, to="eagle3", max_new_tokens=20)
    assert found.excuses == ["the head's weights are float32, the export's bfloat16"]
    assert found.passed


def test_nothing_drafted_is_not_passed(lab):
    head = lab.head("eagle3")
    found = compare_export(lab.target, head, lab.export(head, "eagle3"), PROMPTS, to="eagle3", max_new_tokens=1)
    assert (found.steps, found.passed) == (0, False)
    assert math.isfinite(found.head)


@pytest.fixture(scope="module")
def talking(tmp_path_factory, tiny_tokenizer):
    """A target that can read, Medusa heads of it, a draft model and prompts."""
    folder = tmp_path_factory.mktemp("talking")
    for seed, name in enumerate(("target", "model")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tiny_tokenizer.save_pretrained(folder / name)
    target = Target.from_pretrained(str(folder / "target"), device="cpu")
    kind = head_class("medusa")
    head = create_head("medusa", kind.Config(num_heads=2, **target_sizes(target, kind.Config)), target)
    save_head(head, folder / "head", target=target)
    lines = [json.dumps({"prompt": text}) for text in ("the cat", "one two", "three", "four")]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(("name", "to"), [("head", "medusa"), ("model", "hf")])
def test_the_command_checks_what_it_has_written(talking, capsys, tmp_path, name, to):
    options = ["--to", to, "--target", str(talking / "target"), "--check", str(talking / "prompts.jsonl"), "--num", "2"]
    assert main([str(talking / name), str(tmp_path / "out"), *options]) == 0
    said = capsys.readouterr().out
    assert "\ncheck:\n    the same drafts in " in said
    assert "with the head, " in said


def test_the_exit_status_is_1_if_drafts_differ(talking, capsys, tmp_path, monkeypatch):
    def other(head, out, **options):
        written = write(head, out, **options)
        shutil.copy(talking / "model" / "model.safetensors", out)
        return written

    from heads.export import __main__ as command

    write = command.write
    monkeypatch.setattr(command, "write", other)
    options = ["--to", "hf", "--target", str(talking / "target"), "--check", str(talking / "prompts.jsonl")]
    assert main([str(talking / "target"), str(tmp_path / "out"), *options]) == 1
    assert "the same drafts in 0 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "gguf", "--llama-cpp", "x", "--check", "{prompts}"], "a GGUF file cannot be checked here"),
        (["--to", "medusa", "--check", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--to", "medusa", "--check", "{prompts}", "--num", "0"], "at least 1 prompt"),
        (["--to", "hf", "--check", "{prompts}"], "--check needs the target"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_written(talking, capsys, tmp_path, options, message):
    given = [option.format(prompts=talking / "prompts.jsonl") for option in options]
    assert main([str(talking / "head"), str(tmp_path / "out"), *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
