"""A Llama-shaped decoder layer for heads that attend to the text (EAGLE, EAGLE-3, Hydra++).

Parameter names are those of Hugging Face's Llama, which the engines read. Projections, `attend` and `finish` are
separate steps, because decoding attends to a cache and training to an unroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import HeadConfig, from_target
from heads.cache import TreeCache
from heads.packing import SharedInput, add_output, outputs
from heads.transfer import to_device

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary angles, [B, 1, N, E / 2] each."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """Sizes of a head's decoder layer: those of the target's own layers."""

    intermediate_size: int = from_target()
    """Width of the MLP."""
    num_attention_heads: int = from_target()
    """Query heads."""
    num_key_value_heads: int = from_target()
    """H, key and value heads; queries share them in groups."""
    head_dim: int = from_target()
    """E."""
    rms_norm_eps: float = from_target()
    rope_theta: float = from_target()
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        """Reject heads that cannot be rotated."""
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467), in float32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if x.dtype == torch.float32 and not torch.is_grad_enabled():  # the same but for rounding
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (precise * scale).to(x.dtype)


class Attention(SharedInput):
    """Projections of grouped-query attention with rotary positions (Su et al. 2021, arXiv:2104.09864)."""

    def __init__(self, config: LayerConfig, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.num_kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.theta = config.rope_theta

    @property
    def same_input(self) -> tuple[nn.Linear, ...]:
        """Those of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, N, input], [B, N] -> rotated queries [B, heads, N, E]."""
        return _rotate(self._split(self.q_proj(x)), self.rotation(positions, x.dtype))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, input], [B, N] -> rotated keys and values, [B, H, N, E] each."""
        keys = _rotate(self._split(self.k_proj(x)), self.rotation(positions, x.dtype))
        return keys, self._split(self.v_proj(x))

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return `queries` and both `keys_values` at once, for drafting."""
        queries, keys, values = outputs(self.same_input, x)
        rotated = _rotate(self._split(torch.cat([queries, keys], dim=-1)), rotation)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], self._split(values)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return how queries and keys at positions [B, N] are rotated."""
        exact = torch.promote_types(dtype, torch.float32)
        half = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=exact) / self.head_dim
        angles = positions[:, None, :, None] * self.theta**-half  # [B, 1, N, E / 2]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(SharedInput):
    """Gated MLP with SiLU."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    @property
    def same_input(self) -> tuple[nn.Linear, ...]:
        """Those that widen."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[..., D] twice -> [..., D], the residual added."""
        gate, up = outputs(self.same_input, x)
        return add_output(residual, self.down_proj, F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream; what is normalised before attention is the caller's affair."""

    def __init__(self, config: LayerConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add attention's result [B, heads, N, E] and the MLP's to the residual stream [B, N, D]."""
        x = add_output(residual, self.self_attn.o_proj, attended.transpose(1, 2).flatten(2))
        result: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return result


def positions_behind(cache: TreeCache, count: int, device: torch.device) -> Tensor:
    """Return the next `count` positions of each row: [B, count]."""
    return to_device(cache.lengths, device)[:, None] + torch.arange(count, device=device)


def read_on(
    layer: DecoderLayer,
    inputs: Tensor,
    residuals: Tensor,
    lengths: Sequence[int],
    cache: TreeCache,
    rotation: Rotation,
) -> Tensor:
    """Add new places of texts to the layer's K/V, and return its output at each row's last.

    There is no layer above that would look at the others' outputs.

    Args:
        layer: The layer.
        inputs: [B, L, input] what its attention reads; row b holds `lengths[b]`.
        residuals: [B, L, D] the residual stream.
        lengths: New places in each row.
        cache: K/V of the texts so far; a tree grown behind them is forgotten.
        rotation: That of the positions behind the cache, at least L.

    Returns:
        [B, 1, D].
    """
    device, size = inputs.device, inputs.shape[1]
    cache.forget_tree()
    cache.reserve_for(size)
    rows, last = torch.arange(len(lengths), device=device), to_device(lengths, device) - 1
    cache.begin(size, device)
    cos, sin = rotation
    queries, keys, values = layer.self_attn.project(inputs, (cos[:, :, :size], sin[:, :, :size]))
    keys, values = cache.write(0, keys, values)
    cache.commit([range(length) for length in lengths])
    ends = to_device(cache.lengths, device)  # slots behind them hold padding
    visible = torch.arange(keys.shape[2], device=device) < ends[:, None, None]  # [B, 1, slots]
    queries = queries[rows, :, last][:, :, None]
    return layer.finish(residuals[rows, last][:, None], attend(queries, keys, values, visible))


def may_share(device: torch.device) -> bool:
    """Return whether attention with a mask may read grouped K/V as they are.

    On a GPU no fused kernel takes groups and a mask together.
    """
    return device.type == "cpu"


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Scaled dot-product attention with grouped heads.

    Args:
        queries: [B, heads, N, E].
        keys: [B, H, S, E].
        values: [B, H, S, E].
        visible: [B, N, S] bool.

    Returns:
        [B, heads, N, E].
    """
    groups = queries.shape[1] // keys.shape[1]
    shares = groups > 1 and may_share(queries.device)
    if groups > 1 and not shares:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible[:, None], enable_gqa=shares)
