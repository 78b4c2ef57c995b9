import json
import subprocess
from pathlib import Path

from train.checkpoints import Progress
from train.journal import cut_metrics, git_revision


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


def test_the_revision_is_that_of_the_code():
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False)
    if head.returncode:
        assert git_revision() is None
    else:
        assert git_revision().removesuffix("-dirty") == head.stdout[:12]
