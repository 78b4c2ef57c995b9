import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from heads.hydra import HydraConfig
from heads.medusa import MedusaConfig
from train.command_line import load_config
from train.config import ConfigError, OptimConfig, RunConfig, RunPlan
from train.config_file import differences, flat, read_flat, to_yaml
from train.draft_model import main as train_draft_model
from train.eagle import main as train_eagle
from train.medusa import main as train_medusa

HEADS = {"medusa": MedusaConfig, "hydra": HydraConfig}


def load(*argv: str) -> RunConfig:
    return load_config(HEADS, argv, "help text")


def test_command_line_wins_over_yaml_and_yaml_over_defaults(config_file: Path):
    config = load("--config", str(config_file), "--optim.lr=5e-4", "--head.num_heads", "3", "--run.tracker=null")
    assert config.optim.lr == 5e-4
    assert config.head["num_heads"] == 3
    assert config.head["num_layers"] == MedusaConfig(hidden_size=1, vocab_size=1).num_layers
    assert config.optim.steps == 8
    assert config.run.tracker is None


def test_a_number_without_a_decimal_point_in_yaml_is_a_float(config_file: Path):
    config_file.write_text(config_file.read_text().replace("lr: 0.01", "lr: 1e-3"))
    assert yaml.safe_load(config_file.read_text())["optim"]["lr"] == "1e-3"  # what PyYAML makes of it
    assert load("--config", str(config_file)).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.lrr", "optim.lr"),
        ("optim.learning_rate", "optim."),
        ("head.num_head", "head.num_heads"),
        ("lr", "optim.lr"),
        ("optimizer.lr", "optim.lr"),
        ("head.hidden_size", "head."),
    ],
)
@pytest.mark.parametrize("place", ["yaml", "command line"])
def test_an_unknown_key_is_refused_with_the_nearest_and_the_valid_ones(
    config_file: Path, key: str, nearest: str, place: str
):
    arguments = ["--config", str(config_file)]
    if place == "yaml":
        content = yaml.safe_load(config_file.read_text())
        section, _, name = key.rpartition(".")
        (content.setdefault(section, {}) if section else content)[name] = 3
        config_file.write_text(yaml.safe_dump(content))
    else:
        arguments.append(f"--{key}=3")
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'.*did you mean '{nearest}.*Valid here: \w+"):
        load(*arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--optim.lr=fast", "optim.lr"),
        ("--optim.lr=0", "optim.lr must be above 0"),
        ("--optim.schedule=linear", "cosine"),
        ("--optim.epochs=2", "exactly one of optim.steps and optim.epochs"),
        ("--optim.accumulation=3", r"multiple of optim.accumulation \(3\)"),
        ("--run.name=a/b", "one folder name"),
        ("--precision=fp16", "bf16"),
        ("--eval.tree=[2,0]", "eval.tree"),
        ("--head.num_heads=two", "head.num_heads"),
        # what decoding would refuse, after the first steps
        ("--eval.temperatures=[0,1e-9]", r"eval\.temperatures must be .*1e-06 or more.*got 1e-09"),
        ("--eval.temperatures=[0,-1]", r"eval\.temperatures must be at least 0"),
        ("--eval.temperatures=[0,.inf]", r"eval\.temperatures must be .*finite, got inf"),
        ("--eval.temperatures=[0,.nan]", r"eval\.temperatures must be .*got nan"),
        ("--data.feature_dir=", r"data\.feature_dir is empty"),  # as an unset variable of the shell leaves it
    ],
)
def test_a_wrong_value_is_refused_by_name(config_file: Path, argument: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load("--config", str(config_file), argument)


@pytest.mark.parametrize("missing", ["target", "data", "run"])
def test_target_data_and_run_name_have_no_default(config_file: Path, missing: str):
    content = yaml.safe_load(config_file.read_text())
    del content[missing]
    config_file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=f"required: {missing}"):
        load("--config", str(config_file))


def test_a_missing_or_broken_config_file_is_named(config_file: Path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load("--config", str(config_file.with_name("nothing.yaml")))
    for broken in (b"optim: [1,", b"optim: \xff\xfe"):
        config_file.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"tiny\.yaml is not valid YAML"):
            load("--config", str(config_file))


@pytest.mark.parametrize("main", [train_eagle, train_medusa, train_draft_model])
def test_a_command_without_arguments_says_what_is_missing(main: Callable[[Sequence[str]], None]):
    with pytest.raises(SystemExit, match=r"--config FILE, such as .* or at least --target\.name, .*see --help"):
        main([])
    with pytest.raises(SystemExit, match=r"required: data\.source, run\.name \(see --help"):
        main(["--target.name=t"])


