"""Every run and launch under configs/ can be read, and says how to start it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipes import Recipe, recipes, shape_target, table
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from data.distill import create_parser
from data.distill_config import DistillConfig
from heads import HeadConfig
from heads.layers import LayerConfig
from train import eagle, medusa
from train.command_line import load_config
from train.config_file import flat
from train.draft_model import DraftModelConfig
from train.new_head import target_sizes

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
SWEEPS = sorted((ROOT / "configs" / "sweeps").rglob("*.yaml"))
DEEPSPEED = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
RECIPES = list(recipes())
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-1.7b": 1_711_376_384,
    "qwen3-4b": 4_022_468_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
}
"""Of the targets, as published; tied weights count once."""


def test_there_are_configs():
    assert {path.parent.name for path in RUNS} == set(SCRIPTS)
    assert LAUNCHES
    assert SWEEPS
    assert {*RUNS, *LAUNCHES, *SWEEPS} == set((ROOT / "configs").rglob("*.yaml")), "a config that no test reads"
    assert set(DEEPSPEED) == set((ROOT / "configs").rglob("*.json")), "a config that no test reads"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_run_config_is_valid_and_opens_with_its_command(path: Path):
    kind = path.parent.name
    heads = TRAINERS[SCRIPTS[kind]]
    config = load_config(heads, ["--config", str(path)], "")
    assert config.head_type == kind
    target = shape_target("smollm2-135m" if path.stem == "quickstart" else path.stem)
    assert heads[kind](**{**target_sizes(target, heads[kind]), **config.head}).hidden_size == target.hidden_size
    assert config.optim.total_steps(2000) > 0
    command = path.read_text().splitlines()[0]
    assert command.startswith("# accelerate launch ")
    assert command.endswith(f"train/{SCRIPTS[kind]}.py --config {path.relative_to(ROOT)}")
    assert all((ROOT / word).is_file() for word in command.split() if word.startswith(("configs/", "train/")))


def test_the_shapes_of_targets_give_the_published_numbers_of_parameters():
    shapes = {name: shape_target(name).model for name in PARAMETERS}
    assert {name: sum(p.numel() for p in model.parameters()) for name, model in shapes.items()} == PARAMETERS
    assert {recipe.path.stem for recipe in RECIPES} == set(PARAMETERS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.path.parent.name}-{recipe.path.stem}")
def test_a_recipe_fits_its_target_and_says_what_it_takes(recipe: Recipe):
    config, head, shape = recipe.config, recipe.head, recipe.target.model.config
    assert all(parameter.is_meta for parameter in head.parameters())
    lines = recipe.path.read_text().splitlines()
    assert lines[lines.index(recipe.numbers()[0]) :][:3] == recipe.numbers()
    recipe.target.check_layers(head.feature_layers)
    assert len(head.lent_weight()) == config.head["draft_vocab_size"] or config.head["draft_vocab_size"] is None
    if isinstance(head.config, LayerConfig):
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps"):
            assert vars(head.config)[name] == shape.to_dict()[name], name
        assert head.config.rope_theta == shape.rope_parameters["rope_theta"]
    assert config.data.max_length <= recipe.target.max_length
    assert config.optim.warmup_steps < recipe.steps
    assert config.run.eval_every < recipe.steps


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.path.parent.name}-{recipe.path.stem}")
def test_a_recipe_names_the_command_that_makes_its_data(recipe: Recipe):
    header = " ".join(
        line[1:].removesuffix("\\") for line in recipe.path.read_text().split("\ntarget:")[0].splitlines()
    )
    words = header.partition("python -m data.distill ")[2].split()
    asked = words[: words.index("--out") + 2]
    options = DistillConfig(**vars(create_parser().parse_args(asked)))
    assert (options.target, str(options.out)) == (recipe.config.target.name, recipe.config.data.source)
    assert options.max_new_tokens < recipe.config.data.max_length


def test_the_table_of_recipes_is_what_its_command_prints():
    assert f"\n{table()}\n" in (ROOT / "configs" / "README.md").read_text()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_trials_of_a_sweep_are_runs_of_their_own(path: Path, tmp_path: Path):
    """As wandb's agent does it: the command is filled in for each trial, whose id is in the environment."""
    sweep = yaml.safe_load(path.read_text())
    first, second = path.read_text().splitlines()[:2]
    assert first.startswith(f"# wandb sweep --project gorgon {path.relative_to(ROOT)} ")
    assert second.startswith("# wandb agent SWEEP ")
    program = tmp_path / "accelerate"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    runs = []
    for number in range(2):
        settings = {name: {"value": a_value(choice, number)} for name, choice in sweep["parameters"].items()}
        filled = {"args": create_sweep_command_args({"args": settings})["args"], "program": [sweep["program"]]}
        command = [
            word for chunk in create_sweep_command(sweep["command"]) for word in filled.get(chunk.strip("${}"), [chunk])
        ]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WANDB_RUN_ID": f"id{number}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        launch, script, *words = done.stdout.splitlines()
        assert (launch, script) == ("launch", sweep["program"])
        config = load_config(TRAINERS[Path(script).stem], words, "")
        assert (config.run.name, config.run.tracker) == (f"sweep-id{number}", "wandb")
        for name, setting in settings.items():
            assert flat(config)[name] == setting["value"]
        runs.append(config)
    assert runs[0].run.folder != runs[1].run.folder
    assert sweep["metric"] == {"name": "eval/tokens_per_step", "goal": "maximize"}  # what best/ is chosen by


def a_value(choice: dict[str, Any], number: int) -> Any:
    """Return one of two values that a trial may have."""
    if "value" in choice:
        return choice["value"]
    return choice["values"][number] if "values" in choice else choice[("min", "max")[number]]


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
