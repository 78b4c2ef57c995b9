"""From YAML and the command line to a `RunConfig`.

jsonargparse (the library litgpt uses) reads the YAML, applies `--section.key=value` on top and checks the types; it
reads `1e-3` as a number, which PyYAML does not. Unknown keys are found here first, because its message does not name
the nearest valid key.

The key `head.type` chooses which head's config is the schema of the `head` section, so it is looked up before the rest.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from heads.base import HeadConfig
from train.config import SECTIONS, ConfigError, RunConfig, TargetConfig, naming, require
from train.config_file import flatten

PLAN, THROUGHPUT = "--plan", "--throughput"
"""On the command line: print what the run takes, or how fast its steps are, and make none. Not keys of a config."""


def load_config(heads: Mapping[str, type[HeadConfig]], argv: Sequence[str], description: str) -> RunConfig:
    """Return the run that `argv` (`--config FILE` and `--section.key=value`) asks for; `--help` prints and exits.

    Args:
        heads: Config of each type of head that can be trained, the default first.
        argv: Command line, without the program.
        description: What `--help` says above the keys.

    Raises:
        ConfigError: If a key is unknown, a value has the wrong type or makes no sense, or a required one is missing.
    """
    require(
        bool(argv),
        "nothing says what to train: give --config FILE, such as one of configs/, or at least --target.name, "
        "--data.source, --run.name and --optim.steps; see --help",
    )
    kind = _head_type(heads, argv)
    head = heads[kind]
    parser = _parser(heads, kind, description)
    known = sorted(_known_keys(head))
    for key in _keys_on_command_line(argv):
        is_entry = key.rpartition(".")[0] in _mapping_keys(head)
        if not is_entry and key not in ("config", "help", "print_config", *SECTIONS, "head"):
            _check_key(key, known, "on the command line")
    for path in _config_files(argv):
        for key, _ in _yaml_items(path):
            _check_key(key, known, f"in {path}")
    try:
        values = parser.parse_args(list(argv))
    except ArgumentError as error:
        raise ConfigError(f"{error} (see --help)") from error
    sections = {name: section(**values[name].as_dict()) for name, section in SECTIONS.items()}
    fields = values["head"].as_dict()
    parsed = fields.pop("type")
    require(
        parsed == kind,
        f"head.type is {parsed!r} somewhere in a --head=...; give it as --head.type={parsed}. "
        f"Trained here: {', '.join(heads)}",
    )
    return RunConfig(head_type=kind, head=fields, precision=values["precision"], **sections)


def _head_type(heads: Mapping[str, type[HeadConfig]], argv: Sequence[str]) -> str:
    """Return the type of head that the command line or else the YAML asks for, by default the first."""
    kind: object = next(iter(heads))
    where = ""
    for path in _config_files(argv):
        content = dict(_yaml_items(path))
        if "head.type" in content:
            kind, where = content["head.type"], f" in {path}"
    for word, following in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name == "--head.type":
            kind, where = (value if equals else following), " on the command line"
    if not isinstance(kind, str) or kind not in heads:
        near = difflib.get_close_matches(str(kind), heads, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown head.type {kind!r}{where}{hint} Trained here: {', '.join(heads)}")
    return kind


def _parser(heads: Mapping[str, type[HeadConfig]], kind: str, description: str) -> ArgumentParser:
    head = heads[kind]
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # argparse would put every one of the keys into the usage line
    usage = (
        f"accelerate launch {sys.argv[0]} --config FILE [--section.key=VALUE ...]\n"
        f"  {PLAN}: only say what the run takes   {THROUGHPUT}: only time its steps, beside the target's forward alone"
    )
    parser = ArgumentParser(description=description, usage=usage, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file; keys given on the command line win over it")
    parser.add_class_arguments(TargetConfig, "target")
    parser.add_class_arguments(head, "head", skip=_from_target(head))
    text = f"type of head, one of {', '.join(heads)}; the other keys of this section are those of head.type={kind}"
    parser.add_argument("--head.type", type=str, default=kind, help=text)
    for name, section in SECTIONS.items():
        if name != "target":
            parser.add_class_arguments(section, name)
    precision = Literal["float32", "bf16"]
    text = "number format of the head's arithmetic; bf16 through autocast, weights stay float32"
    parser.add_argument("--precision", type=precision, default="float32", help=text)
    return parser


def _from_target(head: type[HeadConfig]) -> set[str]:
    """Return the fields of a head's config that no user sets."""
    return {item.name for item in dataclasses.fields(head) if item.metadata.get("from_target")}


def _known_keys(head: type[HeadConfig]) -> Iterator[str]:
    yield from ("precision", "head.type")
    skipped = _from_target(head)
    for section, kind in [*SECTIONS.items(), ("head", head)]:
        for item in dataclasses.fields(kind):
            if section != "head" or item.name not in skipped:
                yield f"{section}.{item.name}"


def _mapping_keys(head: type[HeadConfig]) -> set[str]:
    """Return the keys of mappings: `--key.entry=value` sets one entry, and the head's config checks which there are."""
    return {f"head.{name}" for name, hint in get_type_hints(head).items() if get_origin(hint) is Mapping}


def _keys_on_command_line(argv: Sequence[str]) -> Iterator[str]:
    yield from (word[2:].partition("=")[0] for word in argv if word.startswith("--") and word != "--")


def _config_files(argv: Sequence[str]) -> Iterator[Path]:
    for word, following in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name == "--config" and Path(value if equals else following).is_file():
            yield Path(value if equals else following)


def _yaml_items(path: Path) -> Iterator[tuple[str, object]]:
    """Yield `section.key` and value of what a file sets."""
    try:
        with naming("--config", "give a file that can be read"):
            content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    require(isinstance(content, dict), f"{path} holds no sections; see configs/ for examples")
    yield from ((key, value) for key, value in flatten(content) if key not in (*SECTIONS, "head"))


def _check_key(key: str, known: Sequence[str], where: str) -> None:
    if key in known:
        return
    section, _, leaf = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    near = elsewhere or difflib.get_close_matches(key, known, 1, 0.0)
    valid = siblings if section and siblings else sorted({name.partition(".")[0] for name in known})
    raise ConfigError(f"unknown key {key!r} {where}; did you mean {near[0]!r}? Valid here: {', '.join(valid)}")
