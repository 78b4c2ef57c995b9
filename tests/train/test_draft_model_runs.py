"""Whole runs that train a draft model, and the plain model folders they leave."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from decode import DraftModel, Sampling, StaticTree, Target, generate
from train.draft_model import main
from train.model_folder import NOTES, save_model

Run = Callable[..., Path]
Read = Callable[[Path], list[dict[str, float]]]


@pytest.fixture
def run(target_folder: Path, data_file: Path, tmp_path: Path, fresh_accelerate: None) -> Run:
    """Train by the command line in this process: eight steps, without evaluation; return the run's folder."""
    config = {
        "target": {"name": str(target_folder), "dtype": "float32"},
        "head": {"width": 8, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        "data": {"source": str(data_file), "max_length": 96},
        "optim": {"lr": 0.01, "steps": 8, "batch_size": 4, "schedule": "constant"},
        "run": {"name": "tiny", "dir": str(tmp_path / "runs"), "save_every": 3},
        "eval": {"num_prompts": 0, "max_new_tokens": 12, "tree": [2, 1]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))

    def run(*arguments: str) -> Path:
        AcceleratorState._reset_state(True)
        main(["--config", str(path), *arguments])
        name = next((word.partition("=")[2] for word in arguments if word.startswith("--run.name=")), "tiny")
        return tmp_path / "runs" / name

    return run


def test_a_run_learns_and_its_folders_load_everywhere_and_decode_exactly(
    run: Run, read_metrics: Read, target_folder: Path
):
    folder = run("--optim.steps=40", "--eval.num_prompts=2", "--run.eval_every=20")
    lines = read_metrics(folder)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    top1 = [line["train/top1"] for line in lines if "train/top1" in line]
    assert sum(top1[-5:]) > sum(top1[:5])
    evaluations = {line["step"]: line for line in lines if "eval/tokens_per_step" in line}
    assert list(evaluations) == [0, 20, 40]
    assert all(line["eval/mismatches"] == 0 for line in evaluations.values())
    assert not list(folder.glob("*.old")) + list(folder.glob("*.new"))
    target = Target.from_pretrained(str(target_folder), dtype="float64", device="cpu")
    best = max(evaluations, key=lambda step: (evaluations[step]["eval/tokens_per_step"], step))
    for name, step in (("last", 40), ("best", best)):
        notes = json.loads((folder / name / NOTES).read_text())
        assert notes["training"]["step"] == step
        assert notes["measured"]["tokens_per_step"] == evaluations[step]["eval/tokens_per_step"]
        assert notes["target"] == {"name": str(target_folder), "fingerprint": target.fingerprint}
        assert notes["config"]["width"] == 8
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        assert isinstance(model, LlamaForCausalLM)
        assert (model.config.eos_token_id, model.config.max_position_embeddings) == (1, 128)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
        assert tokenizer.chat_template == target.tokenizer.chat_template
        draft = DraftModel.from_pretrained(folder / name, target)
        for sampling in (Sampling(), Sampling(temperature=0.9, seed=1)):
            prompts = ["the cat", "one two three"]
            plain = generate(target, prompts, sampling=sampling, max_new_tokens=20, eos_ids=())
            for options in ({"draft_model": folder / name}, {"draft_model": draft, "grow": StaticTree(((0,), (1,)))}):
                drafted = generate(target, prompts, sampling=sampling, max_new_tokens=20, eos_ids=(), **options)
                assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]


def test_the_folder_holds_the_weights_of_the_checkpoint(run: Run):
    folder = run()
    checkpoint = load_file(next((folder / "checkpoints" / "step_000008").glob("*.safetensors")))
    loaded = AutoModelForCausalLM.from_pretrained(folder / "last").state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert len(checkpoint) == len(loaded) - 1  # of the two tied weights one is stored
    for name, tensor in checkpoint.items():
        assert torch.equal(loaded["model." + name.partition(".")[2]], tensor)


def test_a_continued_run_has_the_bits_of_an_uninterrupted_one(run: Run, read_metrics: Read):
    whole = run("--run.name=whole", "--optim.accumulation=2", "--head.chunk_size=7")
    folder = run("--optim.steps=5", "--optim.accumulation=2", "--head.chunk_size=7")
    run("--optim.accumulation=2", "--head.chunk_size=7")
    assert read_metrics(folder) == read_metrics(whole)
    weights = [(path / "last" / "model.safetensors").read_bytes() for path in (folder, whole)]
    assert weights[0] == weights[1]


