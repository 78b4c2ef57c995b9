"""wandb's offline runs are read back; TensorBoard's files too."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wandb
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import WandbRun, read_ended

from train.config import ConfigError
from train.evaluate import Evaluation
from train.tracking import check_tracker

Launch = Callable[..., Path]
Read = Callable[[Path], list[dict[str, float]]]
EVALUATED = ("--eval.num_prompts=2", "--run.eval_every=4", "--eval.temperatures=[0]")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No test reaches a server, and wandb reads its environment anew in each."""
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    settings = {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path), "X_STATS_SAMPLING_INTERVAL": "0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    wandb.teardown()


def by_step(lines: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        steps.setdefault(int(line["step"]), {}).update(line)
    return {step: {key: line[key] for key in line if key != "step"} for step, line in steps.items()}


def figures(row: dict[str, object]) -> dict[str, object]:
    """What the run logged in a row of wandb, without the table and the times, which no two runs have in common."""
    left_out = ("tokens_per_second", "speedup", "speedup_low", "speedup_high")
    named = {key: value for key, value in row.items() if key.startswith(("train/", "eval/", "drift/"))}
    return {key: named[key] for key in named if not key.endswith(left_out) and not key.startswith("eval/samples")}


def assert_told_once(runs: list[WandbRun], lines: list[dict[str, float]]) -> None:
    rows = [row for run in runs for row in run.history]
    assert [row["_step"] for row in rows] == list(by_step(lines))
    assert {row["_step"]: figures(row) for row in rows} == by_step(lines)


def test_a_tracker_that_is_not_installed_is_refused():
    check_tracker(None)
    check_tracker("wandb")
    with pytest.raises(ConfigError, match=r"no_such_tracker, which is not installed; pip install no_such_tracker"):
        check_tracker("no_such_tracker")


def test_wandb_has_config_curves_system_metrics_samples_and_heads(
    launch: Launch, read_metrics: Read, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    folder = launch("--run.tracker=wandb", "--optim.steps=5", *EVALUATED)
    [run] = read_ended(folder)
    assert (run.exit_code, run.project) == (0, "mine")
    assert (run.config["optim.lr"], run.config["eval.tree"], run.config["head.num_heads"]) == (0.01, [2, 1], 2)
    assert run.config["head.parameters"] > 0
    assert "git_revision" in run.config
    assert {"proc.memory.rssMB", "proc.cpu.threads"} <= run.system
    assert_told_once([run], read_metrics(folder))
    assert [row["_step"] for row in run.history if "eval/samples._type" in row] == [0, 4, 5]
    tables = [artifact for artifact in run.artifacts if artifact.type == "run_table"]
    files = {entry.path: Path(entry.local_path) for entry in tables[-1].manifest.contents}
    table = json.loads(files["eval/samples.table.json"].read_text())
    assert "green" in table["columns"][2]
    assert len(table["data"]) == 2
    page = (folder / "samples.html").read_text()
    for prompt_set, prompt, cell, rate in table["data"]:
        assert prompt_set == "held_out"
        assert prompt.endswith("<|im_start|>assistant\n")
        shown = files[cell["path"]].read_text()
        assert shown[shown.index("<pre>") : shown.index("</pre>")] in page
        assert 1 <= rate <= 3
    best, last = (artifact for artifact in run.artifacts if artifact.type == "model")
    assert best.name == last.name == f"head-{run.run_id}"
    step = json.loads((folder / "best" / "config.json").read_text())["training"]["step"]
    for artifact, name, at in ((best, "best", step), (last, "last", 5)):
        assert name in artifact.aliases
        assert {entry.path for entry in artifact.manifest.contents} == {"config.json", "model.safetensors"}
        metadata = json.loads(artifact.metadata)
        assert metadata.pop("step") == at
        measured = by_step(read_metrics(folder))[at]
        assert figures(metadata) == {key: value for key, value in measured.items() if key.startswith("eval/")}


def test_a_run_stopped_in_an_evaluation_is_the_same_at_wandb_and_tells_every_step_once(
    launch: Launch, read_metrics: Read, config_file: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        evaluate = Evaluation.__call__

        def stop_at_the_second(self: Evaluation, give_up: Callable[[], bool]) -> object:
            if (config_file.parent / "runs" / "tiny" / "checkpoints" / "step_000004").exists():
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(self, give_up)

        patch.setattr(Evaluation, "__call__", stop_at_the_second)
        folder = launch("--run.tracker=wandb", *EVALUATED)
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3, 4]
    launch("--run.tracker=wandb", *EVALUATED)
    first, second = read_ended(folder)
    assert first.run_id == second.run_id
    # wandb takes no more for a step that it was told: the one whose evaluation is missing waits for it
    assert [row["_step"] for row in first.history] == [0, 1, 2, 3]
    assert "eval/tokens_per_step" in second.history[0]
    assert_told_once([first, second], read_metrics(folder))


@pytest.mark.timeout(200)
def test_a_killed_run_tells_wandb_every_step_once(
    start: Callable[..., "subprocess.Popen[str]"], launch: Launch, read_metrics: Read, config_file: Path
):
    arguments = ("--run.tracker=wandb", "--optim.steps=60", "--run.save_every=7")
    folder = config_file.parent / "runs" / "tiny"
    metrics = folder / "metrics.jsonl"
    process = start(*arguments)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") > 10:
            break
        time.sleep(0.005)
    process.kill()
    process.communicate()
    told = json.loads((folder / "tracker.json").read_text())["wandb"]
    assert 10 <= told["step"] < 60
    launch(*arguments)
    first, second = read_ended(folder)
    assert first.run_id == second.run_id == told["id"]
    assert first.history[-1]["_step"] == told["step"] == second.history[0]["_step"] - 1
    assert_told_once([first, second], read_metrics(folder))


def test_a_trial_of_a_sweep_keeps_the_id_that_the_agent_gave_it(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_SWEEP_ID", "sweep1")
        patch.setenv("WANDB_RUN_ID", "trial1")
        folder = launch("--run.tracker=wandb", "--optim.steps=1")
    wandb.teardown()
    assert json.loads((folder / "tracker.json").read_text()) == {"wandb": {"id": "trial1", "step": 1}}
    launch("--run.tracker=wandb", "--optim.steps=2")  # by hand
    assert [run.run_id for run in read_ended(folder)] == ["trial1", "trial1"]


def test_a_tracker_that_fails_ends_no_run_and_is_told_the_rest_when_it_continues(
    launch: Launch, read_metrics: Read, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    with monkeypatch.context() as patch:
        log = Accelerator.log

        def fail(self: Accelerator, values: dict, step: int, **options: object) -> None:
            if step == 3:
                raise ConnectionResetError(104, "Connection reset")  # as when wandb's own process has died
            log(self, values, step=step, **options)

        patch.setattr(Accelerator, "log", fail)
        folder = launch("--run.tracker=wandb", "--optim.schedule=constant", *EVALUATED)
    output = capsys.readouterr().out
    assert output.count("warning: wandb failed") == 1
    assert "run tiny is finished" in output
    wandb.teardown()  # as the end of the process does
    assert [line["step"] for line in read_metrics(folder) if "train/loss" in line] == list(range(1, 9))
    launch("--run.tracker=wandb", "--optim.schedule=constant", "--optim.steps=10", *EVALUATED)
    runs = read_ended(folder)
    assert [row["_step"] for row in runs[1].history] == list(range(3, 11))
    assert_told_once(runs, read_metrics(folder))


def test_a_run_that_ends_in_an_error_has_failed_at_wandb(launch: Launch, config_file: Path):
    with pytest.raises(SystemExit, match="state before it is saved"):
        launch("--run.tracker=wandb", "--optim.lr=1e36", "--optim.steps=50", "--optim.warmup_steps=0")
    [run] = read_ended(config_file.parent / "runs" / "tiny")
    assert run.exit_code == 1


def test_a_continued_run_believes_the_server_about_what_it_has(
    launch: Launch, read_metrics: Read, monkeypatch: pytest.MonkeyPatch
):
    folder = launch("--run.tracker=wandb", "--optim.schedule=constant", "--optim.steps=4")
    wandb.teardown()
    monkeypatch.setattr(wandb.Run, "resumed", True)  # as online; the rows of steps 3 and 4 were lost on their way
    monkeypatch.setattr(wandb.Run, "starting_step", 3)
    launch("--run.tracker=wandb", "--optim.schedule=constant", "--optim.steps=6")
    assert [row["_step"] for row in read_ended(folder)[1].history] == [3, 4, 5, 6]


def test_wandb_without_a_key_is_refused_before_the_first_step(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name, value in {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        SystemExit, match=r"error: run\.tracker=wandb: .*API key.*WANDB_MODE=offline, or --run\.tracker"
    ):
        launch("--run.tracker=wandb")


def test_tensorboard_has_every_step_once_and_what_was_logged_before_it_was_turned_on(
    launch: Launch, read_metrics: Read
):
    steps = "--optim.schedule=constant"
    launch(steps, "--optim.steps=3", *EVALUATED)
    launch(steps, "--optim.steps=5", "--run.tracker=tensorboard", *EVALUATED)
    folder = launch(steps, "--optim.steps=7", "--run.tracker=tensorboard", *EVALUATED)
    events = EventAccumulator(str(folder / "gorgon")).Reload()
    lines = read_metrics(folder)
    for name in ("train/loss", "eval/tokens_per_step"):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
    assert json.loads((folder / "tracker.json").read_text())["tensorboard"]["step"] == 7
    assert "eval.tree: '[2, 1]'" in next(folder.glob("gorgon/*/hparams.yml")).read_text()