def test_the_resolved_config_reads_back_as_the_same_run(config_file: Path, tmp_path: Path):
    config = load("--config", str(config_file), "--optim.betas=[0.8,0.95]")
    saved = tmp_path / "run.yaml"
    saved.write_text(to_yaml(config))
    assert load("--config", str(saved)) == config
    assert read_flat(saved) == flat(config)


def test_the_head_type_chooses_the_keys_of_its_section(config_file: Path):
    assert load("--config", str(config_file)).head_type == "medusa"
    content = yaml.safe_load(config_file.read_text())
    content["head"] |= {"type": "hydra", "prefix_layer": True}
    config_file.write_text(yaml.safe_dump(content))
    config = load("--config", str(config_file))
    assert (config.head_type, config.head["prefix_layer"]) == ("hydra", True)
    assert "type" not in config.head
    assert flat(config)["head.type"] == "hydra"
    # the command line wins, and with it the other head's keys
    with pytest.raises(ConfigError, match=r"unknown key 'head.prefix_layer' in .*Valid here: .*head.own_lm_head"):
        load("--config", str(config_file), "--head.type=medusa")
    del content["head"]["prefix_layer"]
    config_file.write_text(yaml.safe_dump(content))
    for words in (("--head.type=medusa",), ("--head.type", "medusa")):
        assert load("--config", str(config_file), *words).head_type == "medusa"
    with pytest.raises(ConfigError, match=r"unknown key 'head.own_lm_head' on the command line"):
        load("--config", str(config_file), "--head.own_lm_head=true")


@pytest.mark.parametrize("given", ["hydro", "", "null", "3", "draft_model"])
@pytest.mark.parametrize("place", ["yaml", "command line"])
def test_an_unknown_head_type_is_refused_with_the_known_ones(config_file: Path, given: str, place: str):
    arguments = ["--config", str(config_file)]
    if place == "yaml":
        content = yaml.safe_load(config_file.read_text())
        content["head"]["type"] = yaml.safe_load(given)
        config_file.write_text(yaml.safe_dump(content))
    else:
        arguments.append(f"--head.type={given}")
    where = r"in .*tiny\.yaml" if place == "yaml" else "on the command line"
    with pytest.raises(ConfigError, match=rf"unknown head.type .* {where}.*Trained here: medusa, hydra$"):
        load(*arguments)


def test_a_head_type_in_a_whole_section_is_refused_unless_it_is_the_known_one(config_file: Path):
    with pytest.raises(ConfigError, match=r"give it as --head\.type=hydra"):
        load("--config", str(config_file), '--head={"type": "hydra"}')
    with pytest.raises(ConfigError, match=r"head\.type is 'hydro' .*Trained here: medusa, hydra$"):
        load("--config", str(config_file), '--head={"type": "hydro"}')
    assert load("--config", str(config_file), '--head={"type": "medusa"}').head_type == "medusa"


def test_another_head_type_is_another_run(config_file: Path):
    runs = [flat(load("--config", str(config_file), f"--head.type={kind}")) for kind in HEADS]
    assert "head.type: 'medusa' -> 'hydra'" in differences(*runs)


def test_losses_are_given_as_a_mapping(config_file: Path, tmp_path: Path):
    config = load("--config", str(config_file), '--head.losses={"kl": 1}')
    assert config.head["losses"] == {"kl": 1.0}
    saved = tmp_path / "run.yaml"
    saved.write_text(to_yaml(config))
    assert load("--config", str(saved)) == config
    assert read_flat(saved) == flat(config)


MINIMAL = ("--target.name=t", "--data.source=d", "--run.name=r", "--optim.steps=1")


@pytest.mark.parametrize("kind", HEADS)
def test_help_explains_every_key(capsys: pytest.CaptureFixture[str], kind: str):
    with pytest.raises(SystemExit) as exit_:
        load(f"--head.type={kind}", "--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "medusa, hydra" in text
    for key in flat(load(*MINIMAL, f"--head.type={kind}")):
        explained = re.search(rf"^  --{re.escape(key)} .*?(?=^  --|\Z)", text, re.MULTILINE | re.DOTALL)
        assert explained, key
        assert re.search(r"[a-z]{2,} [a-z]{2,}", explained.group().partition("(")[0]), f"{key} has no help"


def test_every_field_of_the_config_is_used():
    package = Path(__file__).parents[2] / "train"
    code = "".join(path.read_text() for path in package.glob("*.py") if path.name != "config.py")
    code += inspect.getsource(RunPlan.folder.fget) + inspect.getsource(OptimConfig.total_steps)
    for key in flat(load(*MINIMAL)):
        section, _, name = key.rpartition(".")
        if section != "head":  # tested with the head
            assert re.search(rf"\b(?:config|{section or 'config'}|self)\.{name}\b", code), f"{key} is read nowhere"
