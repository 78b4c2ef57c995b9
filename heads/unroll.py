"""Training-time test: a draft layer trained on what it will meet in decoding, its own outputs.

Decoding starts a chain at a root: its first token is drafted from the target's feature before the root, the next from
the layer's own output, and so on; each drafted token attends to the committed text up to the root and to the drafted
tokens of its own chain, never to those of others. `unroll` computes all chains of a batch at once (Li et al. 2025,
EAGLE-3, arXiv:2503.01840, section 3.2; its figure 6 is the attention pattern). The first step is EAGLE-1's training.
"""

from __future__ import annotations

from collections.abc import Callable
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
    itself = torch.eye(chains.positions.shape[1], dtype=torch.bool, device=embedded.device)
    for step in range(1, depth):
        token = _at(embedded, (chains.positions + 1 + step).clamp(max=size))
        inputs, residuals = layer_input(token, outputs[-1])
        # slots of the text, then of each step's token of every chain, of which a chain sees its own
        new_keys, new_values = attention.keys_values(inputs, chains.positions + step)
        keys, values = torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2)
        visible = torch.cat([visible, itself.expand(len(embedded), -1, -1)], dim=2)
        queries = attention.queries(inputs, chains.positions + step)
        outputs.append(layer.finish(residuals, attend(queries, keys, values, visible)))
    return torch.stack(outputs, dim=2)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """[B, T, D], [B, Q] -> [B, Q, D]."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
