"""What a folder that is to be published holds, read and checked without its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heads.base import Head, Tree
from heads.checkpoint import load_head, read_notes, read_target, stored_dtype
from heads.formats.folder import read_config
from heads.formats.target_files import TargetFiles

DRAFT_NOTES = "gorgon.json"
"""In the folder of a draft model, what `train/draft_model.py` says of it."""


@dataclass(frozen=True)
class Contents:
    """A head or a draft model, and what is recorded of it."""

    head: Head | None
    """The head, or None for a draft model."""
    parameters: int
    config: Mapping[str, Any]
    """Sizes and settings."""
    target: str
    """Name of its target; empty if it is not recorded."""
    fingerprint: str
    """Of the target; empty if it is not recorded."""
    training: Mapping[str, Any]
    measured: Mapping[str, Any]
    tree: Tree


class RecordedTarget:
    """A target as a head folder records it (`heads.Lender`), with zeros for weights, which take no memory."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        self.name: str = config["target"]["name"]
        self.fingerprint: str = config["target"]["fingerprint"]
        self.quantize: str | None = config["target"].get("quantize")
        self._sizes: Mapping[str, int] = config["config"]  # `load_head` has checked them when it asks for weights

    def _zeros(self) -> nn.Parameter:
        shape = self._sizes["vocab_size"], self._sizes["hidden_size"]
        return nn.Parameter(torch.zeros(1).expand(shape), requires_grad=False)

    @cached_property
    def embed(self) -> nn.Embedding:
        """Token embedding."""
        weight = self._zeros()
        module = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        module.weight = weight
        return module

    @cached_property
    def lm_head(self) -> nn.Linear:
        """Output projection."""
        weight = self._zeros()
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        module.weight = weight
        return module


def read_contents(folder: Path) -> Contents:
    """Return what a folder holds; of a head, every key and size is checked.

    Raises:
        ValueError: If it is neither a head nor a model, or incomplete or damaged.
    """
    config = read_config(folder)
    if "model_type" in config:
        return _read_model(folder, config)
    read_target(folder)  # refuses what is no head's config
    if (folder / "adapter").is_dir():
        raise ValueError(
            f"{folder} drafts for a target with the adapter in it, which nobody else has: make one model of both "
            f"(python -m train.merge {folder} OUT), and publish OUT/target and OUT/head"
        )
    target, notes = RecordedTarget(folder), read_notes(folder)
    head = load_head(folder, target, dtype=stored_dtype(folder))
    return Contents(
        head=head,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        config=config["config"],
        target=target.name,
        fingerprint=target.fingerprint,
        training=notes.training,
        measured=notes.measured,
        tree=notes.tree,
    )


def _read_model(folder: Path, config: Mapping[str, Any]) -> Contents:
    recorded = read_config(folder, DRAFT_NOTES) if (folder / DRAFT_NOTES).is_file() else {}
    parts = {name: recorded.get(name, {}) for name in ("target", "training", "measured")}
    if wrong := [name for name, part in parts.items() if not isinstance(part, dict)]:
        raise ValueError(f"{folder / DRAFT_NOTES}: {', '.join(wrong)} must be objects; copy the model again")
    sizes = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    return Contents(
        head=None,
        parameters=TargetFiles(folder).parameters,
        config={name: config[name] for name in sizes if name in config},
        target=str(parts["target"].get("name", "")),
        fingerprint=str(parts["target"].get("fingerprint", "")),
        training=parts["training"],
        measured=parts["measured"],
        tree=None,
    )
