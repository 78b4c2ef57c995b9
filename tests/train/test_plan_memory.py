"""Predicted against measured peak memory of whole runs, for every kind of head."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {"small": (128, 4, 160), "large": (192, 6, 256)}
"""Hidden size, conversations of a batch, tokens of each."""
KINDS = {
    "medusa": ("medusa", "--head.chunk_size=64"),
    "hydra": ("medusa", "--head.type=hydra", "--head.prefix_layer=true", "--head.chunk_size=64"),
    "eagle": ("eagle", "--head.type=eagle"),
    "eagle3": ("eagle", "--head.feature_layers=[1,2]", "--head.draft_vocab_size=2048"),
    "draft model": ("draft_model", "--head.width=64", "--head.intermediate_size=256"),
}
FEW = ["medusa small", "medusa large", "eagle3 large"]
OTHERS = [f"{kind} {size}" for kind in KINDS for size in SIZES if f"{kind} {size}" not in FEW]


def write_target(folder: Path, size: int, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(path: Path) -> None:
    answers = ["the cat sat on the mat " * 50] * 16
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(names: list[str], folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict]:
    cases = []
    for name, (size, batch, tokens) in SIZES.items():
        write_target(folder / name, size, tokenizer)
        write_data(folder / f"{name}.jsonl")
        for kind, (trainer, *options) in KINDS.items():
            arguments = [f"--target.name={folder / name}", f"--data.source={folder / name}.jsonl", *options]
            arguments += [f"--data.max_length={tokens}", f"--optim.batch_size={batch}", "--optim.steps=2"]
            arguments += [f"--run.name={kind} {name}", f"--run.dir={folder / 'runs'}", "--eval.num_prompts=0"]
            cases.append((f"{kind} {name}", trainer, arguments))
    (folder / "cases.json").write_text(json.dumps([case for case in cases if case[0] in names]))
    script = Path(__file__).with_name("peaks.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def few(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return measure(FEW, tmp_path_factory.mktemp("few"), tiny_tokenizer)


@pytest.fixture(scope="module")
def others(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return measure(OTHERS, tmp_path_factory.mktemp("others"), tiny_tokenizer)


@pytest.mark.parametrize("case", FEW)
def test_prediction_is_within_a_fifth_of_the_measured_peak(few: dict[str, dict], case: str):
    check(few[case])


@pytest.mark.long
@pytest.mark.parametrize("case", OTHERS)
def test_prediction_is_within_a_fifth_of_the_measured_peak_for_all_heads(others: dict[str, dict], case: str):
    check(others[case])


def check(found: dict) -> None:
    print(found)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.2)
    # most of the peak is Python and the libraries; what the training adds is told apart from nothing, and from twice it
    assert 0.5 < (found["predicted"] - found["held"]) / (found["measured"] - found["held"]) < 1.6
