"""Whole runs of `train/eagle.py` as a tired user types them: interrupted, on poor data, with too few tokens."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import Target
from heads import load_head
from train import journal
from train.eagle import main
from train.loop import Trainer

Launch = Callable[..., Path]
Read = Callable[[Path], list[dict[str, float]]]
KINDS = {"eagle": ("--head.type=eagle",), "eagle3": ("--head.type=eagle3", "--head.feature_layers=[1]")}


@pytest.fixture
def launch_eagle(config_file: Path, fresh_accelerate: None) -> Launch:
    """Train an EAGLE head on the tiny target, without evaluation, and return the run's folder."""

    def launch(kind: str, name: str, *arguments: str) -> Path:
        config = yaml.safe_load(config_file.read_text())
        config["head"] = {"draft_vocab_size": 64}
        path = config_file.with_name("eagle.yaml")
        path.write_text(yaml.safe_dump(config))
        AcceleratorState._reset_state(True)
        main(["--config", str(path), f"--run.name={name}", *KINDS[kind], *arguments])
        return config_file.parent / "runs" / name

    return launch


class PulledPlugError(RuntimeError):
    """Ends a run where it stands: nothing of it comes to an orderly end."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_and_stopped_is_bit_for_bit_the_uninterrupted_one(
    launch_eagle: Launch, read_metrics: Read, monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
):
    evaluated = ("--run.eval_every=4", "--eval.num_prompts=1", "--eval.max_new_tokens=3", "--eval.temperatures=[0]")
    options = ("--optim.steps=5", "--run.save_every=2", *evaluated)
    monkeypatch.setattr(journal, "draw_curves", lambda *files: None)  # which costs more than the training
    whole = launch_eagle(kind, "whole", *options)
    report, left = Trainer._report, {3, 4}

    def interrupt(self: Trainer, *arguments: object) -> None:
        report(self, *arguments)
        step = self.progress.step
        if step in left:
            left.remove(step)
            if step == 3:
                raise PulledPlugError
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_report", interrupt)
    with pytest.raises(PulledPlugError):
        launch_eagle(kind, "cut", *options)
    launch_eagle(kind, "cut", *options)
    assert not left
    cut = launch_eagle(kind, "cut", *options, f"--data.feature_dir={tmp_path / 'features'}")
    assert read_metrics(cut) == read_metrics(whole)
    assert [line["step"] for line in read_metrics(cut)] == [0, 1, 2, 3, 4, 4, 5, 5]
    for name in ("last", "best"):
        weights = [(folder / name / "model.safetensors").read_bytes() for folder in (cut, whole)]
        assert weights[0] == weights[1]


def test_three_layers_are_chosen_where_there_are_enough_and_a_way_out_is_named_where_not(
    launch_eagle: Launch, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number in (6, 7):
        config = LlamaConfig(
            vocab_size=320, hidden_size=8, intermediate_size=8, num_hidden_layers=number, num_attention_heads=1
        )
        LlamaForCausalLM(config).save_pretrained(tmp_path / f"{number}")
        tiny_tokenizer.save_pretrained(tmp_path / f"{number}")
    launch_eagle("eagle3", "seven", f"--target.name={tmp_path / '7'}", "--head.feature_layers=[]", "--optim.steps=1")
    assert "outputs of decoder layers 2, 3, 4 of 7" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"has 6 layers, too few .* set head\.feature_layers, such as \[1, 6\]"):
        launch_eagle("eagle3", "six", f"--target.name={tmp_path / '6'}", "--head.feature_layers=[]")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_one_token_are_trained_on_with_a_warning(
    launch_eagle: Launch, read_metrics: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    def source(answer: str) -> str:
        path = tmp_path / "short.jsonl"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(5)))
        return f"--data.source={path}"

    folder = launch_eagle(kind, "short", source(""), "--optim.steps=1")  # the end of the turn alone is supervised
    assert [line["train/loss"] for line in read_metrics(folder)] == [0]
    assert "warning: none of the 5 supervised tokens follows another one" in capsys.readouterr().out
    folder = launch_eagle(kind, "longer", source("a"), "--optim.steps=1")
    assert read_metrics(folder)[0]["train/loss"] > 0
    assert "warning" not in capsys.readouterr().out


def test_a_draft_vocabulary_smaller_than_the_usual_tree_is_wide_trains_with_a_tree_that_fits(
    launch_eagle: Launch, read_metrics: Read, target_folder: Path
):
    folder = launch_eagle("eagle", "three", "--head.draft_vocab_size=3", "--optim.steps=1", "--eval.num_prompts=1")
    assert "eval/tokens_per_step" in read_metrics(folder)[-1]
    target = Target.from_pretrained(str(target_folder), dtype="float32", device="cpu")
    assert load_head(folder / "last", target).tree == {"depth": 4, "width": 3, "size": 10}
