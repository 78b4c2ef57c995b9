"""EAGLE-3 heads in the format of vllm-project's speculators library; vLLM needs no more than such a folder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.eagle3 import Eagle3Head
from heads.formats import eagle3
from heads.formats.folder import CONFIG, Foreign
from heads.formats.llama import llama_config
from heads.formats.target_files import TargetFiles

HEAD_TYPE = "eagle3"
VERSION = "0.9.0"
"""Of the library whose files these are."""
TOKENS = 4
"""Drafted in each step, if nobody says how many."""
CONVENTION = "the speculators library's EAGLE-3: fc, layers.0, norm, lm_head, embed_tokens, d2t of offsets, t2d"


def to_engine(head: Eagle3Head, target: TargetFiles, *, tokens: int = TOKENS) -> Foreign:
    """Return an EAGLE-3 head as this library writes it.

    Args:
        head: The head.
        target: Its target; the folder's name is written, and read by vLLM.
        tokens: How many tokens vLLM drafts in a step.

    Raises:
        ValueError: If there are none.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    config = head.config
    layers = list(config.feature_layers)
    layer = {**llama_config(config, target), "architectures": ["LlamaForCausalLM"]}
    if len(layers) != 3:  # which vLLM takes for granted unless it reads this
        layer["num_aux_hidden_states"] = len(layers)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": config.norm_before_residual,
        **dict.fromkeys(eagle3.FLAGS, False),
        "embed_requires_grad": False,
        eagle3.IDS: layers,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": target.config.get("architectures", [])},
        },
    }
    notes = [f"vLLM takes the target from {target.name}, as written in {CONFIG}; from elsewhere, pass the head to it"]
    return Foreign(written, eagle3.tensors(head, eagle3.OTHER_LAYER), notes)


def from_engine(foreign: Foreign, target: TargetFiles) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return sizes and weights of a head in this format; see `heads.adopt`.

    Raises:
        ValueError: If it is none, or one that heads here cannot be.
    """
    config = foreign.config
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"speculators_model_type is {kind!r}; heads here can be 'eagle3'")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("config.json has no transformer_layer_config")
    if "norm_before_residual" not in config:
        foreign.notes.append(
            "norm_before_residual is not in config.json: taken as false, the library's default; vLLM takes it as true"
        )
    return eagle3.from_engine(Foreign({**layer, **config}, foreign.tensors), target)
