"""A run's config as YAML, and what of it may change when the run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from train.config import RunConfig

MAY_CHANGE = frozenset(
    {
        *("optim.steps", "optim.epochs", "data.feature_memory", "data.feature_dir"),
        *("run.eval_every", "run.save_every", "run.log_every", "run.keep", "run.tracker"),
        *("target.device_map", "target.shard", "head.activation_checkpointing"),
    }
)
"""Keys that a run may be continued with another value of."""


def flat(config: RunConfig) -> dict[str, object]:
    """Return the config as `section.key` -> value, in plain YAML types."""
    items: dict[str, object] = {}
    for name, value in dataclasses.asdict(config).items():
        pairs = value.items() if isinstance(value, Mapping) else [(None, value)]
        items.update({name if key is None else f"{name}.{key}": _yaml_type(item) for key, item in pairs})
    return {"head.type" if key == "head_type" else key: value for key, value in items.items()}


def to_yaml(config: RunConfig) -> str:
    """Return the whole config, defaults included, as YAML that `--config` reads back."""
    nested: dict[str, Any] = {}
    for key, value in flat(config).items():
        section, _, name = key.rpartition(".")
        if section:
            nested.setdefault(section, {})[name] = value
        else:
            nested[name] = value
    return str(yaml.safe_dump(nested, sort_keys=False))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return a line for each key whose change would make a continued run differ from an uninterrupted one."""
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if key not in MAY_CHANGE and old.get(key) != new.get(key)
    ]


def read_flat(path: Path) -> dict[str, object]:
    """Read back a file that holds `to_yaml`'s text, as `section.key` -> value."""
    return dict(flatten(yaml.safe_load(path.read_text())))


def flatten(content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield `section.key` and value of a nested mapping as read from YAML."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield str(name), value


def _yaml_type(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
