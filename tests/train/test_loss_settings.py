"""A head's losses as settings of a run: from YAML, the command line and run.yaml to the head's folder and back."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from heads import create_head, load_head, save_head
from heads.medusa import MedusaConfig
from train.command_line import load_config
from train.config import ConfigError, RunConfig
from train.config_file import differences, flat, read_flat, to_yaml
from train.draft_model import DraftModelConfig
from train.medusa import HEADS

SIZES = {"hidden_size": 512, "vocab_size": 320}


@pytest.fixture
def load(config_file: Path) -> Callable[..., RunConfig]:
    """Load the config with `losses` in its YAML, and arguments on top."""

    def load(losses: dict | None, *arguments: str) -> RunConfig:
        content = yaml.safe_load(config_file.read_text())
        if losses is not None:
            content["head"]["losses"] = losses
        config_file.write_text(yaml.safe_dump(content))
        return load_config(HEADS, ["--config", str(config_file), *arguments], "")

    return load


@pytest.mark.parametrize(
    ("in_yaml", "arguments", "expected"),
    [
        (None, (), {"ce": 0.2, "kl": 0.8}),
        ({"kl": 1}, (), {"kl": 1.0}),  # the YAML replaces the default
        ({"ce": 0.5, "tv": "1e-1"}, (), {"ce": 0.5, "tv": 0.1}),
        (None, ("--head.losses.ce=0.1",), {"ce": 0.1, "kl": 0.8}),  # one entry, on top of the rest
        ({"kl": 1}, ("--head.losses.reverse_kl", "2"), {"kl": 1.0, "reverse_kl": 2.0}),
        ({"tv": 1}, ('--head.losses={"kl": 1}',), {"kl": 1.0}),
    ],
)
def test_losses_come_from_yaml_and_the_command_line(load, in_yaml, arguments, expected):
    losses = load(in_yaml, *arguments).head["losses"]
    assert losses == expected
    assert all(isinstance(weight, float) for weight in losses.values())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--head.losses.ce=much", "head.losses"),
        ("--head.losses=3", "head.losses"),
        ("--head.losses=[ce]", "head.losses"),
        ("--head.losses.ce.kl=1", "unknown key 'head.losses.ce.kl'"),
        ("--head.num_heads.ce=1", "unknown key 'head.num_heads.ce'"),
        ("--optim.losses.ce=1", "unknown key 'optim.losses.ce'"),
    ],
)
def test_what_is_no_mapping_of_weights_is_refused(load, argument, message):
    with pytest.raises(ConfigError, match=message):
        load(None, argument)


@pytest.mark.parametrize("config", [MedusaConfig, DraftModelConfig])
def test_a_head_refuses_losses_that_do_not_exist(load, config):
    losses = load(None, "--head.losses.k1=1").head["losses"]
    with pytest.raises(ValueError, match="unknown loss 'k1'; known: ce, kl"):
        config(**SIZES, losses=losses)


def test_run_yaml_keeps_the_losses_and_a_run_with_others_is_another(load, tmp_path):
    config = load({"kl": 1, "ce": 0.25})
    saved = tmp_path / "run.yaml"
    saved.write_text(to_yaml(config))
    assert read_flat(saved) == flat(config)
    assert differences(read_flat(saved), flat(config)) == []
    assert load_config(HEADS, ["--config", str(saved)], "") == config
    assert differences(read_flat(saved), flat(load({"ce": 0.25, "kl": 1.0}))) == []  # in any order
    for other in ({"kl": 1, "ce": 0.5}, {"kl": 1}, {"kl": 1, "ce": 0.25, "tv": 0.1}):
        (line,) = differences(read_flat(saved), flat(load(other)))
        assert line.startswith("head.losses: {'")


def test_a_heads_folder_keeps_the_losses(tiny_target, tmp_path):
    config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=1, losses={"acceptance": 1.5, "ce": 0.1})
    save_head(create_head("medusa", config, tiny_target), tmp_path, target=tiny_target)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["losses"] == {"acceptance": 1.5, "ce": 0.1}
    assert load_head(tmp_path, tiny_target).config == config
    assert dataclasses.asdict(config)["losses"] is not config.losses
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"acceptance"', '"accept"'))
    with pytest.raises(ValueError, match=r"does not describe a medusa head: unknown loss 'accept'; known: ce, kl"):
        load_head(tmp_path, tiny_target)
