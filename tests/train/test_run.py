"""Whole runs of the command line on a tiny target: interruption, resuming, refusals."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from decode import Target
from heads import load_head, read_notes
from train.evaluate import Evaluation

Launch = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]
Read = Callable[[Path], list[dict[str, float]]]


def wait_for_lines(process: "subprocess.Popen[str]", path: Path, count: int) -> None:
    """Wait until the running `process` has written `count` lines to `path`."""
    deadline = time.monotonic() + 90
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_killed_run_and_a_stopped_run_continue_to_the_bits_of_an_uninterrupted_one(
    launch: Launch, start: Start, read_metrics: Read, config_file: Path
):
    arguments = ("--optim.steps=400", "--run.save_every=7", "--optim.accumulation=2", "--data.feature_memory=0.00001")
    whole = launch(*arguments, "--run.name=whole")
    folder = config_file.parent / "runs" / "tiny"
    metrics = folder / "metrics.jsonl"

    process = start(*arguments)
    wait_for_lines(process, metrics, 20)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 1 < len(list((folder / "checkpoints").glob("step_*"))) <= 3

    process = start(*arguments)
    wait_for_lines(process, metrics, 60)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "continuing at step" in output
    assert "of 400, which is saved; the same command continues it" in output
    stopped_at = read_metrics(folder)[-1]["step"]
    assert stopped_at < 400
    assert (folder / "checkpoints" / f"step_{stopped_at:06d}" / "state.json").is_file()

    launch(*arguments)
    assert read_metrics(folder) == read_metrics(whole)
    assert [line["step"] for line in read_metrics(whole)] == list(range(1, 401))
    for name in ("last/model.safetensors", "checkpoints/step_000400/optimizer.bin"):
        if name.endswith(".bin"):
            a, b = (torch.load(path / name, weights_only=True)["state"] for path in (folder, whole))
            assert all(torch.equal(a[i][key], b[i][key]) for i in a for key in a[i])
        else:
            assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_stopped_in_an_evaluation_makes_that_evaluation_when_it_continues(
    launch: Launch, read_metrics: Read, config_file: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = ("--eval.num_prompts=2", "--run.eval_every=4")
    whole = launch(*arguments, "--run.name=whole")
    with monkeypatch.context() as patch:
        evaluate = Evaluation.__call__

        def stop_at_the_second(self: Evaluation, give_up: Callable[[], bool]) -> object:
            if (config_file.parent / "runs" / "tiny" / "checkpoints" / "step_000004").exists():
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(self, give_up)

        patch.setattr(Evaluation, "__call__", stop_at_the_second)
        folder = launch(*arguments)
    assert read_metrics(folder) == read_metrics(whole)[:5]
    launch(*arguments)
    assert read_metrics(folder) == read_metrics(whole)
    assert [line["step"] for line in read_metrics(whole) if "eval/mismatches" in line] == [0, 4, 8]


def test_a_finished_run_says_so_and_can_be_made_longer(
    launch: Launch, read_metrics: Read, capsys: pytest.CaptureFixture[str]
):
    folder = launch("--optim.schedule=constant")
    before = (folder / "last" / "model.safetensors").read_bytes()
    capsys.readouterr()
    launch("--optim.schedule=constant")
    assert "was finished before: 8 steps" in capsys.readouterr().out
    assert (folder / "last" / "model.safetensors").read_bytes() == before
    launch("--optim.schedule=constant", "--optim.steps=12", "--run.keep=1", "--run.log_every=2")
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    whole = launch("--optim.schedule=constant", "--optim.steps=12", "--run.name=whole")
    assert (folder / "last" / "model.safetensors").read_bytes() == (whole / "last" / "model.safetensors").read_bytes()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000012"]


def test_training_lowers_the_loss_and_both_heads_load_on_their_target(
    launch: Launch, read_metrics: Read, target_folder: Path
):
    folder = launch("--optim.epochs=20", "--optim.steps=null", "--eval.num_prompts=3", "--run.eval_every=20")
    lines = read_metrics(folder)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 55  # 20 x 11 conversations / 4
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    evaluations = {line["step"]: line["eval/tokens_per_step"] for line in lines if "eval/tokens_per_step" in line}
    assert list(evaluations) == [0, 20, 40, 55]
    assert all(line["eval/mismatches"] == 0 for line in lines if "eval/mismatches" in line)
    target = Target.from_pretrained(str(target_folder), dtype="float32", device="cpu")
    for name, step in (("last", 55), ("best", max(evaluations, key=lambda step: (evaluations[step], step)))):
        head = load_head(folder / name, target)
        assert torch.equal(head.vocabulary, head.vocabulary.sort().values)
        notes = read_notes(folder / name)
        assert notes.training["step"] == step
        assert notes.measured["tokens_per_step"] == evaluations[step]
    assert not any("embed" in name for name in torch.load(
        folder / "checkpoints" / "step_000055" / "optimizer.bin", weights_only=True
    ))  # fmt: skip


def test_a_run_with_another_config_is_refused_with_the_differences_and_nothing_changes(launch: Launch):
    folder = launch()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as refusal:
        launch("--optim.lr=0.5", "--head.num_heads=3")
    message = str(refusal.value)
    assert "optim.lr: 0.01 -> 0.5" in message
    assert "head.num_heads: 2 -> 3" in message
    assert "--run.name" in message
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_whose_data_changed_is_refused(launch: Launch, config_file: Path, data_file: Path):
    copy = config_file.with_name("copy.jsonl")
    copy.write_text(data_file.read_text())
    launch(f"--data.source={copy}")
    copy.write_text(data_file.read_text().replace("one two", "two one"))
    with pytest.raises(SystemExit, match=r"(?s)data of .*changed since.*--run\.name"):
        launch(f"--data.source={copy}", "--optim.steps=9")


def test_a_loss_that_is_not_finite_stops_the_run_and_loses_nothing(launch: Launch, config_file: Path):
    with pytest.raises(SystemExit, match=r"step \d+: .*state before it is saved"):
        launch("--optim.lr=1e36", "--optim.steps=50", "--optim.warmup_steps=0", "--run.save_every=0")
    folder = config_file.parent / "runs" / "tiny"
    checkpoint = max((folder / "checkpoints").glob("step_*"))
    step = json.loads((checkpoint / "state.json").read_text())["step"]
    assert (folder / f"not_finite_step_{step + 1}_process_0.safetensors").exists()
    assert f"{checkpoint.name}" == f"step_{step:06d}"


def test_a_folder_that_cannot_be_written_is_refused_before_the_target_loads(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Target, "from_pretrained", lambda *a, **b: pytest.fail("the target was loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SystemExit, match=r"run\.dir: .*Not a directory: .*file/tiny.*choose another --run\.dir or --run\.name"
    ):
        launch(f"--run.dir={tmp_path / 'file'}")


def test_files_that_cannot_be_used_are_named_by_their_key_with_a_way_out(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"error: data\.source: .*/empty .*; give a file"):
        launch(f"--data.source={tmp_path / 'empty'}")
    folder = launch("--optim.steps=1")

    def fail(self: Accelerator, *arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", fail)
        with pytest.raises(SystemExit, match=r"error: run\.dir: .*No space left.*; make room there, and the same"):
            launch("--optim.steps=2")
    (folder / "checkpoints" / "step_000001" / "state.json").unlink()
    with pytest.raises(
        SystemExit, match=r"error: cannot continue from .*step_000001: .*state\.json.*; if it is damaged, delete it"
    ):
        launch("--optim.steps=2")
    (folder / "run.yaml").unlink()
    with pytest.raises(SystemExit, match=r"error: run\.dir: .*run\.yaml.*; choose another --run\.dir or"):
        launch("--optim.steps=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data.max_length=4096",), r"max_length is 4096, but .* was made for 128"),
        (("--eval.num_prompts=14",), r"14 conversations, and eval.num_prompts=14 .* nothing is left"),
        (("--eval.num_prompts=2", "--eval.max_new_tokens=120"), r"evaluation prompt 8 has \d+ tokens"),
        (("--eval.prompts=[a/t1.jsonl]",), r"none of chain, accept_rate, drift or t<number>.*\['t1'\]: rename a file"),
        (("--eval.prompts=[a/drift.jsonl]",), r"names of their own, and none of .*\['drift'\]: rename a file"),
        (("--eval.prompts=[a/b.jsonl,c/b.jsonl]",), r"need names of their own.*\['b', 'b'\]"),
        (("--eval.temperatures=[0.5,1]",), r"eval.temperatures needs 0, .* got \[0.5, 1.0\]"),
        (("--data.eval_prompts=a.jsonl",), r"unknown key 'data.eval_prompts'"),
        (("--eval.num_prompts=2", "--eval.prompts=[no.jsonl]"), r"eval\.prompts: .*'no\.jsonl'; give files that can"),
        (("--data.source=nothing.jsonl",), r"nothing\.jsonl: no such file"),
        (("--head.draft_vocab_size=999",), r"draft_vocab_size must be between 1 and the target's 320, got 999"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(launch: Launch, arguments: tuple[str, ...], message: str):
    with pytest.raises(SystemExit, match=message):
        launch(*arguments)


def test_held_out_conversations_are_not_trained_on(launch: Launch, capsys: pytest.CaptureFixture[str]):
    launch("--eval.num_prompts=3", "--optim.steps=1")
    assert "data: 11 conversations" in (output := capsys.readouterr().out)
    assert "evaluation: 3 prompts of held_out" in output


def test_each_file_of_prompts_is_a_set_with_figures_of_its_own(
    launch: Launch, capsys: pytest.CaptureFixture[str], data_file: Path, tmp_path: Path
):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "the cat"}\n{"turns": ["one two", "three"]}\n')
    folder = launch("--eval.num_prompts=3", f"--eval.prompts=[{data_file},{questions}]", "--optim.steps=1")
    output = capsys.readouterr().out
    assert "data: 14 conversations" in output
    assert "evaluation: 3 prompts of conversations, 2 prompts of questions" in output
    assert re.search(
        r"step 1: \d\.\d+ tokens per step \(\d\.\d+ to \d\.\d+\), \d\.\d+ at T = 1; .* 0 mismatches", output
    )
    measured = read_notes(folder / "last").measured
    for prefix in ("", "chain/", "t1/", "conversations/", "questions/chain/", "questions/t1/"):
        low, value, high = (measured[f"{prefix}tokens_per_step{end}"] for end in ("_low", "", "_high"))
        assert 1 <= low <= value <= high
    assert read_notes(folder / "best").measured == measured


def test_a_run_in_progress_is_not_started_twice(launch: Launch):
    folder = launch("--optim.steps=1")
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another process is training"):
            launch("--optim.steps=2")


def test_a_precision_given_to_the_launcher_is_not_silently_dropped(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(SystemExit, match="launched with mixed precision bf16, but precision is float32"):
        launch("--optim.steps=1")


@pytest.mark.parametrize("name", ["no/such-model", "missing-folder"])
def test_a_target_that_is_not_there_is_an_error_without_a_traceback(launch: Launch, name: str):
    with pytest.raises(SystemExit, match=rf"(?s)error: target\.name={name}: .*; name a folder or"):
        launch(f"--target.name={name}")


def test_bf16_trains_close_to_float32(launch: Launch, read_metrics: Read):
    exact = read_metrics(launch("--run.name=exact"))
    rounded = read_metrics(launch("--run.name=rounded", "--precision=bf16"))
    assert [line["train/loss"] for line in rounded] == pytest.approx([line["train/loss"] for line in exact], rel=2e-2)
    assert rounded != exact


@pytest.mark.timeout(120)
def test_two_processes_make_the_steps_of_one(launch: Launch, start: Start, read_metrics: Read, config_file: Path):
    alone = launch("--run.name=one", "--eval.num_prompts=3")
    one = read_metrics(alone)
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    options = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
    process = start(
        *("--optim.accumulation=2", "--eval.num_prompts=3", "--run.tracker=tensorboard"),
        launcher=(*accelerate, *options),
        ACCELERATE_USE_CPU="true",
    )
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.count("run tiny is finished") == output.count("sample of held_out") == 1  # the main process speaks
    folder = config_file.parent / "runs" / "tiny"
    assert len(list(folder.glob("gorgon/events*"))) == 1  # and it alone tells the tracker
    pages = [(path / "samples.html").read_text() for path in (folder, alone)]
    prompts = [re.findall(r"<summary>prompt</summary>(.*?)</details>", page) for page in pages]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 3
    two = read_metrics(folder)
    assert len(one) == len(two) == 9
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
