"""Whether a target can teach its distribution to what is trained."""

from __future__ import annotations

from decode import Target
from train.config import ConfigError


def check_teacher(target: Target, needed: bool, *, bias: bool) -> None:
    """Refuse to teach a distribution that the target's states and the weight of its lm_head do not give.

    Args:
        target: The target.
        needed: Whether any loss compares with its distribution; `heads.losses.needs_teacher` says it.
        bias: Whether its lm_head has a bias.

    Raises:
        ConfigError: With the reason.
    """
    if needed and (bias or not target.plain_logits):
        reason = "has an lm_head with a bias" if bias else "scales or caps its logits behind the lm_head"
        raise ConfigError(
            f"{target.name} {reason}, so its distribution cannot be taught from its states; learn from the data alone, "
            "with --head.losses='{\"ce\": 1}'"
        )
