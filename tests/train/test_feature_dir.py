"""Runs that train on features from a folder make the steps of runs that compute them, and share the folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.state import AcceleratorState

from data import feature_files
from decode import Target
from train.eagle import main

Launch = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]
Read = Callable[[Path], list[dict[str, float]]]


@pytest.fixture
def launch_eagle(config_file: Path, fresh_accelerate: None) -> Launch:
    """Train an EAGLE-3 head on the data of `launch`."""

    def launch(name: str, *arguments: str) -> Path:
        config = yaml.safe_load(config_file.read_text())
        config["head"] = {"type": "eagle3", "feature_layers": [1], "draft_vocab_size": 64}
        path = config_file.with_name("eagle.yaml")
        path.write_text(yaml.safe_dump(config))
        AcceleratorState._reset_state(True)
        main(["--config", str(path), f"--run.name={name}", *arguments])
        return config_file.parent / "runs" / name

    return launch


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def test_the_steps_are_those_of_features_made_while_training_to_the_bit(
    launch: Launch, read_metrics: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    online = launch("--run.name=online", "--optim.steps=6")
    capsys.readouterr()
    stored = launch("--run.name=stored", "--optim.steps=6", f"--data.feature_dir={tmp_path / 'features'}")
    output = capsys.readouterr().out
    assert output.index("in 1 files") < output.index("read from")
    assert len(files(tmp_path / "features")) == 1
    assert len(read_metrics(stored)) == 6
    assert read_metrics(stored) == read_metrics(online)
    weights = [(folder / "last" / "model.safetensors").read_bytes() for folder in (stored, online)]
    assert weights[0] == weights[1]


def test_a_run_may_go_on_with_a_folder_and_without(launch: Launch, read_metrics: Read, tmp_path: Path):
    whole = launch("--run.name=whole", "--optim.schedule=constant", "--optim.steps=3")
    launch("--optim.schedule=constant", "--optim.steps=1")
    launch("--optim.schedule=constant", "--optim.steps=2", f"--data.feature_dir={tmp_path / 'features'}")
    folder = launch("--optim.schedule=constant", "--optim.steps=3")
    assert read_metrics(folder) == read_metrics(whole)


def test_heads_share_a_folder_if_its_layers_are_enough(
    launch: Launch, launch_eagle: Launch, read_metrics: Read, tmp_path: Path
):
    place = f"--data.feature_dir={tmp_path / 'features'}"
    online = read_metrics(launch_eagle("online", "--optim.steps=2"))
    assert read_metrics(launch_eagle("stored", "--optim.steps=2", place)) == online
    before = files(tmp_path / "features")
    medusa = read_metrics(launch("--run.name=medusa", "--optim.steps=2"))
    assert read_metrics(launch("--run.name=stored-medusa", "--optim.steps=2", place)) == medusa
    assert files(tmp_path / "features") == before
    few = f"--data.feature_dir={tmp_path / 'few'}"
    launch("--run.name=hidden-only", "--optim.steps=1", few)
    with pytest.raises(SystemExit, match=r"(?s)few is for other features.*layers: has \[\], the head reads \[1\]"):
        launch_eagle("more", few)


def test_other_data_are_refused_and_nothing_is_lost(launch: Launch, tmp_path: Path):
    place = f"--data.feature_dir={tmp_path / 'features'}"
    launch(place, "--optim.steps=1")
    before = files(tmp_path / "features")
    with pytest.raises(SystemExit, match=r"(?s)is for other features.*conversations: .*data\.limit.*Choose another"):
        launch("--run.name=fewer", place, "--data.limit=9")
    with pytest.raises(SystemExit, match=r"(?s)\(data\.feature_dtype\): float32 -> bfloat16"):
        launch("--run.name=rounded", place, "--data.feature_dtype=bfloat16")
    assert files(tmp_path / "features") == before


def test_a_tree_that_cannot_be_drafted_is_refused_before_the_folder_is_filled(launch: Launch, tmp_path: Path):
    place = f"--data.feature_dir={tmp_path / 'features'}"
    with pytest.raises(SystemExit, match=r"400 children, but .* 320 tokens; raise .*, or lower eval\.tree$"):
        launch(place, "--head.draft_vocab_size=null", "--eval.tree=[400]", "--eval.num_prompts=1")
    assert not (tmp_path / "features").exists()


def test_rounded_features_train_close_to_exact_ones(launch: Launch, read_metrics: Read, tmp_path: Path):
    exact = read_metrics(launch("--run.name=exact"))
    place = f"--data.feature_dir={tmp_path / 'features'}"
    rounded = read_metrics(launch("--run.name=rounded", place, "--data.feature_dtype=bfloat16"))
    assert [line["train/loss"] for line in rounded] == pytest.approx([line["train/loss"] for line in exact], rel=2e-2)
    assert rounded != exact
    with pytest.raises(SystemExit, match=r"data\.feature_dtype=bfloat16 is the number format of a folder"):
        launch("--run.name=nowhere", "--data.feature_dtype=bfloat16")


def test_an_interrupted_fill_goes_on_with_the_same_command(
    launch: Launch, read_metrics: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(feature_files, "FILE_CONVERSATIONS", 3)
    place = f"--data.feature_dir={tmp_path / 'features'}"
    encode, left = Target.encode_features, iter(range(5 + 7))

    def encode_and_interrupt(self, *arguments):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return encode(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "encode_features", encode_and_interrupt)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            launch(place)
        signal.signal(signal.SIGINT, handler)
    before = files(tmp_path / "features")
    assert len(before) == 2
    folder = launch(place)
    assert len(files(tmp_path / "features")) == 5
    assert before.items() <= files(tmp_path / "features").items()
    assert read_metrics(folder) == read_metrics(launch("--run.name=online"))


@pytest.mark.timeout(120)
def test_two_processes_fill_a_folder_together(
    launch: Launch, start: Start, read_metrics: Read, config_file: Path, tmp_path: Path
):
    script = tmp_path / "few_a_file.py"
    script.write_text(
        "from data import feature_files\nfeature_files.FILE_CONVERSATIONS = 3\nfrom train.medusa import main\nmain()\n"
    )
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    options = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
    place = f"--data.feature_dir={tmp_path / 'features'}"
    process = start(
        "--optim.steps=3", place, launcher=(*accelerate, *options), script=script, ACCELERATE_USE_CPU="true"
    )
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.count("free; about") == output.count("in 5 files, float32") == 1  # only the main process speaks
    one = read_metrics(launch("--run.name=one", "--optim.steps=3"))
    two = read_metrics(config_file.parent / "runs" / "tiny")
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    before = files(tmp_path / "features")
    assert len(before) == 5
    again = read_metrics(launch("--run.name=again", "--optim.steps=3", place))  # one process finds them all whole
    assert again == one
    assert files(tmp_path / "features") == before
