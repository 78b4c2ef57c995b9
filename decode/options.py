"""Command-line options that ask for a dynamic tree in place of the drafts' own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from decode.dynamic import DynamicTree
from decode.grow import Grow

TREE_OPTIONS = {
    "depth": (int, "N", "deepest draft"),
    "width": (int, "N", "nodes expanded at each level; 1 for chains"),
    "size": (int, "N", "most nodes, root included"),
    "confidence": (float, "P", "stop where the drafter gives its path a probability below P (default 0: never)"),
}


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
