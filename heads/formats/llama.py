"""What configs of EAGLE-like heads share: they look like those of a small Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heads.formats.target_files import TargetFiles
from heads.layers import LayerConfig

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def llama_config(config: LayerConfig, target: TargetFiles) -> dict[str, Any]:
    """Return a Llama config of one layer, with the sizes of a head and the vocabulary and length of its target.

    Rotary positions are written in the old way and in the new one, as some engines read the one, some the other.
    """
    text = target.text_config
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": target.number("max_position_embeddings", "n_positions"),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **{name: text[name] for name in IDS if text.get(name) is not None},
    }


def read_layer_config(config: Mapping[str, Any], target: TargetFiles) -> dict[str, Any]:
    """Return the sizes of a head's layer from a Llama config.

    Raises:
        ValueError: If something in it is not what our heads compute, or a size is missing or not the target's.
    """
    vocab_size, hidden_size = target.lm_head.weight.shape
    for name, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size), ("target_hidden_size", hidden_size)):
        if config.get(name, size) not in (size, None):
            raise ValueError(f"{name} is {config[name]}, but that of the target {target.name} is {size}")
    for name, value in (("num_hidden_layers", 1), ("hidden_act", "silu")):
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {config[name]!r}; heads here have {value!r}")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ValueError(f"{name} is set; layers of heads here have no biases")
    heads = _number(config, "num_attention_heads")
    return {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "intermediate_size": _number(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(config, "num_key_value_heads", heads),
        "head_dim": _number(config, "head_dim", hidden_size // heads),
        "rms_norm_eps": float(_number(config, "rms_norm_eps", 1e-6)),
        "rope_theta": _rope_theta(config),
    }


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a config; an empty one where it is missing or null.

    Raises:
        ValueError: If it is no object.
    """
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"config.json must have an object as {name}, got {found!r}")
    return found


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    """Return a number above 0; the default where it is missing or null."""
    found = default if config.get(name) is None else config[name]
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise ValueError(f"config.json must have {name}, a number above 0, got {found!r}")
    return found


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of plain rotary positions, written in the old way or in the new one."""
    new, old = section(config, "rope_parameters"), section(config, "rope_scaling")
    for name, found in (("rope_parameters", new), ("rope_scaling", old)):
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{name} asks for {kind!r} positions; heads here have plain ones")
    base = _number(config, "rope_theta", 10000.0)  # Llama's
    return float(_number(new, "rope_theta", base))
