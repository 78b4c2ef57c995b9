"""Heads that draft features: one decoder layer, fed with a token and a feature, whose output is the next feature.

What EAGLE-1 and EAGLE-3 share. The pair at position p is the embedding of token p + 1 and the feature at p, rotated by
p, as the engines do it; its output drafts token p + 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import FeatureBatch, Head, HeadOutput, Lender
from heads.cache import TreeCache
from heads.drafter import HeadDrafter
from heads.growing import GrowingTree, growing_tree, level_visible
from heads.labels import find_labels
from heads.layers import DecoderLayer, LayerConfig, Rotation, attend, positions_behind, read_on
from heads.losses import check_losses, label_loss
from heads.transfer import to_device
from heads.unroll import Chains, find_chains, unroll


@dataclass(frozen=True, kw_only=True)
class FeatureHeadConfig(LayerConfig):
    """Sizes and losses of a head that drafts features."""

    max_depth: int = 8
    """Tokens drafted at most past the root."""
    unroll: int = 1
    """K, the steps of training-time test: 1 trains on the target's features only, more also on the head's own."""
    losses: Mapping[str, float] = field(default_factory=lambda: {"kl": 1.0})
    """Weights of the losses over tokens; see `heads.objectives`."""
    chunk_size: int = 256
    """Label positions whose [K, U] logits are in memory at one time."""
    activation_checkpointing: bool = False
    """Compute each step of the layer again in the backward pass, instead of keeping all that it made: less memory, more
    time, the same numbers."""

    def __post_init__(self) -> None:
        """Reject sizes and losses that make no head."""
        super().__post_init__()
        self.check_at_least(1, "max_depth", "unroll", "chunk_size")
        check_losses(self.losses)


class FeatureHead(Head):
    """A head with one draft layer; subclasses say what it reads and how its output becomes logits."""

    config: FeatureHeadConfig
    layers: nn.ModuleList

    def __init__(self, config: FeatureHeadConfig, target: Lender) -> None:
        super().__init__(config, target)
        self.tree = growing_tree(config.max_depth, config.draft_vocab_size or config.vocab_size)

    @property
    def layer(self) -> DecoderLayer:
        """The draft layer."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    @abstractmethod
    def fuse(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Return the features that drafting starts from, made of the target's: [..., D], [..., F] -> [..., D]."""

    @abstractmethod
    def layer_input(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention reads, [..., input], and the residual, [..., D], for tokens and features [..., D]."""

    @abstractmethod
    def output_states(self, feature: Tensor) -> Tensor:
        """Return what the output projection reads: [..., D] -> [..., D]."""

    @abstractmethod
    def output_weight(self) -> Tensor:
        """[U, D] the output projection, for training."""

    @abstractmethod
    def output_projection(self) -> Callable[[Tensor], Tensor]:
        """Return the output projection, [..., D] -> [..., U], for drafting."""

    def perturb(self, hidden: Tensor) -> Tensor:
        """Return the target's states as training shows them to the head; by default as they are."""
        return hidden

    def feature_loss(self, outputs: Tensor, chains: Chains, batch: FeatureBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return a further loss on the outputs [B, Q, K, D], summed, and its metrics; by default none."""
        return outputs.new_zeros(()), {}

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the loss summed over label positions and steps, each weighted by `depth_decay ** step`."""
        if batch.token_ids.shape[1] < 2:  # no pair of a token and a feature: one of padding
            batch = _padded(batch)
        depth = self.config.unroll
        labels = find_labels(batch, depth, self.vocabulary)
        chains = find_chains(labels, *batch.token_ids.shape)
        features = self.fuse(self.perturb(batch.hidden), batch.features)
        outputs = unroll(
            self.layer,
            self.layer_input,
            self.embedded(batch.token_ids),
            features,
            chains,
            depth,
            checkpointing=self.config.activation_checkpointing,
        )  # [B, Q, K, D]
        rows = labels.rows[:, None]
        states = outputs[rows, chains.numbers[rows, labels.sources()], torch.arange(depth, device=rows.device)]
        drafted = label_loss(
            batch,
            labels,
            self.output_states(states),
            self.output_weight(),
            self.lent_weight(),
            decay=self.config.depth_decay,
            losses=self.config.losses,
            chunk_size=self.config.chunk_size,
        )
        further, metrics = self.feature_loss(outputs, chains, batch)
        return HeadOutput(loss=drafted.loss + further, metrics={**drafted.metrics, **metrics})

    def drafter(self) -> FeatureDrafter:
        """Return a fresh drafting state."""
        return FeatureDrafter(self)


class FeatureDrafter(HeadDrafter[FeatureHead]):
    """The head's K/V of committed pairs, and the features of the tree grown so far."""

    def __init__(self, head: FeatureHead) -> None:
        super().__init__(head, head.config.max_depth)
        self._project: Callable[[Tensor], Tensor] | None = None
        self._cache: TreeCache | None = None
        self._features = torch.empty(0)  # [B, 1 + M, D] of the root and of the nodes below it
        self._tree = GrowingTree(0, torch.device("cpu"))
        self._rotation: Rotation = (torch.empty(0), torch.empty(0))  # of the last sync's places and those behind
        self._last = torch.empty(0)  # [B, 1] the root's place among them

    @torch.inference_mode()
    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        """Store the K/V of the new pairs and draft from the last; see `Drafter.sync`."""
        if self._cache is None:
            self._cache = TreeCache(len(lengths), 2 * max(lengths))
            self._project = self._head.output_projection()
        dtype = self._head.dtype
        fused = self._head.fuse(hidden.to(dtype), None if features is None else features.to(dtype))
        inputs, residuals = self._head.layer_input(self._head.embedded(token_ids[:, 1:]), fused)
        # the root's pair stands at the last committed position, and its children's one further
        positions = positions_behind(self._cache, inputs.shape[1] + self.max_depth, inputs.device)
        self._rotation = self._head.layer.self_attn.rotation(positions, dtype)
        self._last = to_device(lengths, inputs.device)[:, None] - 1
        self._features = read_on(self._head.layer, inputs, residuals, lengths, self._cache, self._rotation)
        self._tree = GrowingTree(len(lengths), inputs.device)
        return self._logits(self._features)[:, 0]

    @torch.inference_mode()
    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Run the layer over one level of nodes; see `Drafter.extend`."""
        assert self._cache is not None
        cache, layer = self._cache, self._head.layer
        rows = self._tree.rows
        inputs, residuals = self._head.layer_input(self._head.embedded(token_ids), self._features[rows, parents])
        level = self._tree.add(parents)
        places = self._last + level.sum(2)  # a node sees as many of the tree as it is deep
        cos, sin = (table[rows, :, places].transpose(1, 2) for table in self._rotation)
        cache.reserve_for(token_ids.shape[1])
        cache.begin(token_ids.shape[1], token_ids.device)
        queries, keys, values = layer.self_attn.project(inputs, (cos, sin))
        attended = attend(queries, *cache.write(0, keys, values), level_visible(level, cache.lengths))
        new = layer.finish(residuals, attended)
        self._features = torch.cat([self._features, new], dim=1)
        return self._logits(new)

    def _logits(self, features: Tensor) -> Tensor:
        assert self._project is not None
        return self._project(self._head.output_states(features))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        assert self._cache is not None
        self._cache.keep(rows)
        self._tree.keep(rows)
        index = list(rows)
        cos, sin = self._rotation
        self._features, self._last = self._features[index], self._last[index]
        self._rotation = (cos[index], sin[index])


def _padded(batch: FeatureBatch) -> FeatureBatch:
    """Append an unsupervised token to every row."""
    features = None if batch.features is None else F.pad(batch.features, (0, 0, 0, 1))
    return FeatureBatch(
        F.pad(batch.token_ids, (0, 1)), F.pad(batch.loss_mask, (0, 1)), F.pad(batch.hidden, (0, 0, 0, 1)), features
    )
