"""The decoder layers of Llama-like models, compiled by torch: `Target(..., compile=True)`.

What stands before and behind attention is one function each of states and weights, so all layers share two compiled
functions. Sizes are symbolic, but for one row or one node against several: each of these four is compiled when it first
comes, which takes seconds. Attention and the cache
stay outside, where slots change from step to step. Meant for GPUs, where a pass over few nodes waits for kernels to be
started; on a CPU packed weights are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from decode.fused import FAMILIES, LayerForward, is_known_layer, norm_parameters, normed, pack_model, rotate
from decode.placed import is_placed
from decode.quantized import is_rounded
from decode.sharded import is_sharded
from decode.support import UnsupportedTargetError
from heads.packing import PackedModules

Norm = tuple[Tensor, float]
"""Weight and epsilon."""
Linear = tuple[Tensor, Tensor | None]
"""Weight and bias."""


def faster_layers(model: PreTrainedModel, *, pack: bool, compile: bool) -> PackedModules | None:
    """Compile a model's layers or pack them, as asked for; those that are rounded or spread can only be left alone.

    Raises:
        ValueError: If these are to be compiled.
        UnsupportedTargetError: If there are none that can be.
    """
    whole = not is_rounded(model) and not is_placed(model) and not is_sharded(model)
    if compile and not whole:
        raise ValueError("compile=True knows whole layers on one device; leave quantize, device_map and shard out")
    return compile_model(model) if compile else pack_model(model) if pack and whole else None


def compile_model(model: nn.Module) -> PackedModules:
    """Compile a model's decoder layers, in place; the first passes take seconds.

    Raises:
        UnsupportedTargetError: If it has none that are known.
    """
    before = torch.compile(_before, dynamic=True)
    after = torch.compile(_after, dynamic=True)
    layers = [(m, CompiledLayer(m, before, after)) for m in model.modules() if is_known_layer(m)]
    if not layers:
        names = ", ".join(name.split(".")[0] for name in FAMILIES)
        raise UnsupportedTargetError(
            f'compile=True knows the decoder layers of {names} with attention "sdpa", but {type(model).__name__} has '
            "none of them; leave it out"
        )
    return PackedModules(layers)


class CompiledLayer(LayerForward):
    """A decoder layer whose arithmetic is compiled."""

    def __init__(self, layer: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__(layer)
        self._before, self._after = before, after

    def can_compute(self, states: Tensor) -> bool:
        """Return whether no gradients are wanted; see `LayerForward`."""
        return not torch.is_grad_enabled()

    def before(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; see `LayerForward`."""
        attention = self._attention
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        found: tuple[Tensor, Tensor, Tensor] = self._before(
            states,
            *rotation,
            norm_parameters(self._layer.input_layernorm),
            [(linear.weight, linear.bias) for linear in linears],
            list(map(norm_parameters, self._qk_norms)),
            attention.head_dim,
        )
        return found

    def after(self, attended: Tensor, states: Tensor) -> Tensor:
        """Return the layer's output; see `LayerForward`."""
        norm, mlp = norm_parameters(self._layer.post_attention_layernorm), self._mlp
        linears = (self._attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        weights = [(linear.weight, linear.bias) for linear in linears]
        output: Tensor = self._after(attended, states, norm, weights, mlp.act_fn)
        return output


def _before(
    states: Tensor, cos: Tensor, sin: Tensor, norm: Norm, linears: list[Linear], qk_norms: list[Norm], head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values: [B, N, D] -> [B, N, heads or H, E]."""
    x = normed(states, *norm)
    queries, keys, values = (torch.unflatten(F.linear(x, *linear), -1, (-1, head_dim)) for linear in linears)
    if qk_norms:
        queries, keys = normed(queries, *qk_norms[0]), normed(keys, *qk_norms[1])
    return rotate(queries, cos, sin), rotate(keys, cos, sin), values


def _after(attended: Tensor, states: Tensor, norm: Norm, linears: list[Linear], act: Callable[..., Tensor]) -> Tensor:
    """Return the layer's output: [B, N, heads * E], [B, N, D] -> [B, N, D]."""
    output, gate, up, down = linears
    states = states + F.linear(attended, *output)
    x = normed(states, *norm)
    return states + F.linear(act(F.linear(x, *gate)) * F.linear(x, *up), *down)