def test_bf16_trains_close_to_float32(run: Run, read_metrics: Read):
    exact = read_metrics(run("--run.name=exact"))
    rounded = read_metrics(run("--run.name=rounded", "--precision=bf16"))
    assert [line["train/loss"] for line in rounded] == pytest.approx([line["train/loss"] for line in exact], rel=2e-2)
    assert rounded != exact


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head.width=10",), r"error: head.width \(10\) must be head.num_attention_heads \(2\) times an even number"),
        (("--head.width=24",), "error: head.width .24. is above the target's 16"),
        (("--head.widht=8",), "width"),
        (("--head.embedding=best",), "embedding"),
        (("--head.hidden_size=16",), "hidden_size"),
    ],
)
def test_bad_sizes_are_errors_without_a_traceback(run: Run, arguments: tuple[str, ...], message: str):
    with pytest.raises(SystemExit, match=message):
        run(*arguments)


def test_a_target_that_scales_its_logits_is_taught_from_only_by_the_data(
    run: Run, read_metrics: Read, tiny_tokenizer, tmp_path: Path
):
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, logits_scaling=4.0, initializer_range=0.4,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path / "scaled")
    tiny_tokenizer.save_pretrained(tmp_path / "scaled")
    wanted = f"--target.name={tmp_path / 'scaled'}"
    with pytest.raises(SystemExit, match=r"scales or caps its logits .* --head.losses='\{\"ce\": 1\}'"):
        run(wanted)
    assert len(read_metrics(run(wanted, '--head.losses={"ce": 1}', "--optim.steps=2"))) == 2


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Die before the n-th renaming from now on."""

    def kill(number: int) -> None:
        count = 0
        for name in ("rename", "replace"):
            move = getattr(Path, name)

            def dying(self: Path, aim: Path, move=move) -> Path:
                nonlocal count
                count += 1
                if count == number:
                    raise Killed
                return move(self, aim)

            monkeypatch.setattr(Path, name, dying)

    return kill


def loadable(path: Path) -> list[Path]:
    """Those of a folder and what is written beside it that are whole."""
    whole = []
    for folder in (path, path.with_name(path.name + ".new"), path.with_name(path.name + ".old")):
        if all((folder / name).exists() for name in ("config.json", "model.safetensors", "tokenizer.json", NOTES)):
            AutoModelForCausalLM.from_pretrained(folder)
            AutoTokenizer.from_pretrained(folder)
            whole.append(folder)
    return whole


@pytest.fixture
def saved(tiny_target: Target, make_tiny_llama, tmp_path: Path) -> Callable[[int], Path]:
    """Save a model whose weights come from a seed."""

    def saved(seed: int) -> Path:
        save_model(make_tiny_llama(seed=seed, dtype=torch.float32), tiny_target, tmp_path / "model", {"seed": seed})
        return tmp_path / "model"

    return saved


def test_a_folder_is_replaced_whole(saved: Callable[[int], Path], make_tiny_llama, tmp_path: Path):
    for seed in (1, 2, 3):
        folder = saved(seed)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert json.loads((folder / NOTES).read_text())["seed"] == seed
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # the weights are no one's secret
        held = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        expected = make_tiny_llama(seed=seed, dtype=torch.float32).state_dict()
        assert all(torch.equal(held[name], expected[name]) for name in expected)


@pytest.mark.parametrize("number", range(1, 4))
def test_a_kill_between_renamings_leaves_a_folder_that_loads(saved, kill, monkeypatch, number):
    folder = saved(1)
    kill(number)
    with contextlib.suppress(Killed):
        saved(2)
    assert loadable(folder)
    monkeypatch.undo()
    saved(3)
    assert loadable(folder) == [folder]
    assert json.loads((folder / NOTES).read_text())["seed"] == 3


@pytest.mark.parametrize("number", range(1, 4))
def test_a_second_kill_while_writing_does_not_lose_what_the_first_left(saved, kill, monkeypatch, number):
    folder = saved(1)
    kill(number)
    with contextlib.suppress(Killed):
        saved(2)
    monkeypatch.undo()
    save = LlamaForCausalLM.save_pretrained

    def half(self, path, *rest, **options):
        save(self, path, *rest, **options)
        (Path(path) / "model.safetensors").unlink()
        raise Killed

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", half)
    with pytest.raises(Killed):
        saved(3)
    assert loadable(folder), "both the old folder and the new one are lost"


def test_a_run_killed_while_its_last_folder_is_renamed_still_has_it_when_it_is_started_again(run, kill, monkeypatch):
    folder = run("--optim.steps=2")

    def dying(*arguments, **options):
        kill(2)
        save_model(*arguments, **options)

    monkeypatch.setattr("train.draft_model.save_model", dying)
    with pytest.raises(Killed):
        run("--optim.steps=3", "--run.save_every=0")
    monkeypatch.undo()
    run("--optim.steps=3", "--run.save_every=0")
    assert folder / "last" in loadable(folder / "last")
