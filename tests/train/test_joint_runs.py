"""Whole runs that train heads with an adapter: interruption, processes, evaluation, and what they save."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from decode import Target, generate
from heads import load_head, read_notes
from heads.publish.contents import read_contents
from train.adapter import WEIGHTS

JOINT = ("--head.type=medusa2", "--head.rank=4", "--optim.schedule=constant")
Launch = Callable[..., Path]
Read = Callable[[Path], list[dict[str, float]]]


@pytest.fixture
def joint(launch: Launch) -> Launch:
    def joint(*arguments: str) -> Path:
        return launch(*JOINT, *arguments)

    return joint


@pytest.fixture
def original(target_folder: Path) -> Target:
    return Target.from_pretrained(str(target_folder), dtype="float32", device="cpu", pack=False)


def greedy(model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """The slow way."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] != 1):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def saved_bytes(folder: Path) -> list[bytes]:
    return [(folder / "last" / name).read_bytes() for name in ("model.safetensors", f"adapter/{WEIGHTS}")]


def test_a_continued_run_has_the_bits_of_an_uninterrupted_one(joint: Launch, read_metrics: Read):
    arguments = ("--optim.accumulation=2", "--head.head_warmup=0.9", "--head.dropout=0.1", "--run.keep=9")
    folder = joint(*arguments, "--eval.num_prompts=2", "--run.eval_every=4")
    metrics, weights = read_metrics(folder), saved_bytes(folder)
    for path in (folder / "checkpoints").iterdir():  # as if killed in step 6
        if int(path.name[-6:]) > 4:
            path.rename(path.with_name(path.name + ".incomplete"))
    state = torch.load(folder / "checkpoints" / "step_000004" / "optimizer.bin", weights_only=True)
    assert [group["lr"] for group in state["param_groups"]] == [0.01, 0.0025]
    joint(*arguments, "--eval.num_prompts=2", "--run.eval_every=4")
    assert read_metrics(folder) == metrics
    assert saved_bytes(folder) == weights
    kept = load_file(folder / "checkpoints" / "step_000008" / "model.safetensors")
    assert int(kept["forwards"]) == 16
    assert sum(name.startswith("adapted.") for name in kept) == 14


def test_micro_batches_make_the_same_step(joint: Launch, read_metrics: Read):
    whole = read_metrics(joint("--run.name=whole"))
    split = read_metrics(joint("--run.name=split", "--optim.accumulation=4"))
    assert len(whole) == len(split) == 8
    for a, b in zip(whole, split, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert whole[0]["train/head_weight"] < whole[-1]["train/head_weight"]


@pytest.mark.timeout(200)
def test_two_processes_make_the_steps_of_one(joint: Launch, start, read_metrics: Read, config_file: Path):
    arguments = ("--optim.accumulation=2", "--eval.num_prompts=3", "--optim.steps=4")
    one = read_metrics(joint(*arguments, "--run.name=one"))
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    options = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
    process = start(*JOINT, *arguments, launcher=(*accelerate, *options), ACCELERATE_USE_CPU="true")
    try:
        output, _ = process.communicate(timeout=160)
    finally:
        process.terminate()  # a launcher that is killed leaves its processes behind
        process.wait(timeout=30)
    assert process.returncode == 0, output
    assert output.count("drift of the adapted target") == 1  # only the main process speaks
    two = read_metrics(config_file.parent / "runs" / "tiny")
    assert len(one) == len(two) == 5
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


def test_every_evaluation_decodes_on_the_adapted_target_of_its_time(
    joint: Launch, read_metrics: Read, capsys: pytest.CaptureFixture[str], original: Target, monkeypatch
):
    texts = {}

    def spy(target: Target, prompt: list[int], **options):
        output = generate(target, prompt, **options)
        if options["sampling"].greedy:
            texts[tuple(prompt)] = output.token_ids  # at last those of the last evaluation
        return output

    monkeypatch.setattr("train.evaluate.generate", spy)
    folder = joint(
        *("--eval.num_prompts=3", "--run.eval_every=10", "--optim.steps=20", "--optim.lr=0.05", "--head.adapter_lr=1"),
        *("--head.head_weight=5", "--head.max_drift=0.01", "--head.head_warmup=0"),
    )
    lines = [line for line in read_metrics(folder) if "eval/mismatches" in line]
    assert [line["step"] for line in lines] == [0, 10, 20]
    assert [line["eval/mismatches"] for line in lines] == [0, 0, 0]  # texts of another target would be
    drifts = [line["drift/kl"] for line in lines]
    assert drifts[0] == pytest.approx(0, abs=1e-9)
    assert min(drifts[1:]) > 0.01
    assert lines[0]["drift/agreement"] == 1 > lines[2]["drift/agreement"]
    assert capsys.readouterr().out.count("warning: that is more than head.max_drift=0.01") == 2
    assert read_notes(folder / "last").measured["drift/kl"] == drifts[2]
    before = [greedy(original.model, prompt, 12) for prompt in texts]
    adapted = PeftModel.from_pretrained(original.model, str(folder / "last" / "adapter"))
    assert [greedy(adapted, prompt, 12) for prompt in texts] == list(texts.values()) != before


def test_the_drift_is_measured_on_the_answers_of_the_original_target(
    joint: Launch, read_metrics: Read, original: Target, tmp_path: Path
):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "the cat"}\n{"prompt": "one two three"}\n')
    folder = joint(f"--eval.prompts=[{questions}]", "--eval.num_prompts=2", "--head.adapter_lr=5", "--optim.steps=4")
    model = AutoModelForCausalLM.from_pretrained(original.name, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, str(folder / "last" / "adapter"))
    kl, same, count = 0.0, 0, 0
    for text in ("the cat", "one two three"):
        chat = original.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        ids = [*chat, *greedy(original.model, chat, 12)]
        with torch.no_grad():
            p, q = (net(torch.tensor([ids])).logits[0].double().softmax(-1) for net in (original.model, adapted))
        for place in range(len(chat) - 1, len(ids) - 1):
            kl += float((p[place] * (p[place] / q[place]).log()).sum())
            same += int(p[place].argmax() == q[place].argmax())
            count += 1
    [line] = [line for line in read_metrics(folder) if "drift/kl" in line]
    assert line["drift/kl"] == pytest.approx(kl / count, rel=1e-3)
    assert kl > 0
    assert line["drift/agreement"] == same / count


