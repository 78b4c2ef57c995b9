"""Training on a target in 8 or 4 bits: what is planned, recorded and kept apart."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import Drafting, Target, generate
from decode.quantized import predicted_bytes, weight_bytes
from heads import load_head
from train import memory_plan, plan, run
from train.merge import merge
from train.plan import Plan, make_plan

Launch = Callable[..., Path]
ROUNDINGS = ("8bit", "4bit")
FEW = ("--optim.steps=2", "--optim.schedule=constant")


@pytest.fixture(scope="module")
def target_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose rows are as long as 4 bits need them."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, pad_token_id=1, **sizes, **more)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    made: list[Plan] = []

    def planned(*args: object) -> Plan:
        made.append(make_plan(*args))
        return made[-1]

    monkeypatch.setattr(run, "make_plan", planned)
    return made


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_a_head_learns_from_a_rounded_target_and_drafts_for_both(
    launch: Launch, plans: list[Plan], target_folder: Path, caplog: pytest.LogCaptureFixture, quantize: str
):
    folder = launch(*FEW, f"--target.quantize={quantize}", "--eval.num_prompts=1", "--eval.temperatures=[0]")
    assert json.loads((folder / "last" / "config.json").read_text())["target"]["quantize"] == quantize
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/mismatches"] for line in metrics if "eval/mismatches" in line] == [0]
    (memory,) = plans[0].memory
    for served in (quantize, None):
        target = Target.from_pretrained(str(target_folder), dtype="float32", device="cpu", quantize=served)
        head = load_head(folder / "last", target)
        assert len(caplog.records) == (0 if served else 1)
        texts = [generate(target, [40, 41, 42], proposer=p, max_new_tokens=8) for p in (None, Drafting.of(head))]
        assert texts[0].token_ids == texts[1].token_ids
        if served:
            assert memory.parts["target"] == weight_bytes(target.model)


@pytest.mark.parametrize("quantize", ROUNDINGS)
def test_an_adapter_learns_on_a_rounded_target_and_is_merged_into_the_whole_one_with_a_word(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture, quantize: str
):
    folder = launch(*FEW, "--head.type=medusa2", "--head.rank=2", f"--target.quantize={quantize}")
    lora = load_file(folder / "last" / "adapter" / "adapter_model.safetensors")
    assert all(weight.abs().sum() > 0 for name, weight in lora.items() if "lora_B" in name)  # which start from zero
    merge(str(folder / "last"), str(tmp_path / "merged"))
    assert f"in {quantize}, and the target's weights are not quantized here" in caplog.text
    target = Target.from_pretrained(str(tmp_path / "merged" / "target"), device="cpu")
    texts = [
        generate(target, [40, 41, 42], head=head, max_new_tokens=8).token_ids
        for head in (None, tmp_path / "merged" / "head")
    ]
    assert texts[0] == texts[1]


def test_states_of_another_rounding_are_not_taken_from_a_folder(launch: Launch, tmp_path: Path):
    stored = f"--data.feature_dir={tmp_path / 'features'}"
    launch(*FEW, stored)
    launch(*FEW, stored, "--run.name=again")
    with pytest.raises(SystemExit, match=r"target.quantize: float32 -> float32, weights in 4bit"):
        launch(*FEW, stored, "--run.name=rounded", "--target.quantize=4bit")


def test_a_run_does_not_go_on_with_another_rounding(launch: Launch):
    launch(*FEW, "--target.quantize=8bit")
    with pytest.raises(SystemExit, match=r"target.quantize: '8bit' -> None"):
        launch("--optim.steps=3", "--optim.schedule=constant")


def test_a_rounding_that_would_fit_is_a_way_out_and_is_one(
    launch: Launch, plans: list[Plan], monkeypatch: pytest.MonkeyPatch
):
    def free(added: int) -> None:
        monkeypatch.setattr(memory_plan, "free_memory", lambda: added)

    launch(*FEW, "--plan")
    free(plans[0].memory[0].added - 1)
    with pytest.raises(SystemExit, match="does not fit") as refused:
        launch(*FEW, "--run.name=small")
    offered = re.findall(r"\n  --target\.quantize=(\w+): ([\d.]+) [MG]iB", str(refused.value))
    assert [name for name, _ in offered] == ["8bit"]
    free(2**40)
    launch(*FEW, "--plan", "--target.quantize=8bit")
    found, before = plans[-1].memory[0].parts, plans[0].memory[0].parts
    assert found["target"] < before["target"]


def test_a_target_that_fits_rounded_only_says_so_before_it_is_loaded(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, target_folder: Path
):
    empty = plan.without_weights(str(target_folder))
    needed = [predicted_bytes(empty, name, torch.bfloat16) for name in (None, "4bit")]
    monkeypatch.setattr(plan, "free_memory", lambda: needed[1])
    assert needed[1] < needed[0]
    message = r"weights, which take .* in float32 while .*: --target.dtype=bfloat16 --target.quantize=4bit would fit"
    with pytest.raises(SystemExit, match=message):
        launch("--optim.steps=1")
    launch("--optim.steps=1", "--target.dtype=bfloat16", "--target.quantize=4bit")
