"""The decoder layers of Llama-like models in few large operations, for inference on a CPU.

A small model's pass over a few nodes spends a third of its time between the matrix products: seven of them a layer,
each started and joined on all threads, and some forty small operations. Here a layer is four products with packed
weights (queries, keys and values in one; gate and up in one; residuals added on the way) and a dozen small operations,
and grouped K/V are read without being repeated. The result is the layer's own but for the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.packing import PackedForward, PackedLinear, PackedModules, PackedProduct, can_pack, may_use

_FAMILIES = ("llama.modeling_llama", "mistral.modeling_mistral", "qwen2.modeling_qwen2", "qwen3.modeling_qwen3")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def pack_model(model: nn.Module) -> PackedModules:
    """Pack a model in place: decoder layers that are known here as a whole, all other linear layers one by one."""
    forwards: list[tuple[nn.Module, PackedForward]] = [(m, FusedLayer(m)) for m in model.modules() if _can_fuse(m)]
    inside = {part for layer, _ in forwards for part in layer.modules()}
    forwards += [(m, PackedLinear(m)) for m in model.modules() if can_pack(m) and m not in inside]
    return PackedModules(forwards)


def _can_fuse(module: nn.Module) -> bool:
    """Return whether it is a decoder layer of a known family, with that family's parts and plain linear layers."""
    family = type(module).__module__
    is_layer = type(module).__qualname__.endswith("DecoderLayer")
    if not is_layer or family not in {f"transformers.models.{name}" for name in _FAMILIES}:
        return False
    attention, mlp = module.get_submodule("self_attn"), module.get_submodule("mlp")
    norms = [part for name, part in module.named_modules() if name.endswith(("layernorm", "_norm"))]
    linears = [attention.get_submodule(name) for name in _ATTENTION] + [mlp.get_submodule(name) for name in _MLP]
    return (
        all(type(part).__module__ == family for part in (attention, mlp, *norms))
        and all(map(can_pack, linears))
        and attention.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    )


class FusedLayer:
    """Replaces `forward` of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        """Pack a layer of one of the families above; its norms and settings are read where they are."""
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._attention, self._mlp = layer, attention, mlp
        self._heads = attention.q_proj.out_features // attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self._qk_norms = [part for name, part in attention.named_children() if name in ("q_norm", "k_norm")]
        self._qkv = PackedProduct([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = PackedProduct([attention.o_proj])
        self._gate_up = PackedProduct([mlp.gate_proj, mlp.up_proj])
        self._down = PackedProduct([mlp.down_proj])
        self._products = (self._qkv, self._output, self._gate_up, self._down)

    @property
    def products(self) -> Sequence[PackedProduct]:
        """The four of the layer."""
        return self._products

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the layer: [B, N, D] -> [B, N, D]; arguments as transformers gives them.

        Args:
            hidden_states: [B, N, D].
            attention_mask: [B or 1, 1, N, S], bool or additive; None for causal attention.
            args: As the layer takes them.
            position_embeddings: Cosines and sines, [B or 1, N, E] each.
            cache: Where K/V go, or None.
            past_key_values: The same, in older versions of transformers.
            kwargs: As the layer takes them.
        """
        if args or position_embeddings is None or not may_use(self._products, hidden_states):
            given = {"position_embeddings": position_embeddings, "cache": cache, "past_key_values": past_key_values}
            given = {name: value for name, value in given.items() if value is not None}
            plain: Tensor = type(self._layer).forward(
                self._layer, hidden_states, attention_mask, *args, **given, **kwargs
            )
            return plain
        used = cache if cache is not None else past_key_values
        attended = self._attend(hidden_states, attention_mask, position_embeddings, used)
        hidden_states = self._output(attended, hidden_states)
        gate_up = self._gate_up(_normed(hidden_states, self._layer.post_attention_layernorm))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(self._mlp.act_fn(gate) * up, hidden_states)

    def _attend(self, states: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        """Return what the heads read, side by side: [B, N, D] -> [B, N, heads * E]."""
        rows, length, _ = states.shape
        sizes = [self._heads, self._kv_heads, self._kv_heads]
        qkv = self._qkv(_normed(states, self._layer.input_layernorm)).view(rows, length, sum(sizes), -1)
        if self._qk_norms:
            q, k, v = torch.split(qkv, sizes, dim=2)
            q, k = (_normed(part, norm) for part, norm in zip((q, k), self._qk_norms, strict=True))
            rotated, values = _rotate(torch.cat([q, k], dim=2), *rotation), v
        else:
            rotated, values = _rotate(qkv[:, :, : -self._kv_heads], *rotation), qkv[:, :, -self._kv_heads :]
        queries, keys = (part.transpose(1, 2) for part in torch.split(rotated, sizes[:2], dim=2))
        values = values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, self._attention.layer_idx)
        causal = mask is None and length > 1
        if causal:  # a static cache gives its empty slots too
            keys, values = keys[:, :, :length], values[:, :, :length]
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=causal, scale=self._attention.scaling, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(rows, length, -1)


def _normed(x: Tensor, norm: Any) -> Tensor:
    """Apply an RMSNorm of transformers' in one operation: [..., D] -> [..., D]."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys by their positions: [B, N, heads, E], [B or 1, N, E] twice -> [B, N, heads, E]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]