def test_the_folder_holds_heads_and_an_adapter_that_peft_loads(joint: Launch, original: Target, target_folder: Path):
    folder = joint("--head.modules=[q_proj,down_proj]")
    last = folder / "last"
    assert {path.name for path in last.iterdir()} == {"adapter", "config.json", "model.safetensors"}
    assert not (folder / "last.new").exists()
    config = json.loads((last / "config.json").read_text())
    assert config["type"] == "medusa"
    assert config["training"]["joint"]["modules"] == ["q_proj", "down_proj"]
    settings = json.loads((last / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == (str(target_folder), 4, 16)
    assert len({path.stat().st_mode for path in last.rglob("*") if path.is_file()}) == 1
    adapted = PeftModel.from_pretrained(original.model, str(last / "adapter"))
    weights = load_file(folder / "checkpoints" / "step_000008" / "model.safetensors")
    scale = 16 / 4
    ids = torch.tensor([[5, 9, 300, 17, 4]])
    with torch.no_grad():
        logits = adapted(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
        for name in ("model/layers/0/self_attn/q_proj", "model/layers/0/mlp/down_proj"):
            a, b = (weights[f"adapted.{name}/{part}/weight"] for part in ("lora_A", "lora_B"))
            plain.get_parameter(name.replace("/", ".") + ".weight").add_(scale * b @ a)
        torch.testing.assert_close(logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits, original_logits(target_folder, ids), atol=1e-3)


def original_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


def test_the_original_target_is_refused_with_the_way_to_the_adapted_one(joint: Launch, original: Target):
    folder = joint("--optim.steps=1")
    with pytest.raises(ValueError, match=r"trained for .*target.* with its adapter \(`python -m train\.merge"):
        load_head(folder / "last", original)
    with pytest.raises(ValueError, match=r"python -m train\.merge .*last OUT\), and publish OUT/target and OUT/head"):
        read_contents(folder / "last")


def test_heads_trained_alone_are_a_start(joint: Launch, launch: Launch, original: Target, read_metrics: Read):
    alone = launch("--run.name=alone", "--head.draft_vocab_size=32")
    start = load_head(alone / "last", original)
    options = (f"--run.init={alone / 'last'}", "--head.draft_vocab_size=32", "--optim.steps=1", "--optim.lr=1e-9")
    folder = joint(*options)
    found = load_file(folder / "last" / "model.safetensors")
    for name, tensor in start.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=1e-8, rtol=0)
    assert torch.equal(found["vocabulary"], start.vocabulary)
    message = r"error: run\.init=.*last: its weights are not those that head\.\* asks for: .*; give the folder"
    with pytest.raises(SystemExit, match=message):
        joint(*options, "--head.num_heads=3", "--run.name=other")
    with pytest.raises(SystemExit, match=r"run\.init=nowhere: nowhere is not a head folder.*; give the folder"):
        joint(*options, "--run.init=nowhere", "--run.name=other")


def test_a_continued_run_needs_the_heads_that_it_began_with_no_more(joint: Launch, launch: Launch):
    options = ("--head.draft_vocab_size=32", "--optim.steps=2")
    alone = launch(*options, "--run.name=alone")
    init = (f"--run.init={alone / 'last'}", "--head.head_warmup=0")  # which else is a share of the run
    whole = saved_bytes(joint(*options, *init, "--optim.steps=4", "--run.name=whole"))
    joint(*options, *init)
    alone.rename(alone.with_name("gone"))
    assert saved_bytes(joint(*options, *init, "--optim.steps=4")) == whole


def test_bf16_trains_close_to_float32(joint: Launch, read_metrics: Read):
    exact = read_metrics(joint("--run.name=exact", "--optim.steps=4"))
    rounded = read_metrics(joint("--run.name=rounded", "--precision=bf16", "--optim.steps=4"))
    assert [line["train/loss"] for line in rounded] == pytest.approx([line["train/loss"] for line in exact], rel=5e-2)
    assert rounded != exact


def test_layers_that_there_are_not_are_an_error_without_a_traceback(joint: Launch):
    with pytest.raises(SystemExit, match=r"error: head\.modules: .* no linear layers \['c_attn'\].* q_proj, k_proj"):
        joint("--head.modules=[c_attn]")
