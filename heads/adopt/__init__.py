"""Heads from elsewhere made head folders: `heads.adopt(...)`, `python -m heads.adopt`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.base import Head, create_head, head_class
from heads.checkpoint import HeadNotes, differences, read_notes, save_head
from heads.formats import FORMATS
from heads.formats.eagle3 import LAYER
from heads.formats.folder import PICKLES, Foreign, check_weights, read_folder, writing
from heads.formats.medusa import is_medusa
from heads.formats.target_files import BUFFERS, TargetFiles
from heads.hub import find_head

MARK = "adopted from"


def adopt(src: str | Path, out: str | Path, *, target: str | Path, aux: str | None = None) -> list[str]:
    """Make a head folder of a head in an engine's format, which is found out, and return what differs, in sentences.

    Args:
        src: Folder of the head, or its name on the hub.
        out: Head folder to write. An earlier adoption there is replaced, nothing else.
        target: Folder or hub name of the target that the head was trained for. The model is not loaded.
        aux: Whose meaning the decoder layers in the `eagle_config` of an EAGLE-3 head have, "vllm" or "sglang"; needed
            where they are the only ones.

    Raises:
        ValueError: If it is no head that heads here can be, something is missing, unexpected or damaged, it is not of
            this target, or `out` holds something else.
    """
    _check_out(Path(out), Path(src))
    foreign = read_folder(find_head(src, "*.json", "*.safetensors", *PICKLES))
    name = detect(foreign)
    module = FORMATS[name]
    if aux is not None and name != "eagle3":
        raise ValueError(f"{src} is of the format {name}, which takes no aux (--aux); leave it out")
    files = TargetFiles(target)
    foreign.tensors = {key: tensor for key, tensor in foreign.tensors.items() if not key.endswith(BUFFERS)}
    try:
        check_weights(foreign.tensors)
        sizes, state = module.from_engine(foreign, files, **({"aux": aux} if name == "eagle3" else {}))
        if foreign.tensors:
            raise ValueError(f"unexpected {sorted(foreign.tensors)}")
        head = _make(module.HEAD_TYPE, sizes, state, files)
    except ValueError as error:
        raise ValueError(f"cannot adopt {src} as {name} ({module.CONVENTION}): {error}") from error
    with writing(Path(out)):
        save_head(head, out, target=files, notes=HeadNotes(training={MARK: str(src), "format": name}))
    return foreign.notes


def detect(foreign: Foreign) -> str:
    """Return the format that a folder has.

    Raises:
        ValueError: If it is none that is known.
    """
    config, names = foreign.config, foreign.tensors
    if "speculators_model_type" in config:
        return "speculators"
    if is_medusa(names):
        return "medusa"
    if "fc.weight" in names:
        marks = ("norm.weight", "d2t", "t2d")
        eagle3 = any(name in marks or name.startswith(LAYER) or ".hidden_norm." in name for name in names)
        return "eagle3" if eagle3 or "draft_vocab_size" in config else "eagle"
    if {"format", "type", "training"} <= set(config):
        raise ValueError("this is a head folder already, nothing to adopt")
    known = "; ".join(module.CONVENTION for module in FORMATS.values())
    raise ValueError(f"no known format of heads has the tensors {sorted(names)[:8]}; known are {known}")


def _check_out(out: Path, src: Path) -> None:
    if os.path.realpath(out) == os.path.realpath(src):  # `Path.resolve` raises for links in a circle
        raise ValueError(f"{out} is the head's own folder; adopt it to another")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        adopted = out.is_dir() and MARK in read_notes(out).training
    except ValueError:  # no head at all
        adopted = False
    if not adopted:
        raise ValueError(f"{out} holds something else than an adopted head; choose another folder, or empty this one")


def _make(kind: str, sizes: Mapping[str, Any], state: Mapping[str, Tensor], target: TargetFiles) -> Head:
    """Return the head of these sizes and weights, in their precision; the widest, if they are mixed.

    Raises:
        ValueError: If they do not go together.
    """
    head_dim, largest = sizes.get("head_dim", 1), max(tensor.numel() for tensor in state.values())
    for name, each in (("intermediate_size", 1), ("num_attention_heads", head_dim), ("num_key_value_heads", head_dim)):
        if sizes.get(name, 1) * each * sizes["hidden_size"] > largest:  # maybe more than any memory holds
            raise ValueError(f"{name} is {sizes[name]}, with head_dim {head_dim}: more than any of its weights has")
    head = create_head(kind, head_class(kind).Config(**sizes), target)
    if wrong := differences(head, state):
        raise ValueError(wrong)
    if head.vocabulary is not None:
        head.set_vocabulary(state["vocabulary"])
    floats = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    head = head.to(reduce(torch.promote_types, floats))
    head.load_state_dict(state, strict=True)
    return head
