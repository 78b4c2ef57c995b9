"""Runs that go on from trained heads, with new data or other losses, instead of untrained ones."""

from __future__ import annotations

from dataclasses import fields

from decode import Target
from heads.base import Head
from heads.checkpoint import differences, load_head
from train.config import naming, require
from train.joint import Medusa2InTraining

ONLY_IN_TRAINING = frozenset(
    {
        *("losses", "depth_decay", "feature_weight", "unroll", "noise", "chunk_size", "activation_checkpointing"),
        *("max_depth", "draft_vocab_size"),
    }
)
"""Fields of heads' configs that do not say what their weights mean, or whose difference shows in their sizes."""


def start_from(head: Head, folder: str, target: Target) -> None:
    """Give an untrained head the weights and the draft vocabulary of the head in `folder`.

    An adapter that is trained with it starts untrained.

    Raises:
        ConfigError: If they are not of this target, or are another kind of head.
    """
    way_out = "give the folder of a head of this target, and set the other keys of head as it has them"
    with naming(f"run.init={folder}", way_out, ValueError):
        found = load_head(folder, target)
        plain = head.heads(target) if isinstance(head, Medusa2InTraining) else head
        require(found.kind == plain.kind, f"it holds a head of type {found.kind}, and head.type is {head.kind}")
        wrong = differences(plain, found.state_dict())
        require(not wrong, f"its weights are not those that head.* asks for: {wrong}")
        ours, theirs = vars(plain.config), vars(found.config)
        other = [
            f"head.{name} is {ours[name]} and was {theirs[name]}"
            for name in (item.name for item in fields(plain.config))
            if name not in ONLY_IN_TRAINING and ours[name] != theirs[name]
        ]
        require(not other, f"its weights mean something else: {'; '.join(other)}")
    head.load_state_dict({**head.state_dict(), **found.state_dict()})
