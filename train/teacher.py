"""Whether a target can teach its distribution to what is trained."""

from __future__ import annotations

from decode import Target
from train.config import ConfigError


def check_teacher(target: Target, kl_weight: float, *, bias: bool) -> None:
    """Refuse to teach a distribution that the target's states and the weight of its lm_head do not give.

    Args:
        target: The target.
        kl_weight: Weight of the divergence from it; 0 needs no distribution.
        bias: Whether its lm_head has a bias.

    Raises:
        ConfigError: With the reason.
    """
    if kl_weight and (bias or not target.plain_logits):
        reason = "has an lm_head with a bias" if bias else "scales or caps its logits behind the lm_head"
        raise ConfigError(
            f"{target.name} {reason}, so its distribution cannot be taught from its states; set --head.kl_weight=0 "
            "--head.ce_weight=1"
        )
