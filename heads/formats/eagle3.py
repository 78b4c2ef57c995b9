"""EAGLE-3 heads as vLLM, SGLang, llama.cpp's converter, OpenVINO and SafeAILab's code read them, from one folder.

Names are SafeAILab's (`midlayer.…`). Embedding and lm_head rows are written too, as some readers do not take the
target's. Which decoder layers are read is left out where it is every reader's default; else it is written twice, since
two readers use one name with a difference of one (`aux_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.formats.folder import Foreign, section
from heads.formats.llama import flag, llama_config, read_layer_config
from heads.formats.target_files import TargetFiles
from heads.formats.vocabulary import drop_target_copy, drop_zeros, sort_vocabulary, take_vocabulary

HEAD_TYPE = "eagle3"
ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER, OTHER_LAYER = "midlayer.", "layers.0."
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants that heads here do not have."""
LLAMA_CPP_TARGETS = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss"),
    *("gemma4_text", "lfm2", "nemotron_h", "minimax_m2"),
)
"""Types of targets whose states llama.cpp (b11434) gives to EAGLE-3 heads."""
MEANINGS = ("vllm", "sglang")
"""Of the nested list of layers; see `aux_layers`."""
CONVENTION = "SafeAILab's EAGLE-3: fc, midlayer or layers.0, norm, lm_head, d2t of offsets, t2d"


