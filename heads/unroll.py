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
from torch.utils.checkpoint import checkpoint

from heads.labels import Labels
from heads.layers import DecoderLayer, attend

LayerInput = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Token embeddings and features, [..., D] each, to what attention reads [..., input] and the residual [..., D]."""
Step = tuple[Tensor, Tensor, Tensor]
"""Outputs [B, Q, D], keys and values of one pass of the layer."""


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
    layer: DecoderLayer,
    layer_input: LayerInput,
    embedded: Tensor,
    features: Tensor,
    chains: Chains,
    depth: int,
    *,
    checkpointing: bool = False,
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
        checkpointing: Keep each step's results only, and compute the step again in the backward pass.

    Returns:
        [B, Q, K, D] the layer's outputs.
    """
    steps = _Steps(layer, layer_input, chains)

    def run(step: Callable[..., Step], *given: Tensor) -> Step:
        if not checkpointing:
            return step(*given)
        found: Step = checkpoint(step, *given, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn
        return found

    made = [run(steps.first, embedded, features)]
    while len(made) < depth:
        seen = [part for _, keys, values in made for part in (keys, values)]
        made.append(run(steps.next, embedded, made[-1][0], *seen))
    return torch.stack([output for output, _, _ in made], dim=2)


class _Steps:
    """The layer's passes, each from what it reads to its outputs [B, Q, D] and its keys and values [B, H, …, E]."""

    def __init__(self, layer: DecoderLayer, layer_input: LayerInput, chains: Chains) -> None:
        self._layer, self._layer_input, self._positions = layer, layer_input, chains.positions

    def first(self, embedded: Tensor, features: Tensor) -> Step:
        """Read the text, and draft from the target's features."""
        attention, positions = self._layer.self_attn, self._positions
        inputs, residuals = self._layer_input(embedded[:, 1:], features[:, :-1])
        slots = torch.arange(embedded.shape[1] - 1, device=embedded.device)
        keys, values = attention.keys_values(inputs, slots.expand(len(embedded), -1))
        queries = attention.queries(_at(inputs, positions), positions)
        attended = attend(queries, keys, values, self._visible(embedded, 0))
        return self._layer.finish(_at(residuals, positions), attended), keys, values

    def next(self, embedded: Tensor, feature: Tensor, *seen: Tensor) -> Step:
        """Draft from the outputs [B, Q, D] of the step before; `seen` are keys and values of all steps so far."""
        step = len(seen) // 2
        attention, positions = self._layer.self_attn, self._positions + step
        token = _at(embedded, (positions + 1).clamp(max=embedded.shape[1] - 1))
        inputs, residuals = self._layer_input(token, feature)
        new_keys, new_values = attention.keys_values(inputs, positions)
        keys, values = torch.cat([*seen[::2], new_keys], dim=2), torch.cat([*seen[1::2], new_values], dim=2)
        queries = attention.queries(inputs, positions)
        attended = attend(queries, keys, values, self._visible(embedded, step))
        return self._layer.finish(residuals, attended), new_keys, new_values

    def _visible(self, embedded: Tensor, step: int) -> Tensor:
        """[B, Q, slots]: slots of the text, then of each step's token of every chain, of which a chain sees its own."""
        slots = torch.arange(embedded.shape[1] - 1, device=embedded.device)
        text = slots <= self._positions[..., None]
        itself = torch.eye(self._positions.shape[1], dtype=torch.bool, device=embedded.device)
        return torch.cat([text, *[itself.expand(len(embedded), -1, -1)] * step], dim=2)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """[B, T, D], [B, Q] -> [B, Q, D]."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
