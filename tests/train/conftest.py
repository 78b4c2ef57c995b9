"""A tiny target, data and config on disk, and ways to run the command line on them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from train.medusa import main

SCRIPT = Path(__file__).parents[2] / "train" / "medusa.py"
FORKED, ROOT = Path(__file__).with_name("forked.py"), SCRIPT.parents[1]
SMALL = ("--head.width=8", "--head.num_layers=1", "--head.num_attention_heads=2", "--head.intermediate_size=16")
HEADS = {
    "medusa": ("--head.num_heads=2",),
    "hydra": ("--head.type=hydra", "--head.num_heads=2", "--head.prefix_layer=true"),
    "eagle": ("--head.type=eagle3", "--head.feature_layers=[1]"),
    "eagle-1": ("--head.type=eagle", "--head.noise=0"),  # which each process draws for itself
    "draft_model": ("--head.draft_vocab_size=null", *SMALL),
}
TRAINERS = {"hydra": "medusa", "eagle-1": "eagle"}
STEPS = ("--optim.schedule=constant", "--optim.accumulation=2", "--run.save_every=3")
SENTENCES = ["the cat sat on the mat", "one two three four", "the mat sat on the cat", "four three two one two"]


@pytest.fixture(scope="session")
def target_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 target of one layer, saved with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen short conversations."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    rows = [
        {
            "id": str(n),
            "messages": [
                {"role": "user", "content": f"{n} " + SENTENCES[n % 4]},
                {"role": "assistant", "content": " ".join(SENTENCES[n % 3 :])[: 20 + 5 * n]},
            ],
        }
        for n in range(14)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config_file(target_folder: Path, data_file: Path, tmp_path: Path) -> Path:
    """A run of eight steps in `tmp_path`/runs/tiny, without evaluation."""
    config = {
        "target": {"name": str(target_folder), "dtype": "float32"},
        "head": {"num_heads": 2, "draft_vocab_size": 64},
        "data": {"source": str(data_file), "max_length": 96},
        "optim": {"lr": 0.01, "steps": 8, "batch_size": 4, "warmup_steps": 2, "weight_decay": 0.1},
        "run": {"name": "tiny", "dir": str(tmp_path / "runs"), "save_every": 3},
        "eval": {"num_prompts": 0, "max_new_tokens": 12, "tree": [2, 1]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def start(config_file: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Start `python train/medusa.py --config ... <arguments>`, or another script, in a process of its own."""

    def start(
        *arguments: str, launcher: tuple[str, ...] = (sys.executable,), script: Path = SCRIPT, **environment: str
    ) -> "subprocess.Popen[str]":
        root = str(SCRIPT.parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [*launcher, str(script), "--config", str(config_file), *arguments],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Let a test make an Accelerator of its own, and forget it after."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def launch(config_file: Path, fresh_accelerate: None) -> Callable[..., Path]:
    """Run the command line on the config file in this process and return the run's folder."""

    def launch(*arguments: str) -> Path:
        AcceleratorState._reset_state(True)
        main(["--config", str(config_file), *arguments])
        name = next((word.partition("=")[2] for word in arguments if word.startswith("--run.name=")), "tiny")
        return config_file.parent / "runs" / name

    return launch


@pytest.fixture
def read_metrics() -> Callable[[Path], list[dict[str, float]]]:
    """Read the lines of a run's metrics.jsonl, without the speeds."""

    def read(folder: Path) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in line if not re.search(r"tokens_per_second$|speedup", key)} for line in lines]

    return read


@pytest.fixture
def run_all(tmp_path: Path, config_file: Path) -> Callable[[Sequence[dict[str, Any]]], list[list[list[int]]]]:
    """Run jobs in one process that forks, and return the exit codes of all their starts."""
    config_file.write_text(re.sub(r"^  num_heads: 2\n", "", config_file.read_text(), flags=re.M))

    def run_all(jobs: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
        path = tmp_path / "jobs.json"
        path.write_text(json.dumps(jobs))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(FORKED), str(path)]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return [json.loads(codes) for codes in re.findall(r"^JOB (.*)$", done.stdout, flags=re.M)]

    return run_all


@pytest.fixture
def job(tmp_path: Path, config_file: Path) -> Callable[..., dict[str, Any]]:
    """Describe one start of a trainer on the tiny target."""

    def job(name: str, head: str, *arguments: str, launch: str | None = None, **settings: Any) -> dict[str, Any]:
        words = ["--config", str(config_file), f"--run.name={name}", *HEADS[head], *STEPS, *arguments]
        processes = 1 if launch is None else 2
        folder = str(tmp_path / "runs" / name)
        return {"trainer": TRAINERS.get(head, head), "arguments": words, "folder": folder} | {
            "launch": launch,
            "processes": processes,
            **settings,
        }

    return job
