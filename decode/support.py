"""Which models trees can be decoded on: what is refused by name, and the probe that every other model must pass."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from decode.placed import is_placed
from decode.tree import TokenTree, tree_shape
from heads.transfer import to_device

if TYPE_CHECKING:
    from decode.target import Target

_LONGEST_WINDOW_PROBED = 64


class UnsupportedTargetError(NotImplementedError):
    """The model cannot be decoded exactly with trees; the message names the part and what is supported."""


def layer_kinds(config: PretrainedConfig) -> set[str] | None:
    """Return the kinds of attention layers a text config names, or None if it names none."""
    kinds = config.to_dict().get("layer_types")
    return None if kinds is None else set(kinds)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse models whose state cannot be rolled back, or that take no tree mask.

    Raises:
        UnsupportedTargetError: With the model's name and the reason.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedTargetError(f"{name} is an encoder-decoder; Gorgon decodes decoder-only causal LMs")
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise UnsupportedTargetError(f"{name} has no lm_head; load it with AutoModelForCausalLM")
    devices = {parameter.device for parameter in (_ends(model) if is_placed(model) else model).parameters()}
    if len(devices) > 1:
        raise UnsupportedTargetError(
            f"{name} is spread over {', '.join(sorted(map(str, devices)))}, of which heads need one for embedding and "
            "lm_head; load it with Target.from_pretrained(..., device_map=...)"
        )
    unknown = (layer_kinds(config) or set()) - {"full_attention", "sliding_attention"}
    if unknown or model._is_stateful:
        raise UnsupportedTargetError(
            f"{name} has {', '.join(sorted(unknown)) or 'recurrent'} layers, whose state cannot be rolled back to drop "
            "rejected tokens; supported are full_attention and sliding_attention"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise UnsupportedTargetError(
            f'attention {attention!r} takes no tree mask; load the model with attn_implementation="sdpa" or "eager"'
        )


def _ends(model: PreTrainedModel) -> nn.ModuleList:
    """Return the parts that heads read."""
    return nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])  # type: ignore[no-untyped-call]


@torch.inference_mode()
def probe(target: Target) -> bool:
    """Compare a tree pass after a prefill with plain forwards over two paths, past the window of small windows.

    Returns:
        Whether the logits are the lm_head's output as it is; some models scale or cap it.

    Raises:
        UnsupportedTargetError: If they differ by more than rounding, or the model does not take the pass at all.
    """
    name = type(target.model).__name__
    window = target.window or 0
    length = window + 4 if window <= _LONGEST_WINDOW_PROBED else 4
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(target.vocab_size, 1000), (length + 5,), generator=generator).tolist()
    prompt, nodes = ids[:length], ids[length:]
    tree = TokenTree(to_device(nodes, target.device), tree_shape((-1, 0, 0, 1, 2)))
    try:
        session = target.session(1, length + tree.shape.size)
        session.prefill([prompt])
        out = session.score([tree])
        scored = out.logits[0, 3:].float()
        plain = []
        with contextlib.nullcontext() if target.packed is None else target.packed.disabled():
            for path in ((0, 1, 3), (0, 2, 4)):
                text = to_device([[*prompt, *(nodes[node] for node in path)]], target.device)
                plain.append(target.model(input_ids=text, use_cache=False).logits[0, -1].float())
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedTargetError(f"{name} cannot score a token tree: {error}") from error
    reference = torch.stack(plain)
    difference = float((scored - reference).abs().max() / reference.abs().max())
    allowed = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1
    if not difference <= allowed:
        raise UnsupportedTargetError(
            f"{name} gives other logits for a token tree than for plain text (relative difference {difference:.2g}, "
            f"allowed {allowed}); its positions or masks are not of a kind that trees can use"
        )
    plain_logits = target.lm_head(out.hidden[0, 3:]).float()
    return bool((plain_logits - scored).abs().max() <= allowed * scored.abs().max())
