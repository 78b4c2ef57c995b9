"""Every run and launch under configs/ can be read, and says how to start it."""

import json
from pathlib import Path

import pytest
import yaml
from recipes import Recipe, recipes, shape_target, table

from data.distill import create_parser
from data.distill_config import DistillConfig
from heads import HeadConfig
from heads.layers import LayerConfig
from train import eagle, medusa
from train.command_line import load_config
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
    assert {*RUNS, *LAUNCHES} == set((ROOT / "configs").rglob("*.yaml")), "a config that no test reads"
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
