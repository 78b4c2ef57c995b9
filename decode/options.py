"""Command-line options that several commands have: those of the target, and of a dynamic tree."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from decode.dynamic import DynamicTree
from decode.grow import Grow
from decode.placed import DeviceMap
from decode.quantized import Quantize
from decode.target import Target

TREE_OPTIONS = {
    "depth": (int, "N", "deepest draft"),
    "width": (int, "N", "nodes expanded at each level; 1 for chains"),
    "size": (int, "N", "most nodes, root included"),
    "confidence": (float, "P", "stop where the drafter gives its path a probability below P (default 0: never)"),
}


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add `target`, `--dtype`, `--device`, `--compile`, `--quantize` and `--device-map`, for `load_target`."""
    parser.add_argument("target", help="model folder or hub name")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, …; default: as stored")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; default: a GPU if there is one")
    parser.add_argument("--compile", action="store_true", help="compile the target's decoder layers; for GPUs")
    parser.add_argument("--quantize", choices=get_args(Quantize), help="round the target's weights while loading it")
    parser.add_argument("--device-map", choices=get_args(DeviceMap), help="spread the target's layers over the GPUs")


def check_distinct(name: str, numbers: Sequence[float]) -> None:
    """Refuse numbers that tables, which show six digits, could not tell apart.

    Raises:
        ValueError: If two are the same.
    """
    if len({f"{number:g}" for number in numbers}) < len(numbers):
        raise ValueError(f"--{name}: the numbers must differ, in their first six digits, got {list(numbers)}")


def load_target(args: argparse.Namespace, *, keep_weights: bool = False) -> Target:
    """Load the target that is asked for; see `Target.from_pretrained`, also for errors."""
    return Target.from_pretrained(
        args.target,
        dtype=args.dtype,
        device=args.device,
        compile=args.compile,
        keep_weights=keep_weights,
        quantize=args.quantize,
        device_map=args.device_map,
    )


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """Add `--tree-depth`, `--tree-width`, `--tree-size` and `--tree-confidence`."""
    group = parser.add_argument_group(
        "dynamic tree",
        "Any of these gives each step the tree of the drafter's most probable paths (EAGLE-2); what is left out is as "
        "in the head's or the draft model's own tree, tuned or not.",
    )
    for name, (kind, metavar, text) in TREE_OPTIONS.items():
        group.add_argument(f"--tree-{name}", type=kind, metavar=metavar, help=text)


def tree_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given; empty if no dynamic tree is asked for."""
    given = {name: vars(args)[f"tree_{name}"] for name in TREE_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def dynamic_tree(settings: Mapping[str, Any], own: Grow) -> DynamicTree:
    """Return the dynamic tree of these settings; those that are missing are taken from `own`.

    A tree that becomes deeper than `own` has room for a chain at least; one that becomes a chain, for no more.
    """
    shape = {"depth": own.depth, "width": own.width, "size": own.max_nodes}
    merged = (asdict(own) if isinstance(own, DynamicTree) else shape) | dict(settings)
    if "size" not in settings:
        chain = merged["depth"] + 1
        merged["size"] = chain if merged["width"] == 1 else max(merged["size"], chain)
    return DynamicTree(**merged)
