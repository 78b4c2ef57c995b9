import json
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from train.checkpoints import Progress
from train.config import ConfigError
from train.journal import check_tracker, cut_metrics, git_revision


def test_metrics_are_cut_back_to_the_checkpoint_and_torn_lines_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "train/loss": 1.0} for n in range(1, 8)]
    lines[4:4] = [{"step": 4, "eval/tokens_per_step": 2.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "tra')
    cut_metrics(path, Progress(step=6, evaluated_step=4))
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:7]
    cut_metrics(path, Progress(step=4, evaluated_step=2))  # killed in the evaluation after step 4, which is made again
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:4]


def test_there_may_be_no_metrics_yet(tmp_path: Path):
    cut_metrics(tmp_path / "metrics.jsonl", Progress())
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_refused():
    check_tracker(None)
    with pytest.raises(ConfigError, match=r"no_such_tracker, which is not installed; pip install no_such_tracker"):
        check_tracker("no_such_tracker")


def test_the_revision_is_that_of_the_code():
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False)
    if head.returncode:
        assert git_revision() is None
    else:
        assert git_revision().removesuffix("-dirty") == head.stdout[:12]


def test_wandb_gets_config_and_metrics_offline(
    launch: Callable[..., Path],
    read_metrics: Callable[[Path], list[dict[str, float]]],
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = launch("--run.tracker=wandb", "--optim.steps=3", "--eval.num_prompts=2")
    written = next(folder.glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 60
    while not (found := read_wandb(written))[2] and time.monotonic() < deadline:
        time.sleep(0.1)  # the tracker's own process goes on writing behind the end of the run
    config, history, ended = found
    assert ended
    assert config["optim.lr"] == 0.01
    assert config["optim.steps"] == 3
    assert config["head.parameters"] > 0
    assert "git_revision" in config
    logged = {step: {} for step in range(1, 4)}
    for line in history:
        logged[line["_step"]].update(line)
    for line in read_metrics(folder):
        for key, value in line.items():
            if key != "step":
                assert logged[line["step"]][key] == pytest.approx(value)
    assert logged[3]["eval/tokens_per_step"] >= 1


def read_wandb(path: Path) -> tuple[dict[str, object], list[dict[str, object]], bool]:
    """Read config, history and end of an offline run: LevelDB log framing behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    def records() -> Iterator[object]:
        data, position, buffer = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            _, size, kind = struct.unpack("<IHB", data[position : position + 7])
            buffer += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                record = wandb_internal_pb2.Record()
                record.ParseFromString(buffer)
                buffer = b""
                yield record

    def values(items) -> dict[str, object]:
        return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}

    config: dict[str, object] = {}
    history = []
    ended = False
    for record in records():
        ended |= record.WhichOneof("record_type") == "exit"
        if record.WhichOneof("record_type") == "run":
            config |= values(record.run.config.update)
        elif record.WhichOneof("record_type") == "config":
            config |= values(record.config.update)
        elif record.WhichOneof("record_type") == "history":
            history.append(values(record.history.item))
    return config, history, ended
