"""Head folders: `config.json` (what the head is, its target, how it was trained and measured) and `model.safetensors`.

Nothing is loaded by halves: every key and size is checked, and a head is refused on a target it was not trained for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from heads.base import Head, HeadConfig, Lender, Tree, head_class
from heads.files import write_atomically
from heads.fingerprint import check_target_of, describe_target
from heads.hub import find_head
from heads.memory import give_back
from heads.packing import pack_linears

CONFIG, WEIGHTS, TUNED = "config.json", "model.safetensors", "tuned.json"
FORMAT = 1


@dataclass(frozen=True)
class HeadNotes:
    """What a head folder records beside sizes and weights; every part may be empty."""

    training: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained: data, steps, recipe."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What evaluation measured, with hardware and prompts."""
    tree: Tree = None
    """The draft tree to use by default: paths of child ranks from the root, as in `decode.StaticTree`, or settings of a
    `decode.DynamicTree`; None for the head type's own."""


def save_head(
    head: Head, path: str | Path, *, target: Lender, notes: HeadNotes | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write `head` to the folder `path`, replacing a head that is there.

    Each file is written beside its place, synced and renamed, so a crash leaves the old file or the new one.

    Args:
        head: The head; its weights are stored as they are unless `dtype` is given.
        path: Folder; made if missing.
        target: The target the head was trained for.
        notes: What to record about training and measurements.
        dtype: Store floating-point weights in this precision.

    Raises:
        ValueError: If weights of the head were given up.
    """
    folder, state = Path(path), {}
    for name, tensor in head.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{name} was given up when the head was loaded; load it with keep_weights=True to save it")
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        state[name] = cast.detach().cpu().contiguous()
    config = {
        "format": FORMAT,
        "type": head.kind,
        "config": asdict(head.config),
        "target": describe_target(target),
        **asdict(notes or HeadNotes()),
    }
    text = json.dumps(config, indent=2) + "\n"  # before anything is replaced: notes may not be JSON
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TUNED).unlink(missing_ok=True)  # made for other weights
    write_atomically(folder / WEIGHTS, lambda temporary: save_file(state, temporary))
    write_atomically(folder / CONFIG, lambda temporary: temporary.write_text(text))


def read_target(path: str | Path) -> tuple[str, str]:
    """Return the type of the head in the folder `path` (or hub name), and the name of the target it was trained for."""
    config = _read_config(find_head(path, CONFIG))
    return config["type"], config["target"]["name"]


def stored_dtype(path: str | Path) -> torch.dtype:
    """Return the precision in which the weights of the head folder `path` are stored; the widest, if they are mixed."""
    found = [tensor.dtype for tensor in _read_weights(find_head(path, WEIGHTS)).values() if tensor.is_floating_point()]
    return reduce(torch.promote_types, found or [torch.float32])


def read_notes(path: str | Path) -> HeadNotes:
    """Return what the head folder `path` (or hub name) records beside its weights."""
    config = _read_config(find_head(path, CONFIG))
    return HeadNotes(training=config["training"], measured=config["measured"], tree=config["tree"])


def write_notes(path: str | Path, notes: HeadNotes) -> None:
    """Replace what the head folder `path` records beside its weights."""
    folder = Path(path)
    text = json.dumps(_read_config(folder) | asdict(notes), indent=2) + "\n"
    write_atomically(folder / CONFIG, lambda temporary: temporary.write_text(text))


def read_plans(path: str | Path) -> dict[str, Any]:
    """Return what `decode.tune` has written to a folder (or hub name), by device and precision; empty if nothing.

    Raises:
        ValueError: If the file is damaged.
    """
    file = find_head(path, CONFIG, TUNED) / TUNED
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{file} is not valid JSON ({error}); delete it and run decode.tune again") from error
    if not isinstance(found, dict) or not all(isinstance(plan, dict) for plan in found.values()):
        raise ValueError(f"{file} must hold a plan for each device; delete it and run decode.tune again")
    return found


def load_head(
    path: str | Path,
    target: Lender,
    *,
    dtype: torch.dtype = torch.float32,
    check_target: bool = True,
    keep_weights: bool = True,
) -> Head:
    """Load the head folder `path` for `target`, on a CPU with its linear layers packed (`heads.packing`).

    Args:
        path: A folder written by `save_head`, or its name on the hub.
        target: The target it was trained for; lends its embedding and lm_head.
        dtype: Precision of the loaded weights.
        check_target: Refuse a target whose fingerprint differs. Switch off only for the same weights in a precision
            that rounds them differently: drafts of a wrong target cost acceptance, never correctness.
        keep_weights: Keep the plain weights beside packed ones. Without them the head takes half the memory, and can
            only draft.

    Raises:
        ValueError: If the folder is incomplete or damaged, a key is missing, unexpected or of the wrong shape, or the
            target is not the one the head was trained for.
    """
    folder = find_head(path, CONFIG, WEIGHTS, TUNED)
    config = _read_config(folder)
    kind = head_class(config["type"])
    try:
        head_config = kind.Config(**_read_fields(kind.Config, config["config"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a {config['type']} head: {error}") from error
    check_target_of(folder, config["target"], head_config.hidden_size, head_config.vocab_size, target, check_target)
    state = _read_weights(folder)
    try:
        head = kind(head_config, target)
    except (RuntimeError, TypeError, ValueError) as error:  # sizes that no memory, or no integer of torch, holds
        raise ValueError(f"cannot make the {config['type']} head of {folder}: {error}") from error
    weights = folder / WEIGHTS
    if wrong := differences(head, state):
        raise ValueError(f"{weights} does not fit its {CONFIG}: {wrong}; the folder mixes two heads, or was edited")
    if head.vocabulary is not None:
        try:
            head.set_vocabulary(state["vocabulary"].long())
        except ValueError as error:
            raise ValueError(f"{weights} is damaged: {error}; copy or train the head again") from error
    head.load_state_dict(state, strict=True)
    if config["tree"] is not None:
        head.tree = config["tree"]
    head.tuned = read_plans(folder)
    device = target.lm_head.get_parameter("weight").device
    head = head.to(device=device, dtype=dtype).eval()
    packed = pack_linears(head)
    if not keep_weights:
        packed.release()
        give_back()
    return head


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights = folder / WEIGHTS
    try:
        weights.open("rb").close()  # safetensors says of what may not be read that it is not there
        return dict(load_file(weights))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} is not a complete head folder: {WEIGHTS} is missing; train or copy it again"
        ) from None
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged ({error}); copy or train the head again") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a head folder: it has no {CONFIG}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy or train the head again") from error
    needed = {"format", "type", "config", "target", "training", "measured", "tree"}
    if isinstance(config, dict) and "model_type" in config:
        raise ValueError(f"{path} is of a model, not of a head; pass the folder as a draft model (--draft-model)")
    if not isinstance(config, dict) or not needed <= set(config):
        raise ValueError(f"{path} is not a head written by Gorgon: expected the keys {sorted(needed)}")
    target = config["target"]
    # a dotted name would import any module; a folder from elsewhere must not choose which
    if not isinstance(config["type"], str) or "." in config["type"]:
        raise ValueError(f"{path}: `type` must name a head type, got {config['type']!r}")
    if not isinstance(target, dict) or not all(isinstance(target.get(key), str) for key in ("name", "fingerprint")):
        raise ValueError(f"{path}: `target` must hold the name and the fingerprint of a target, got {target!r}")
    for key, kind in (("config", dict), ("training", dict), ("measured", dict)):
        if not isinstance(config[key], kind):
            raise ValueError(f"{path}: `{key}` must be a {kind.__name__}, got {config[key]!r}")
    if not _is_tree(config["tree"]):
        raise ValueError(
            f"{path}: `tree` must be a list of paths of child ranks, such as [[0], [1], [0, 0]], settings of a dynamic "
            f'tree, such as {{"depth": 5, "width": 4, "size": 16}}, or null, got {config["tree"]!r}'
        )
    if config["format"] != FORMAT:
        raise ValueError(f"{path} has format {config['format']}, this version reads {FORMAT}; update Gorgon")
    return config


def _read_fields(config: type[HeadConfig], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a head's config, as JSON has them, as its class does.

    Raises:
        ValueError: If one is unknown or not of its type, or a size of the target is not above 0.
    """
    known = {entry.name: entry for entry in fields(config)}
    unknown = sorted(set(found) - set(known))
    if unknown:
        renamed = "; head_decay and step_decay are depth_decay now: rename it in the file"
        way_out = renamed if {"head_decay", "step_decay"} & {*unknown} else ""
        raise ValueError(f"unknown fields {unknown}; known: {sorted(known)}{way_out}")
    hints = get_type_hints(config)
    for name, value in found.items():
        if not _is_of(hints[name], value):
            raise ValueError(f"{name} must be of type {known[name].type}, got {value!r}")
        if known[name].metadata.get("from_target") and not 0 < value < math.inf:
            raise ValueError(f"{name} is the target's and must be above 0, got {value!r}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _is_of(hint: Any, value: object) -> bool:
    """Return whether a value of JSON is of a field's type. What JSON cannot tell, the config itself must check."""
    of = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_is_of(one, value) for one in of)
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_is_of(of[0], item) for item in value)
    if get_origin(hint) is Mapping:
        return isinstance(value, dict) and all(_is_of(of[1], item) for item in value.values())
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _is_tree(tree: object) -> bool:
    """Return whether it is a `Tree`; which paths and settings make one, `decode` knows."""
    if isinstance(tree, dict):
        return all(isinstance(value, int | float | None) for value in tree.values())
    if isinstance(tree, list):
        return all(isinstance(path, list) and all(isinstance(rank, int) for rank in path) for path in tree)
    return tree is None


def differences(head: Head, state: Mapping[str, torch.Tensor]) -> str:
    """Return how a state dict differs from the head's own in keys and shapes; empty if it does not."""
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    shapes = [
        f"{name}: {found[name]} instead of {expected[name]}"
        for name in expected
        if found.get(name, expected[name]) != expected[name]
    ]
    if not (missing or unexpected or shapes):
        return ""
    return f"missing {missing}, unexpected {unexpected}, wrong shapes {shapes}"
