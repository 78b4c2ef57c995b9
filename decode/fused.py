"""The decoder layers of Llama-like models in few large operations, for inference on a CPU.

A small model's pass over a few nodes spends a third of its time between the matrix products: seven of them a layer,
each started and joined on all threads, and some forty small operations. Here a layer is four products with packed
weights (queries, keys and values in one; gate and up in one; residuals added on the way) and a dozen small operations,
and grouped K/V are read without being repeated. The result is the layer's own but for the rounding of sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.layers import may_share
from heads.memory import give_back
from heads.packing import PackedForward, PackedLinear, PackedModules
from heads.products import PackedProduct, can_pack, may_use

FAMILIES = ("llama.modeling_llama", "mistral.modeling_mistral", "qwen2.modeling_qwen2", "qwen3.modeling_qwen3")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def pack_model(model: nn.Module) -> PackedModules:
    """Pack a model in place: decoder layers that are known here as a whole, all other linear layers one by one."""
    forwards: list[tuple[nn.Module, PackedForward]] = [(m, FusedLayer(m)) for m in model.modules() if _can_fuse(m)]
    inside = {part for layer, _ in forwards for part in layer.modules()}
    forwards += [(m, PackedLinear(m)) for m in model.modules() if can_pack(m) and m not in inside]
    return PackedModules(forwards)


def give_up_weights(model: nn.Module, packed: PackedModules, *, keep: nn.Module) -> None:
    """Keep the packed weights of a model only, and the plain ones of `keep`."""
    packed.release(keep=keep)
    for parameter in model.parameters():  # others may be views into the checkpoint's file, which they hold
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    packed.repack()
    give_back()


def _can_fuse(module: nn.Module) -> bool:
    """Return whether it is a layer that is known here, whose weights can be packed."""
    return is_known_layer(module) and all(map(can_pack, layer_linears(module)))


def is_known_layer(module: nn.Module) -> bool:
    """Return whether it is a decoder layer of a known family, with that family's parts and plain linear layers."""
    family = type(module).__module__
    is_layer = type(module).__qualname__.endswith("DecoderLayer")
    if not is_layer or family not in {f"transformers.models.{name}" for name in FAMILIES}:
        return False
    attention, mlp = module.get_submodule("self_attn"), module.get_submodule("mlp")
    norms = [part for name, part in module.named_modules() if name.endswith(("layernorm", "_norm"))]
    return (
        all(type(part).__module__ == family for part in (attention, mlp, *norms))
        and all(type(linear) is nn.Linear for linear in layer_linears(module))
        and attention.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    )


