"""EAGLE (Li et al. 2024, arXiv:2401.15077): the next feature from the target's last feature and the token after it.

The feature is the input of the target's lm_head, and drafts go through that lm_head. The same head with a dynamic tree
is EAGLE-2 (arXiv:2406.16858; `decode.DynamicTree`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import FeatureBatch, Lender
from heads.feature_head import FeatureHead, FeatureHeadConfig
from heads.layers import DecoderLayer
from heads.unroll import Chains


@dataclass(frozen=True, kw_only=True)
class EagleConfig(FeatureHeadConfig):
    """Losses and noise of an EAGLE head; the weights are the paper's (arXiv:2401.15077, section 3.2)."""

    feature_weight: float = 1.0
    """Weight of the smooth-L1 distance between the drafted and the target's own feature, averaged over D."""
    fc_bias: bool = False
    """Whether the product that mixes tokens and features has a bias, as in the paper's heads. vLLM reads none."""
    losses: Mapping[str, float] = field(default_factory=lambda: {"kl": 0.1})
    noise: float = 0.2
    """Range of the uniform noise on the target's features in training, against the errors of drafted ones. The paper's
    code multiplies it by 512 over the text's length; here it is the same for all texts."""

    def __post_init__(self) -> None:
        """Reject negative weights."""
        super().__post_init__()
        if not (0 <= self.feature_weight < math.inf and 0 <= self.noise < math.inf):
            raise ValueError(
                f"feature_weight and noise must be numbers and not negative, got {self.feature_weight} and {self.noise}"
            )


class EagleHead(FeatureHead):
    """One decoder layer on `fc([embedding; feature])`, without an input norm or a final norm."""

    Config = EagleConfig
    kind = "eagle"
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Lender) -> None:
        super().__init__(config, target)
        self.lent_weight()  # refuses a target whose lm_head the head cannot use
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, size)])

    def fuse(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Return the target's states, which are the features."""
        return hidden

    def layer_input(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed pair twice: attention reads the residual stream as it is."""
        mixed = self.fc(torch.cat([embedded, feature], dim=-1))
        return mixed, mixed

    def output_states(self, feature: Tensor) -> Tensor:
        """Return the feature: it imitates the lm_head's input."""
        return feature

    def output_weight(self) -> Tensor:
        """[U, D] the target's projection."""
        return self.lent_weight()

    def output_projection(self) -> Callable[[Tensor], Tensor]:
        """Return the target's."""
        return self.lent_projection()

    def perturb(self, hidden: Tensor) -> Tensor:
        """Add uniform noise in training."""
        if not self.training or not self.config.noise:
            return hidden
        return hidden + (torch.rand_like(hidden) - 0.5) * self.config.noise

    def feature_loss(self, outputs: Tensor, chains: Chains, batch: FeatureBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compare step k of the chain at p with the target's state at p + 1 + k, where all up to there is supervised.

        Chains start where some label is in the draft vocabulary; see `heads.unroll.find_chains`.
        """
        if not self.config.feature_weight:
            return outputs.new_zeros(()), {}
        steps = torch.arange(self.config.unroll, device=outputs.device)
        places = chains.positions[..., None] + 1 + steps  # [B, Q, K]
        inside = places < batch.token_ids.shape[1]
        places = places.clamp(max=batch.token_ids.shape[1] - 1)
        rows = torch.arange(len(places), device=outputs.device)[:, None, None]
        supervised = (inside & batch.loss_mask[rows, places]).cumprod(-1).bool()
        counted = chains.valid[..., None] & supervised
        distance = F.smooth_l1_loss(outputs, batch.hidden[rows, places], reduction="none").mean(-1)  # [B, Q, K]
        total = (distance * counted * self.config.depth_decay**steps).sum()
        metric = torch.stack([(distance * counted).sum().detach(), counted.sum()])
        return self.config.feature_weight * total, {"feature/loss": metric}


HEAD = EagleHead
