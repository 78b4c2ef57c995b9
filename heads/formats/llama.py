"""What configs of EAGLE-like heads share: they look like those of a small Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heads.formats.folder import section
from heads.formats.target_files import TargetFiles
from heads.layers import LayerConfig

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FACTORS = ("logit_scale", "partial_rotary_factor")
"""What engines read in such configs and heads here do not have, but for 1."""
PLAIN_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section")
"""What may be said of plain positions; in text those of several axes are the same."""
HUGE = 2**63
"""More than any integer of torch."""


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
        if flag(config, name):
            raise ValueError(f"{name} is set; layers of heads here have no biases")
    for name in FACTORS:
        if config.get(name) not in (None, 1.0):
            raise ValueError(f"{name} is {config[name]!r}; heads here have none")
    heads = _number(config, "num_attention_heads", kind=int)
    return {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "intermediate_size": _number(config, "intermediate_size", kind=int),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(config, "num_key_value_heads", heads, kind=int),
        "head_dim": _number(config, "head_dim", hidden_size // heads, kind=int),
        "rms_norm_eps": float(_number(config, "rms_norm_eps", 1e-6)),
        "rope_theta": _rope_theta(config),
    }


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a yes or no of a config; the default where it is missing or null.

    Raises:
        ValueError: If it is something else, such as "false".
    """
    found = default if config.get(name) is None else config[name]
    if not isinstance(found, bool):
        raise ValueError(f"config.json must have {name} as true or false, got {found!r}")
    return found


def _number(
    config: Mapping[str, Any], name: str, default: float | None = None, *, kind: type[int] | type[float] = float
) -> Any:
    """Return a number above 0; the default where it is missing or null."""
    found = default if config.get(name) is None else config[name]
    if isinstance(found, bool) or not isinstance(found, int | kind) or not 0 < found < HUGE:
        raise ValueError(
            f"config.json must have {name}, {'an integer' if kind is int else 'a number'} above 0, got {found!r}"
        )
    return found


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of plain rotary positions, written in the old way or in the new one."""
    new, old = section(config, "rope_parameters"), section(config, "rope_scaling")
    for name, found in (("rope_parameters", new), ("rope_scaling", old)):
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{name} asks for {kind!r} positions; heads here have plain ones")
        strange = [key for key, value in found.items() if value is not None and key not in PLAIN_ROPE]
        if strange or found.get("partial_rotary_factor") not in (None, 1.0):
            raise ValueError(f"{name} is {dict(found)}; heads here have plain positions, with nothing but a rope_theta")
    bases = {float(_number(part, "rope_theta")) for part in (config, new) if part.get("rope_theta") is not None}
    if len(bases) > 1:
        raise ValueError(
            f"rope_theta is {config['rope_theta']} and in rope_parameters {new['rope_theta']}; delete the wrong one"
        )
    return next(iter(bases), 10000.0)  # Llama's