def layer_linears(layer: nn.Module) -> list[nn.Module]:
    """Return the linear layers of a decoder layer of a known family."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    return [attention.get_submodule(name) for name in _ATTENTION] + [mlp.get_submodule(name) for name in _MLP]


class LayerForward(ABC):
    """Replaces `forward` of one decoder layer of a known family; subclasses compute what is not attention."""

    def __init__(self, layer: Any) -> None:
        """Take a layer; its norms and settings are read where they are."""
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._attention, self._mlp = layer, attention, mlp
        heads, kv_heads = (linear.out_features // attention.head_dim for linear in (attention.q_proj, attention.k_proj))
        self._sizes = [heads, kv_heads, kv_heads]
        self._qk_norms = [part for name, part in attention.named_children() if name in ("q_norm", "k_norm")]
        self._parts = [(module, dict(module._modules)) for module in (layer, attention, mlp)]

    @property
    def products(self) -> Sequence[PackedProduct]:
        """Products with packed weights; none here."""
        return ()

    @abstractmethod
    def can_compute(self, states: Tensor) -> bool:
        """Return whether the layer may be computed in this way; else it computes in its own."""

    @abstractmethod
    def before(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, [B, N, heads or H, E] each."""

    @abstractmethod
    def after(self, attended: Tensor, states: Tensor) -> Tensor:
        """Return the layer's output from what the heads read, [B, N, heads * E], and its input: [B, N, D]."""

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
        usable = self.can_compute(hidden_states)
        if args or position_embeddings is None or not usable or not self._is_whole():
            given = {"position_embeddings": position_embeddings, "cache": cache, "past_key_values": past_key_values}
            given = {name: value for name, value in given.items() if value is not None}
            return self._plain(hidden_states, attention_mask, *args, **given, **kwargs)
        used = cache if cache is not None else past_key_values
        queries, keys, values = self.before(hidden_states, position_embeddings)
        return self.after(self._attend(queries, keys, values, attention_mask, used), hidden_states)

    def _is_whole(self) -> bool:
        """Return whether the layer's modules are still those that were taken; adapters take their places."""
        return all(module._modules == parts for module, parts in self._parts)

    def _plain(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer in its own way."""
        for product in self.products:
            product.require_weights()
        states: Tensor = type(self._layer).forward(self._layer, *args, **kwargs)
        return states

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Return what the heads read, side by side: [B, N, heads * E]."""
        rows, length = queries.shape[:2]
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        if cache is not None:
            keys, values = cache.update(keys, values, self._attention.layer_idx)
        causal = mask is None and length > 1
        if causal:  # a static cache gives its empty slots too
            keys, values = keys[:, :, :length], values[:, :, :length]
        groups = queries.shape[1] // keys.shape[1]
        shares = mask is None or groups == 1 or may_share(queries.device)
        if not shares:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=causal, scale=self._attention.scaling, enable_gqa=shares
        )
        return attended.transpose(1, 2).reshape(rows, length, -1)


class FusedLayer(LayerForward):
    """A decoder layer as four products with packed weights."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        attention, mlp = self._attention, self._mlp
        self._qkv = PackedProduct([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = PackedProduct([attention.o_proj])
        self._gate_up = PackedProduct([mlp.gate_proj, mlp.up_proj])
        self._down = PackedProduct([mlp.down_proj])
        self._products = (self._qkv, self._output, self._gate_up, self._down)

    @property
    def products(self) -> Sequence[PackedProduct]:
        """The four of the layer."""
        return self._products

    def can_compute(self, states: Tensor) -> bool:
        """Return whether the packed weights can be used; see `LayerForward`."""
        return may_use(self._products, states)

    def before(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; see `LayerForward`."""
        rows, length, _ = states.shape
        qkv = self._qkv(normed(states, *norm_parameters(self._layer.input_layernorm))).view(
            rows, length, sum(self._sizes), -1
        )
        if not self._qk_norms:  # rotated together
            rotated = rotate(qkv[:, :, : -self._sizes[2]], *rotation)
            queries, keys = torch.split(rotated, self._sizes[:2], dim=2)
            return queries, keys, qkv[:, :, -self._sizes[2] :]
        queries, keys, values = torch.split(qkv, self._sizes, dim=2)
        queries, keys = (
            normed(part, *norm_parameters(norm)) for part, norm in zip((queries, keys), self._qk_norms, strict=True)
        )
        return rotate(queries, *rotation), rotate(keys, *rotation), values

    def after(self, attended: Tensor, states: Tensor) -> Tensor:
        """Return the layer's output; see `LayerForward`."""
        states = self._output(attended, states)
        gate, up = self._gate_up(normed(states, *norm_parameters(self._layer.post_attention_layernorm))).chunk(
            2, dim=-1
        )
        return self._down(self._mlp.act_fn(gate) * up, states)


def norm_parameters(norm: Any) -> tuple[Tensor, float]:
    """Return weight and epsilon of an RMSNorm of transformers'."""
    return norm.weight, norm.variance_epsilon


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply an RMSNorm in one operation: [..., D] -> [..., D]."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys by their positions: [B, N, heads, E], [B or 1, N, E] twice -> [B, N, heads, E]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]
