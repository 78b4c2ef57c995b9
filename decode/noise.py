"""Random numbers that are a function of what they are for.

Every number is a hash of (seed, row, purpose, position, token): the same on every device, in any order, for any batch,
and however many tokens were drafted or thrown away in between. The mixing function is SplitMix64's (Steele, Lea, Flood
2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.transfer import to_device

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

TARGET, DRAFT, COIN = 1, 2, 3
"""Purposes: the target's own choice of a token, drawing drafts, accepting drafts."""


def key(*parts: int) -> int:
    """Hash integers, in order, to 64 bits."""
    state = 0
    for part in parts:
        state = _mix(((state ^ (part & _MASK)) + _GOLDEN) & _MASK)
    return state


def uniform(parts: int) -> float:
    """Map a key to a float in the open interval (0, 1)."""
    return ((_mix(parts) >> 12) + 0.5) * 2.0**-52


def gumbel(keys: Sequence[int], token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, one value for each key and token.

    Args:
        keys: R keys, one for each row (of a position, see `key`).
        token_ids: [U] tokens.

    Returns:
        [R, U] float64. 52-bit uniforms in the open interval keep every value finite.
    """
    signed = [k - (1 << 64) if k >= 1 << 63 else k for k in keys]
    state = to_device(signed, token_ids.device)[:, None] + (token_ids + 1) * _signed(_GOLDEN)
    shifted = torch.empty_like(state)
    for shift, factor in _ROUNDS:
        state.bitwise_xor_(_shift_right(state, shift, shifted)).mul_(_signed(factor))
    state.bitwise_xor_(_shift_right(state, 31, shifted))
    u = _shift_right(state, 12, shifted).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def _mix(state: int) -> int:
    for shift, factor in _ROUNDS:
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical shift of int64, into `out`: a vocabulary's worth of memory costs as much as the shift."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)
