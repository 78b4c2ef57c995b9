"""Medusa heads under FasterDecoding's names, with what vLLM wants beside them.

Heads that share the target's lm_head, as ours do by default, are FasterDecoding's "version 2". vLLM reads that lm_head
from the head's own file, once for all heads. A draft vocabulary is written as `token_map`, the name vLLM has for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from heads.formats.folder import MEDUSA_WEIGHTS, TOKEN_MAP, Foreign
from heads.formats.llama import flag
from heads.formats.target_files import TargetFiles
from heads.formats.vocabulary import drop_target_copy, same, take_token_map
from heads.medusa import MedusaHead

HEAD_TYPE = "medusa"
CONVENTION = "Medusa's: 0.0.linear of FasterDecoding or blocks.0.layers.0 of vLLM, and an lm_head for each head or none"
SHARED = "lm_head.weight"
LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
PREFIX = re.compile(r"^medusa_heads?\.")
VLLM = "blocks."
OTHER_NAMES = (  # vLLM's, which take the place of FasterDecoding's
    (PREFIX, ""),
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\."), r"\1.\2.linear."),
)


def is_medusa(names: Iterable[str]) -> bool:
    """Return whether these are names of Medusa heads."""
    return any(LINEAR.fullmatch(_name(name)) for name in names)


def to_engine(head: MedusaHead, target: TargetFiles) -> Foreign:
    """Return Medusa heads as these readers want them.

    Raises:
        ValueError: If heads with projections of their own have a draft vocabulary, which nobody reads.
    """
    config, own, ids = head.config, head.projection, head.vocabulary
    if own is not None and ids is not None:
        raise ValueError(
            "no reader of Medusa heads knows own_lm_head and a draft vocabulary together; train with one of them"
        )
    found: dict[str, Tensor] = {}
    for i, block in enumerate(head.blocks):
        found |= {f"{i}.{name}": tensor for name, tensor in block.state_dict().items()}  # "0.linear.weight"
        if own is not None:
            found[f"{i}.{config.num_layers}.weight"] = own[i].detach()
    written = {  # no `architectures`: with it, TGI takes the head for a model
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "medusa_fc_bias": True,
        "base_model_name_or_path": target.name,
    }
    notes = []
    if own is None:
        found[SHARED] = target.lm_head.weight.detach()
        written |= {"version": "2", "original_lm_head": True}
        if config.num_layers > 1:
            notes.append(f"TGI reads one layer of heads that share the target's lm_head, not {config.num_layers}")
    if ids is not None:
        found[TOKEN_MAP] = ids.cpu()  # without truncated_vocab_size: with it, vLLM 0.32 misses the map it has just read
        notes.append(f"the draft vocabulary of {len(ids)} tokens is not used: all readers draft from all tokens")
    return Foreign(written, found, notes, MEDUSA_WEIGHTS)


def from_engine(foreign: Foreign, target: TargetFiles) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return sizes and weights of heads in this format; see `heads.adopt`.

    Raises:
        ValueError: If it is none, or one that heads here cannot be.
    """
    vocab_size, size = target.lm_head.weight.shape
    _check_config(foreign.config, size, vocab_size)
    with_bias = flag(foreign.config, "medusa_fc_bias", not any(VLLM in name for name in foreign.tensors))
    _rename(foreign)
    places = [tuple(map(int, match.groups())) for match in map(LINEAR.fullmatch, foreign.tensors) if match]
    if not places:
        raise ValueError(f"there are no heads, such as 0.0.linear.weight, among {sorted(foreign.tensors)}")
    heads, layers = (max(numbers) + 1 for numbers in zip(*places, strict=True))
    state: dict[str, Tensor] = {}
    for name in (f"{i}.{layer}.linear" for i in range(heads) for layer in range(layers)):
        weight = foreign.take(f"{name}.weight")
        bias = foreign.tensors.pop(f"{name}.bias", torch.zeros(size, dtype=weight.dtype))
        if not with_bias and bool(bias.any()):
            raise ValueError(
                f"{name}.bias is not zero, but vLLM ignores it unless medusa_fc_bias is true; write into config.json "
                "with which the heads were trained"
            )
        state |= {f"blocks.{name}.weight": weight, f"blocks.{name}.bias": bias}
    ids = take_token_map(foreign, vocab_size)
    if ids is not None:
        state["vocabulary"] = ids.sort().values
    state |= _projection(foreign, target, [f"{i}.{layers}.weight" for i in range(heads)], ids)
    sizes = {"hidden_size": size, "vocab_size": vocab_size, "num_heads": heads, "num_layers": layers}
    size_of_draft = None if ids is None else len(ids)
    return {**sizes, "draft_vocab_size": size_of_draft, "own_lm_head": "projection" in state}, state


def _check_config(config: dict[str, Any], hidden_size: int, vocab_size: int) -> None:
    for name, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.get(name, size) != size:
            raise ValueError(f"{name} is {config[name]}, but that of the target is {size}")
    if config.get("logit_scale", 1.0) != 1.0:
        raise ValueError(f"logit_scale is {config['logit_scale']}; heads here have none")


def _name(name: str) -> str:
    for pattern, new in OTHER_NAMES:
        name = pattern.sub(new, name)
    return name


def _rename(foreign: Foreign) -> None:
    """Give all tensors FasterDecoding's names; of vLLM's, `lm_heads.I` follows the last layer of head I.

    Raises:
        ValueError: If one is there under both names.
    """
    named = {_name(name): tensor for name, tensor in foreign.tensors.items()}
    if len(named) < len(foreign.tensors):
        raise ValueError(
            "some weights are there under FasterDecoding's names and under vLLM's; leave one of them there"
        )
    layers = max((int(match[2]) + 1 for match in map(LINEAR.fullmatch, named) if match), default=0)
    if flag(foreign.config, "original_lm_head") and SHARED not in named and "lm_heads.0.weight" in named:
        named[SHARED] = named.pop("lm_heads.0.weight")
    foreign.tensors = {re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", name): tensor for name, tensor in named.items()}


def _projection(foreign: Foreign, target: TargetFiles, names: list[str], ids: Tensor | None) -> dict[str, Tensor]:
    """Return the heads' own `projection` [K, U, D]; none if they share the target's lm_head.

    Raises:
        ValueError: If some heads have one and others not, or one is of another shape.
    """
    weight = target.lm_head.weight.detach()
    shared = weight
    if ids is not None and SHARED in foreign.tensors and foreign.tensors[SHARED].shape[:1] == ids.shape:
        shared = weight[ids]  # rows in the order of token_map, which need not ascend
    drop_target_copy(foreign, SHARED, shared)
    if not any(name in foreign.tensors for name in names):
        return {}
    rows = torch.arange(len(weight)) if ids is None else ids.sort().values
    own = []
    for name in names:
        found = foreign.take(name)
        if ids is not None and found.shape[:1] == ids.shape:
            found = found[ids.argsort()]
        elif found.shape[:1] == weight.shape[:1]:
            found = found[rows]
        if found.shape != (len(rows), weight.shape[1]):
            raise ValueError(f"{name} has shape {tuple(found.shape)}, expected {(len(rows), weight.shape[1])}")
        own.append(found)
    return {} if all(same(found, weight[rows]) for found in own) else {"projection": torch.stack(own)}
