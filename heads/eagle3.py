"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): features of three of the target's layers, fused, and training-time test.

Nothing makes the head's output imitate a feature of the target: it is trained by the tokens it drafts, several steps
on its own outputs (`heads.unroll`), and has a norm and an output projection of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.base import Lender
from heads.feature_head import FeatureHead, FeatureHeadConfig
from heads.layers import DecoderLayer, RMSNorm


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureHeadConfig):
    """Feature layers and losses of an EAGLE-3 head."""

    feature_layers: tuple[int, ...] = ()
    """Decoder layers whose outputs are fused, counted from 1. The trainer fills in what every engine takes by default:
    2, n // 2 and n - 3 of the target's n."""
    unroll: int = 4
    own_lm_head: bool = True
    """Whether the head trains an output projection of its own, started from the target's."""
    norm_before_residual: bool = False
    """Whether the residual stream starts from the normalised feature, as in heads of the speculators library."""

    def __post_init__(self) -> None:
        """Reject layers in no order."""
        super().__post_init__()
        layers = list(self.feature_layers)
        if layers != sorted(set(layers)) or (layers and layers[0] < 1):
            raise ValueError(f"feature_layers must be ascending numbers of decoder layers, from 1 on, got {layers}")


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads a normalised token and a normalised feature side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(FeatureHead):
    """Fused features, one decoder layer, a norm and an output projection over the draft vocabulary."""

    Config = Eagle3Config
    kind = "eagle3"
    config: Eagle3Config
    projection: nn.Linear | None

    def __init__(self, config: Eagle3Config, target: Lender) -> None:
        super().__init__(config, target)
        if not config.feature_layers:
            raise ValueError("feature_layers is empty; name the decoder layers to fuse, such as 2, n // 2, n - 3 of n")
        size = config.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.projection = None
        rows = self.lent_weight()
        if config.own_lm_head:
            self.projection = nn.Linear(size, len(rows), bias=False)
            self.projection.weight.data.copy_(rows)

    @property
    def feature_layers(self) -> Sequence[int]:
        """Those of the config."""
        return self.config.feature_layers

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Choose the draft vocabulary, and start an own projection from its rows; see `Head.set_vocabulary`."""
        super().set_vocabulary(token_ids)
        if self.projection is not None:
            with torch.no_grad():  # not through .data, whose changes are not counted
                self.projection.weight.copy_(self.lent_weight())

    def fuse(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Project the features of all layers to one."""
        if features is None:
            raise ValueError(f"EAGLE-3 reads the target's layers {list(self.feature_layers)}, but got no features")
        fused: Tensor = self.fc(features)
        return fused

    def layer_input(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, normalised, side by side; the residual is the feature, normalised or not."""
        layer = self.layer
        assert isinstance(layer, Eagle3Layer)
        normed = layer.hidden_norm(feature)
        residual = normed if self.config.norm_before_residual else feature
        return torch.cat([layer.input_layernorm(embedded), normed], dim=-1), residual

    def output_states(self, feature: Tensor) -> Tensor:
        """Normalise; what is fed back is not normalised."""
        states: Tensor = self.norm(feature)
        return states

    def output_weight(self) -> Tensor:
        """[U, D] the head's own projection, or the target's."""
        return self.lent_weight() if self.projection is None else self.projection.weight

    def output_projection(self) -> Callable[[Tensor], Tensor]:
        """Return the head's own, or the target's."""
        return self.lent_projection() if self.projection is None else self.projection


HEAD = Eagle3Head
