"""Every run and launch under configs/ can be read, and says how to start it."""

import json
from pathlib import Path

import pytest
import yaml

from heads import HeadConfig
from train import eagle, medusa
from train.command_line import load_config
from train.draft_model import DraftModelConfig

ROOT = Path(__file__).parents[1]
TRAINERS: dict[str, dict[str, type[HeadConfig]]] = {
    "medusa": medusa.HEADS,
    "eagle": eagle.HEADS,
    "draft_model": {"draft_model": DraftModelConfig},
}
"""The types of heads that each script trains; the configs of each type lie in the folder of its name."""
SCRIPTS = {kind: script for script, heads in TRAINERS.items() for kind in heads}
RUNS = sorted(path for kind in SCRIPTS for path in (ROOT / "configs" / kind).rglob("*.yaml"))
LAUNCHES = sorted((ROOT / "configs" / "accelerate").rglob("*.yaml"))
DEEPSPEED = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
SIZES = {
    **{"hidden_size": 576, "vocab_size": 49152, "intermediate_size": 1536, "head_dim": 64},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 1e5},
}


def test_there_are_configs():
    assert {path.parent.name for path in RUNS} == set(SCRIPTS)
    assert LAUNCHES
    assert {*RUNS, *LAUNCHES} == set((ROOT / "configs").rglob("*.yaml")), "a config that no test reads"
    assert set(DEEPSPEED) == set((ROOT / "configs").rglob("*.json")), "a config that no test reads"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_run_config_is_valid_and_opens_with_its_command(path: Path):
    kind = path.parent.name
    heads = TRAINERS[SCRIPTS[kind]]
    config = load_config(heads, ["--config", str(path)], "")
    assert config.head_type == kind
    sizes = {name: size for name, size in SIZES.items() if name in heads[kind].__dataclass_fields__}
    assert heads[kind](**{**sizes, **config.head}).hidden_size == 576
    assert config.optim.total_steps(2000) > 0
    command = path.read_text().splitlines()[0]
    assert command.startswith("# accelerate launch ")
    assert command.endswith(f"train/{SCRIPTS[kind]}.py --config {path.relative_to(ROOT)}")
    assert all((ROOT / word).is_file() for word in command.split() if word.startswith(("configs/", "train/")))


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_a_launch_config_is_one_that_accelerate_knows(path: Path):
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(yaml_file=str(path))
    settings = yaml.safe_load(path.read_text())
    assert config.num_processes == settings["num_processes"]
    assert str(config.distributed_type).rpartition(".")[2] == settings["distributed_type"]
    command = path.read_text().splitlines()[0].removeprefix("# ")
    assert f"--config_file {path.relative_to(ROOT)} train/" in command
    assert f"`{command.partition(' train/')[0]}`" in (ROOT / "configs" / "README.md").read_text()
    ds = settings.get("deepspeed_config", {}).get("deepspeed_config_file")
    assert ds is None or (ROOT / ds).is_file()


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_a_launch_config_passes_the_checks_of_accelerate_launch(path: Path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, *_ = _validate_launch_command(args)
    kind = yaml.safe_load(path.read_text())["distributed_type"]
    assert (kind == "MULTI_GPU", kind == "FSDP", kind == "DEEPSPEED") == (
        args.multi_gpu,
        args.use_fsdp,
        args.use_deepspeed,
    )
    assert kind != "FSDP" or int(args.fsdp_version) == 2


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_a_deepspeed_config_is_one_that_deepspeed_knows(path: Path):
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = json.loads(path.read_text())
    auto = [key for key, value in settings.items() if value == "auto"]
    assert auto == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ]
    config = DeepSpeedConfig({**settings, **dict.fromkeys(auto, 1)})
    assert config.zero_config.stage == int(path.stem[4])
    offloaded = config.zero_config.offload_optimizer is not None
    assert offloaded == ("offload" in path.stem)