def default_layers(num_layers: int) -> list[int]:
    """Return the decoder layers whose outputs engines take if the config names none, as `Head.feature_layers`."""
    return [2, num_layers // 2, num_layers - 3]


def aux_layers(layers: Sequence[int], num_layers: int) -> dict[str, Any]:
    """Return the entries of a config that say which decoder layers are read; none for the default.

    vLLM and llama.cpp read the entry at the top: k is the k-th layer's output, counted from 1, as here. SGLang reads
    the nested one, where k is the output of layer k counted from 0.
    """
    if list(layers) == default_layers(num_layers):
        return {}
    return {IDS: list(layers), "eagle_config": {IDS: [layer - 1 for layer in layers], "use_aux_hidden_state": True}}


def to_engine(head: Eagle3Head, target: TargetFiles) -> Foreign:
    """Return an EAGLE-3 head as these engines read it."""
    config, layers = head.config, list(head.config.feature_layers)
    written = {
        "architectures": [ARCHITECTURE],
        **llama_config(config, target),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(layers),
        "norm_before_residual": config.norm_before_residual,
        **dict.fromkeys(FLAGS, False),
        **aux_layers(layers, target.num_layers),
    }
    notes = [
        "OpenVINO GenAI takes the outputs of other layers unless hidden_layers_list in the rt_info of its model is "
        f"{[layer - 1 for layer in layers]}"
    ]
    if len(layers) != 3:
        notes.append(f"llama.cpp reads heads of 3 decoder layers only; this one has {len(layers)}")
    else:
        notes += notes_of_llama_cpp(target)
    if config.norm_before_residual:
        notes.append("SGLang and OpenVINO GenAI do not know norm_before_residual, and would draft badly")
    if len(layers) == 1:
        notes.append("SGLang leaves fc out where one decoder layer is read, and would draft badly")
    if layers[-1] == target.num_layers:
        notes.append(
            f"SGLang does not hand on the output of a target's last layer, here {layers[-1]}, which this head reads: "
            "it would stop, or draft badly"
        )
    return Foreign(written, tensors(head, LAYER), notes)


def sglang_drafts(config: Eagle3Config, num_layers: int | None) -> bool:
    """Return whether SGLang (0.5.23) computes such a head, as far as is known; see the notes of `to_engine`.

    Args:
        config: Of the head.
        num_layers: Of the target; None if nobody knows.
    """
    layers = config.feature_layers
    return not config.norm_before_residual and len(layers) > 1 and layers[-1] != num_layers


def notes_of_llama_cpp(target: TargetFiles) -> list[str]:
    """Return what llama.cpp does otherwise, in sentences."""
    kind = target.text_config.get("model_type")
    if kind in LLAMA_CPP_TARGETS:
        return []
    return [
        f"llama.cpp drafts for targets of some types only, such as {', '.join(LLAMA_CPP_TARGETS[:4])}; {kind} was not "
        'among them in b11434 (others stop with "layer input tensor is null")'
    ]


def tensors(head: Eagle3Head, layer: str) -> dict[str, Tensor]:
    """Return all tensors that any reader wants, those of the layer under a prefix.

    Beside the trained ones: lm_head [U, D], the embedding [V, D], `d2t` [U], which is target id less draft id, and
    `t2d` [V], which is True at the ids that can be drafted.
    """
    config = head.config
    own = {
        name: tensor for name, tensor in head.state_dict().items() if name not in ("vocabulary", "projection.weight")
    }
    found = {name.replace("layers.0.", layer, 1): tensor for name, tensor in own.items()}
    found["lm_head.weight"] = head.output_weight().detach()
    found["embed_tokens.weight"] = head.embed.get_parameter("weight").detach()
    ids = None if head.vocabulary is None else head.vocabulary.cpu()
    if ids is not None and len(ids) < config.vocab_size:  # vLLM has no place for a d2t of all tokens
        found["d2t"] = ids - torch.arange(len(ids))
        found["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def from_engine(
    foreign: Foreign, target: TargetFiles, *, aux: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return sizes and weights of a head in this format; see `heads.adopt`.

    Args:
        foreign: Its config and tensors; what is used is taken out.
        target: The target it was trained for.
        aux: Whose meaning a nested list of decoder layers has, "vllm" or "sglang"; needed if there is one only.

    Raises:
        ValueError: If it is none, or one that heads here cannot be.
    """
    config = foreign.config
    nested = section(config, "eagle_config")
    for name in FLAGS:
        if flag(config, name) or flag(nested, name):
            also = (
                "; in configs of SpecForge it means what all heads do: delete it there" if name == "norm_output" else ""
            )
            raise ValueError(f"{name} is set, which heads here do not have{also}")
    if not flag(nested, "use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state is false; heads here read decoder layers")
    sizes = read_layer_config(config, target)
    drop_zeros(foreign, "fc.bias")
    layers = read_aux_layers(config, target.num_layers, aux)
    width = sizes["hidden_size"]
    state = {"fc.weight": foreign.take("fc.weight", shape=(width, width * len(layers)))}
    state["norm.weight"] = foreign.take("norm.weight")
    for name in list(foreign.tensors):
        if name.startswith((LAYER, OTHER_LAYER)):
            ours = name.replace(LAYER, OTHER_LAYER, 1)
            if ours in state:
                raise ValueError(f"{name} is there under both names of the layer, {LAYER} and {OTHER_LAYER}")
            state[ours] = foreign.take(name)
    ids = take_vocabulary(foreign, sizes["vocab_size"])
    drop_target_copy(foreign, "embed_tokens.weight", target.embed.weight)
    if "lm_head.weight" in foreign.tensors:
        state |= sort_vocabulary(ids, foreign.take("lm_head.weight"), target)
    elif ids is not None:
        raise ValueError("lm_head.weight is missing, though there is a draft vocabulary (d2t)")
    size = len(state["vocabulary"]) if "vocabulary" in state else None
    if config.get("draft_vocab_size") not in (None, size or sizes["vocab_size"]):
        raise ValueError(f"draft_vocab_size is {config['draft_vocab_size']}, but d2t and lm_head have {size or 'all'}")
    sizes |= {
        "draft_vocab_size": size,
        "own_lm_head": "projection.weight" in state,
        "feature_layers": tuple(layers),
        "norm_before_residual": flag(config, "norm_before_residual"),
    }
    return sizes, state


def read_aux_layers(config: Mapping[str, Any], num_layers: int, aux: str | None) -> list[int]:
    """Return which decoder layers a head reads, as `Head.feature_layers`.

    Raises:
        ValueError: If only the nested list is there and nobody says whose meaning it has, or the other way round; or
            if the target has no such layers.
    """
    top, nested = config.get(IDS), section(config, "eagle_config").get(IDS)
    if aux not in (None, *MEANINGS):
        raise ValueError(f"aux must be one of {', '.join(MEANINGS)}, got {aux!r}")
    if aux is not None and (top or not nested):
        raise ValueError(
            f"aux (--aux) says what eagle_config.{IDS} means, which this config does not need; leave it out"
        )
    if nested and not top and aux is None:
        raise ValueError(
            f"eagle_config.{IDS} is {nested}, which vLLM reads as outputs of the layers before these and SGLang as "
            "outputs of these; say which the head was trained for: aux='vllm' or 'sglang' (--aux)"
        )
    for found in (top, nested):
        if found is not None and not (isinstance(found, list) and all(type(layer) is int for layer in found)):
            raise ValueError(f"{IDS} must be a list of numbers, got {found!r}")
    if top and nested and nested not in (top, [layer - 1 for layer in top]):
        raise ValueError(f"{IDS} is {top}, but {nested} in eagle_config; delete the one that is wrong")
    layers = [layer + (aux == "sglang") for layer in top or nested or default_layers(num_layers)]
    if layers != sorted(set(layers)) or layers[0] < 1 or layers[-1] > num_layers:
        raise ValueError(
            f"the head reads outputs of layers {layers}, which must ascend from 1 to the target's {num_layers}"
        )
    return layers
