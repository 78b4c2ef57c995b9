"""Training-time test: a draft layer trained on what it will meet in decoding, its own outputs.

Decoding starts a chain at a root: its first token is drafted from the target's feature before the root, the next from
the layer's own output, and so on; each drafted token attends to the committed text up to the root and to the drafted
tokens of its own chain, never to those of others. `unroll` computes all chains of a batch at once (Li et al. 2025,
EAGLE-3, arXiv:2503.01840, section 3.2; its figure 6 is the attention pattern). The first step is EAGLE-1's training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.labels import Labels
from heads.layers import DecoderLayer, attend

LayerInput = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Token embeddings and features, [..., D] each, to what attention reads [..., input] and the residual [..., D]."""


@dataclass(frozen=True)
class Chains:
    """The places of a batch where a chain is drafted; Q is the most of any row."""

    positions: Tensor
    """[B, Q] int64 position of the target's last state before each root, ascending; 0 where a row has fewer."""
    valid: Tensor
    """[B, Q] bool."""
    numbers: Tensor
    """[B, T] int64 number of the chain that starts at each position; 0 where none does."""


def find_chains(labels: Labels, rows: int, length: int) -> Chains:
    """Return the chains that some label of `labels` needs, for a batch of [rows, length] tokens."""
    starts = labels.active.new_zeros(rows, length)
    starts[labels.rows[:, None].expand_as(labels.active)[labels.active], labels.sources()[labels.active]] = True
    most = max(1, int(starts.sum(1).max()))  # at least one, so that every parameter takes part in every step
    order = starts.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    valid = starts.gather(1, order)
    numbers = (starts.cumsum(1) - 1).clamp(min=0)
    return Chains(order * valid, valid, numbers)


def unroll(
    layer: DecoderLayer, layer_input: LayerInput, embedded: Tensor, features: Tensor, chains: Chains, depth: int
) -> Tensor:
    """Draft `depth` tokens at every chain, along the text's own tokens.

    Step k of the chain at position p reads the token at p + 1 + k and the feature at p (k = 0: the target's, else the
    output of step k - 1), at rotary position p + k.

    Args:
        layer: The draft layer.
        layer_input: How it reads a token and a feature.
        embedded: [B, T, D] token embeddings, T at least 2.
        features: [B, T, D] the target's features.
        chains: Where to draft.
        depth: K.

    Returns:
        [B, Q, K, D] the layer's outputs.
    """
    attention = layer.self_attn
    size = embedded.shape[1] - 1
    inputs, residuals = layer_input(embedded[:, 1:], features[:, :-1])
    slots = torch.arange(size, device=embedded.device)
    keys, values = attention.keys_values(inputs, slots.expand(len(embedded), -1))
    visible = slots <= chains.positions[..., None]  # [B, Q, T - 1]
    queries = attention.queries(_at(inputs, chains.positions), chains.positions)
    outputs = [layer.finish(_at(residuals, chains.positions), attend(queries, keys, values, visible))]
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(1, depth):
        token = _at(embedded, (chains.positions + 1 + step).clamp(max=size))
        inputs, residuals = layer_input(token, outputs[-1])
        own.append(attention.keys_values(inputs, chains.positions + step))
        queries = attention.queries(inputs, chains.positions + step)
        outputs.append(layer.finish(residuals, attend_with_own(queries, keys, values, visible, own)))
    return torch.stack(outputs, dim=2)


def attend_with_own(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attend to the committed text and, each chain for itself, to the chain's drafted tokens.

    Args:
        queries: [B, heads, Q, E], one for each chain.
        keys: [B, H, S, E] of the text.
        values: [B, H, S, E].
        visible: [B, Q, S] bool, what each chain sees of the text.
        own: Keys and values [B, H, Q, E] of each drafted step: entry q belongs to chain q.

    Returns:
        [B, heads, Q, E].
    """
    b, _, q, e = queries.shape
    grouped = queries.reshape(b, keys.shape[1], -1, q, e) * e**-0.5  # [B, H, heads / H, Q, E]
    scores = grouped @ keys[:, :, None].transpose(-1, -2)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    diagonal = torch.stack([(grouped * key[:, :, None]).sum(-1) for key, _ in own], dim=-1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.cat([scores, diagonal], dim=-1).softmax(-1, dtype=exact).to(scores.dtype)
    text = keys.shape[2]
    mixed = weights[..., :text] @ values[:, :, None]
    for step, (_, value) in enumerate(own):
        mixed = mixed + weights[..., text + step, None] * value[:, :, None]
    return mixed.flatten(1, 2)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """[B, T, D], [B, Q] -> [B, Q, D]."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
