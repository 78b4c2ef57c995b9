"""What would be wrong in silence is refused or said; a full disk, a neighbour or Ctrl-C leave no halves."""

import fcntl
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Qwen2Config, XGLMConfig

import heads
from decode import Target, UnsupportedTargetError
from decode.exported import compare_export
from heads import create_head, head_class, save_head
from heads.adopt.__main__ import main as adopt_main
from heads.export.__main__ import main as export_main
from heads.formats import folder as folder_module
from heads.formats.folder import writing
from heads.formats.target_files import TargetFiles
from train.new_head import target_sizes

IDS = "eagle_aux_hidden_state_layer_ids"
SHAPE = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0},
}
SMALL_XGLM = {"vocab_size": 97, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
CONFIGS = {
    "gemma2": Gemma2Config(**SHAPE),
    "gemma3": Gemma3TextConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "xglm": XGLMConfig(**SMALL_XGLM),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_is_known_whether_an_embedding_gives_its_rows(tmp_path, config):
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    files, ids = TargetFiles(tmp_path), torch.arange(5)
    assert files.scales_embedding is not torch.equal(model.get_input_embeddings()(ids), files.embed(ids))


def test_eagle_heads_of_targets_that_scale_embeddings_are_refused_both_ways(lab):
    model = AutoModelForCausalLM.from_config(CONFIGS["gemma3"])
    model.save_pretrained(lab.folder / "gemma")
    target = Target(model, name=str(lab.folder / "gemma"))
    kind = head_class("eagle")
    save_head(
        create_head("eagle", kind.Config(**target_sizes(target, kind.Config)), target), lab.folder / "h", target=target
    )
    with pytest.raises(ValueError, match="as gemma3_text models scale them: drafts would not be the same"):
        heads.export(lab.folder / "h", lab.folder / "out", to="eagle", engine="vllm")
    with pytest.raises(ValueError, match="gemma3_text models scale them"):
        lab.adopt(lab.export(lab.head("eagle"), "eagle", engine="vllm"), target=lab.folder / "gemma")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((3,), "SGLang leaves fc out"),
        ((1, 9), "SGLang does not hand on the output of a target's last layer, here 9"),
        ((2, 5), ""),
    ],
)
def test_layers_that_sglang_misreads_are_said_and_it_gets_no_command(lab, capsys, layers, said):
    head = lab.head("eagle3", feature_layers=layers)
    assert export_main([str(head), str(lab.folder / "out"), "--to", "eagle3"]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert ("sglang serve" in out) == (not said)
    assert ("note: SGLang" in out) == bool(said)


def test_what_a_precision_cannot_hold_is_refused_and_an_earlier_export_stays(lab):
    head, out = lab.head("eagle3", seed=2), lab.export(lab.head("eagle3"), "eagle3")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    lab.replace(head, norm__weight=torch.full((32,), 1e6))
    with pytest.raises(
        ValueError, match=r"norm.weight holds numbers that are infinite or none \(NaN\) in torch.float16"
    ):
        heads.export(head, out, to="eagle3", dtype=torch.float16)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    heads.export(head, out, to="eagle3", dtype=torch.bfloat16)


FIELDS = {
    "no-flag": ({"norm_before_residual": "false"}, "must have norm_before_residual as true or false, got 'false'"),
    "aux-flag": ({"eagle_config": {"use_aux_hidden_state": "no"}}, "use_aux_hidden_state as true or false"),
    "bias-flag": ({"attention_bias": 1}, "attention_bias as true or false, got 1"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps, a number above 0, got nan"),
    "part": ({"num_attention_heads": 4.5}, "num_attention_heads, an integer above 0, got 4.5"),
    "beyond": ({"head_dim": 10**30}, "head_dim, an integer above 0, got 1000"),
    "too-large": ({"intermediate_size": 10**12}, "intermediate_size is 1000000000000, with head_dim 6: more than any"),
    "two-bases": ({"rope_theta": 1e4}, "rope_theta is 10000.0 and in rope_parameters 50000.0; delete the wrong one"),
    "kinds": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters is .*heads here have plain",
    ),
    "factor": ({"rope_scaling": {"factor": 8.0}}, "rope_scaling is .*plain positions"),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters is .*plain positions"),
    "partial-top": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; heads here have none"),
    "logit-scale": ({"logit_scale": 0.1}, "logit_scale is 0.1; heads here have none"),
    "two-lists": (
        {IDS: [2, 4, 6], "eagle_config": {IDS: [1, 2, 3]}},
        r"is \[2, 4, 6\], but \[1, 2, 3\] in eagle_config",
    ),
    "yes-layers": ({IDS: [True, 4, 6]}, "must be a list of numbers"),
    "zero-layers": ({IDS: 0}, "must be a list of numbers, got 0"),
}


@pytest.mark.parametrize("case", FIELDS.values(), ids=FIELDS)
def test_entries_that_say_something_else_are_not_read_as_defaults(lab, eagle3, case):
    fields, message = case
    with pytest.raises(ValueError, match=message):
        lab.adopt(lab.edit(eagle3[1], **fields))


TENSORS = {
    "int8": (torch.ones(32, 96, dtype=torch.int8), "fc.weight is of torch.int8"),
    "float8": (torch.ones(32, 96).to(torch.float8_e4m3fn), "fc.weight is of torch.float8_e4m3fn .*dequantize"),
    "sparse": (torch.ones(32, 96).to_sparse(), r"fc.weight is of torch.float32 \(torch.sparse_coo\)"),
    "nan": (torch.full((32, 96), float("nan")), "fc.weight holds numbers that are infinite or none"),
    "claim": (torch.ones(1).expand(10**9, 96), "fc.weight claims 96000000000 numbers, which are not in its file"),
}


@pytest.mark.parametrize("case", TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_no_plain_numbers_are_refused(lab, eagle3, case):
    tensor, message = case
    _, out = eagle3
    tensors = lab.read(out)[1]
    (out / "model.safetensors").unlink()
    torch.save({**tensors, "fc.weight": tensor}, out / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        lab.adopt(out)


def test_other_shapes_of_masks_and_projections_are_refused(lab, eagle3):
    _, out = eagle3
    with pytest.raises(ValueError, match=r"t2d has shape \(\), expected \(97,\)"):
        lab.adopt(lab.replace(out, t2d=torch.tensor(True)))
    out = lab.export(lab.head("medusa", small=True), "medusa")
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(\)"):
        lab.adopt(lab.replace(out, lm_head__weight=torch.tensor(1.0)))


def test_pickles_are_refused_in_one_line_without_the_advice_to_run_them(lab, eagle3):
    _, out = eagle3
    (out / "model.safetensors").unlink()
    (out / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": shutil.copyfile}, protocol=2))
    with pytest.raises(ValueError, match="ask for safetensors") as error:
        lab.adopt(out)
    assert "weights_only" not in str(error.value)
    assert "\n" not in str(error.value)
    torch.save({3: torch.ones(1)}, out / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no mapping of names to tensors"):
        lab.adopt(out)


@pytest.mark.parametrize("entry", [None, 3, [1], "x"])
def test_targets_whose_config_is_damaged_are_named(lab, entry):
    head, model = lab.head("eagle3"), lab.save_model(seed=0)
    lab.edit(model, max_position_embeddings=-1)
    with pytest.raises(ValueError, match="must have max_position_embeddings or n_positions, a number above 0"):
        heads.export(head, lab.folder / "out", to="eagle3", target=model)
    (model / "config.json").write_text(json.dumps({"text_config": entry}))
    message = "must have num_hidden_layers" if entry is None else "must have an object as text_config"
    with pytest.raises(ValueError, match=message):
        heads.export(head, lab.folder / "out", to="eagle3", target=model)
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not valid JSON"):
        heads.export(head, lab.folder / "out", to="eagle3", target=model)


def test_a_target_without_a_matrix_to_embed_is_named(lab):
    model = lab.replace(lab.save_model(seed=0), model__embed_tokens__weight=torch.ones(97))
    with pytest.raises(ValueError, match=r"must be a matrix of floating-point numbers, got torch.float32 \(97,\)"):
        TargetFiles(model).embed  # noqa: B018


def test_a_folder_that_somebody_else_writes_is_left_alone(lab, eagle3):
    head, out = eagle3
    before = (out / "config.json").read_bytes()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="somebody else is writing to"):
        heads.export(head, out, to="speculators")
    assert (out / "config.json").read_bytes() == before
    os.close(descriptor)
    heads.export(head, out, to="speculators")


@pytest.mark.parametrize("error", [SafetensorError("No space"), RuntimeError("No space"), OSError("No space")])
def test_a_full_disk_is_one_line_and_leaves_no_halves(lab, eagle3, monkeypatch, capsys, error):
    def fill(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise error

    head, out = eagle3
    monkeypatch.setattr(folder_module, "save_file", fill)
    monkeypatch.setattr("heads.checkpoint.save_file", fill)
    assert export_main([str(head), str(lab.folder / "new"), "--to", "eagle3"]) == 2
    assert adopt_main([str(out), str(lab.folder / "back"), "--target", str(lab.model)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2
    assert all("No space" in line for line in lines)
    assert not list((lab.folder / "new").iterdir())
    assert not list((lab.folder / "back").iterdir())


def test_files_that_were_there_before_stay_after_a_failure(tmp_path):
    (tmp_path / "mine.tmp").touch()

    def fail():
        (tmp_path / "half.tmp").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), writing(tmp_path):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["mine.tmp"]


def test_a_copy_of_a_model_that_fails_is_taken_away(lab, monkeypatch):
    def fill(source, place):
        raise OSError("No space")

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(OSError, match="No space"):
        heads.export(lab.model, lab.folder / "out", to="hf")
    assert not (lab.folder / "out").exists()


def test_of_a_models_folder_only_what_engines_read_is_copied_and_the_rest_is_named(lab):
    model, out = lab.save_model("draft", num_hidden_layers=2), lab.folder / "out"
    for name in (
        "optimizer.pt",
        "secrets.json",
        "notes.txt",
        "optimizer.safetensors",
        "checkpoint-5/model.safetensors",
    ):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    for name in ("tokenizer.json", "merges.txt", "additional_chat_templates/tools.jinja"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    (left,) = heads.export(model, out, to="hf")
    names = "checkpoint-5/, notes.txt, optimizer.pt, optimizer.safetensors, secrets.json"
    assert left == f"not copied, as no engine reads it of a model: {names}"
    copied = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    others = ["generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert copied == ["additional_chat_templates/tools.jinja", "config.json", *others]


def test_ctrl_c_and_unsupported_targets_are_one_line(lab, monkeypatch, capsys):
    head, prompts = lab.head("eagle3"), lab.folder / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2]}')
    command = [str(head), str(lab.folder / "out"), "--to", "eagle3", "--check", str(prompts)]
    for error, status in ((KeyboardInterrupt(), 130), (UnsupportedTargetError("no trees"), 2)):

        def stop(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr("decode.target.Target.from_pretrained", stop)
        assert export_main(command) == status
        assert capsys.readouterr().err.splitlines()[-1] in ("stopped", "error: no trees")


def test_links_in_a_circle_are_one_line(lab, eagle3, capsys):
    head, _ = eagle3
    (lab.folder / "loop").symlink_to(lab.folder / "loop")
    for command in ([str(head), str(lab.folder / "loop")], [str(lab.folder / "loop"), str(lab.folder / "new")]):
        assert export_main([*command, "--to", "eagle3"]) == 2
        assert adopt_main([*command, "--target", str(lab.model)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_export_of_a_head_that_reads_other_layers_is_not_compared(lab):
    head = lab.head("eagle3")
    out = lab.edit(lab.export(head, "eagle3"), **{IDS: [1, 4, 6]})
    with pytest.raises(
        ValueError, match=r"reads the target's layers \[1, 4, 6\].*\[2, 4, 6\]: it is an export of another"
    ):
        compare_export(lab.target, head, out, [[5, 6, 7]], to="eagle3")
