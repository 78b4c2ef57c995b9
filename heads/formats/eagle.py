"""EAGLE-1 heads (EAGLE-2 has the same) as vLLM, SGLang and SafeAILab's code read them.

vLLM and SGLang want different configs, and so need a folder each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.eagle import EagleHead
from heads.formats.folder import MAP_FILE, TOKEN_MAP, Foreign, section
from heads.formats.llama import flag, llama_config, read_layer_config
from heads.formats.target_files import TargetFiles
from heads.formats.vocabulary import drop_target_copy, take_token_map

HEAD_TYPE = "eagle"
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
BIAS = "fc.bias"
CONVENTION = "SafeAILab's EAGLE-1: fc, layers.0 without an input norm, no norm"


def to_engine(head: EagleHead, target: TargetFiles, *, engine: str) -> Foreign:
    """Return an EAGLE head as an engine reads it.

    Args:
        head: The head.
        target: Its target.
        engine: "vllm" or "sglang".

    Raises:
        ValueError: If the engine is another, or cannot compute the head.
    """
    if engine not in ARCHITECTURES:
        raise ValueError(f"EAGLE heads are written for one of {', '.join(ARCHITECTURES)}, got {engine!r}")
    _check_embedding(target)
    found = {name: tensor for name, tensor in head.state_dict().items() if name != "vocabulary"}
    written = {"architectures": [ARCHITECTURES[engine]], **llama_config(head.config, target)}
    foreign = Foreign(written, found)
    ids = head.vocabulary
    if engine == "sglang":
        found.setdefault(BIAS, torch.zeros(head.config.hidden_size))  # which would stay random
        if ids is not None:
            written["hot_vocab_size"] = len(ids)
            found[TOKEN_MAP], foreign.map_file = ids, True
        return foreign
    if BIAS in found and bool(found.pop(BIAS).any()):
        raise ValueError("vLLM has no fc.bias and would ignore this head's; train one with fc_bias: false")
    if ids is not None:
        foreign.notes.append(f"the draft vocabulary of {len(ids)} tokens is lost: vLLM drafts from all tokens")
    return foreign


def from_engine(foreign: Foreign, target: TargetFiles) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return sizes and weights of a head in this format; see `heads.adopt`.

    Raises:
        ValueError: If it is none, or one that heads here cannot be.
    """
    config = section(foreign.config, "model") or foreign.config  # vLLM knows a wrapping
    _check_embedding(target)
    sizes = read_layer_config(config, target)
    drop_target_copy(foreign, "embed_tokens.weight", target.embed.weight)
    drop_target_copy(foreign, "lm_head.weight", target.lm_head.weight)
    state = {"fc.weight": foreign.take("fc.weight")}
    bias = foreign.tensors.pop(BIAS, torch.zeros(1))
    if bias.any():
        if not flag(config, "bias", True):  # SafeAILab's, of fc; of attention nobody trains one
            raise ValueError(f"{BIAS} is not zero, but `bias` is false; delete the one that is wrong")
        state[BIAS] = bias
    state |= {name: foreign.take(name) for name in list(foreign.tensors) if name.startswith("layers.0.")}
    ids = take_token_map(foreign, sizes["vocab_size"])
    size = None if ids is None else len(ids)
    if config.get("hot_vocab_size", size) != size:
        raise ValueError(f"hot_vocab_size is {config['hot_vocab_size']}, but {MAP_FILE} has {size or 'no'} ids")
    if ids is not None:
        state["vocabulary"] = ids.sort().values
    return {**sizes, "fc_bias": BIAS in state, "draft_vocab_size": size}, state


def _check_embedding(target: TargetFiles) -> None:
    """Refuse targets whose embedding heads here read otherwise than engines; EAGLE-3 evens it out by its norm.

    Raises:
        ValueError: If it is one.
    """
    if target.scales_embedding:
        raise ValueError(
            f"EAGLE heads in engines read the rows of the target's embedding as they are stored, and here as "
            f"{target.text_config.get('model_type')} models scale them: drafts would not be the same. Train EAGLE-3"
        )
