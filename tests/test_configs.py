"""Every run under configs/ can be read, and says how to start it."""

from pathlib import Path

import pytest
import yaml

from heads import head_class
from train.command_line import load_config

ROOT = Path(__file__).parents[1]
RUNS = sorted((ROOT / "configs" / "medusa").rglob("*.yaml"))
LAUNCHES = sorted((ROOT / "configs" / "accelerate").rglob("*.yaml"))


def test_there_are_configs():
    assert len(RUNS) >= 2
    assert LAUNCHES


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_config_is_valid_and_opens_with_its_command(path: Path):
    config = load_config(head_class("medusa").Config, ["--config", str(path)], "")
    sizes = {"hidden_size": 576, "vocab_size": 49152}
    assert head_class("medusa").Config(**config.head, **sizes).hidden_size == 576
    assert config.optim.total_steps(2000) > 0
    command = path.read_text().splitlines()[0]
    assert command.startswith("# accelerate launch ")
    assert command.endswith(f"train/medusa.py --config {path.relative_to(ROOT)}")
    assert all((ROOT / word).is_file() for word in command.split() if word.startswith(("configs/", "train/")))


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_a_launch_config_is_one_that_accelerate_knows(path: Path):
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(yaml_file=str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
