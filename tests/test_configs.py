"""Every run under configs/ can be read, and says how to start it."""

from pathlib import Path

import pytest
import yaml

from heads import HeadConfig, head_class
from train.command_line import load_config
from train.draft_model import DraftModelConfig

ROOT = Path(__file__).parents[1]
TRAINERS: dict[str, type[HeadConfig]] = {"medusa": head_class("medusa").Config, "draft_model": DraftModelConfig}
RUNS = sorted(path for kind in TRAINERS for path in (ROOT / "configs" / kind).rglob("*.yaml"))
LAUNCHES = sorted((ROOT / "configs" / "accelerate").rglob("*.yaml"))


def test_there_are_configs():
    assert {path.parent.name for path in RUNS} == set(TRAINERS)
    assert LAUNCHES
    assert {*RUNS, *LAUNCHES} == set((ROOT / "configs").rglob("*.yaml")), "a config that no test reads"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_run_config_is_valid_and_opens_with_its_command(path: Path):
    kind = path.parent.name
    config = load_config(TRAINERS[kind], ["--config", str(path)], "")
    sizes = {"hidden_size": 576, "vocab_size": 49152}
    assert TRAINERS[kind](**config.head, **sizes).hidden_size == 576
    assert config.optim.total_steps(2000) > 0
    command = path.read_text().splitlines()[0]
    assert command.startswith("# accelerate launch ")
    assert command.endswith(f"train/{kind}.py --config {path.relative_to(ROOT)}")
    assert all((ROOT / word).is_file() for word in command.split() if word.startswith(("configs/", "train/")))


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_a_launch_config_is_one_that_accelerate_knows(path: Path):
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(yaml_file=str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
