"""What speculative decoding gains, as formulas: tokens per step, speed-up, best draft length, break-even.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192), section 3. Their
alpha is `accept_rate`, their gamma `length` and their c `draft_cost`. Times are in units of a plain step: one pass of
the target over one token. Measured inputs come from `python -m decode.bench` (tokens per step) and `decode.tune`
(`verify_costs`: seconds of a pass over N nodes; divide by those of one node).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Integral, Real

_HALVINGS = 64
"""Of the interval from 0 to 1, down to the precision of a float."""


def expected_tokens(accept_rate: float, length: int) -> float:
    """Return the expected new tokens per step of a chain: (1 - a^(k + 1)) / (1 - a), Leviathan et al., equation 1.

    The token of the target's own that ends each step counts: 1 is plain decoding, k + 1 is the most.

    Args:
        accept_rate: a, the chance that a draft is kept if all drafts before it were; the same at every depth.
        length: k, the number of drafts.

    Raises:
        ValueError: If the rate is not between 0 and 1, or the length no whole number of at least 0.
    """
    rate = _checked("accept_rate", accept_rate, "between 0 and 1", most=1)
    _checked("length", length, "a whole number of at least 0", kind=Integral)
    # not the quotient: it is 0 / 0 at a = 1 and loses its digits nearby
    return math.fsum(rate**depth for depth in range(length + 1))


def expected_tokens_by_depth(accept_rates: Sequence[float]) -> float:
    """Return the expected new tokens per step of a chain whose rates differ by depth: 1 + a1 + a1 a2 + a1 a2 a3 + ...

    Equal rates make it `expected_tokens`.

    Args:
        accept_rates: For each depth, from the root's child down, the chance that its draft is kept if all drafts
            before it were; none is plain decoding.

    Raises:
        ValueError: If a rate is not between 0 and 1.
    """
    rates = [_checked(f"accept_rates[{i}]", rate, "between 0 and 1", most=1) for i, rate in enumerate(accept_rates)]
    return math.fsum(accumulate(rates, operator.mul, initial=1.0))


def speedup(
    accept_rate: float,
    length: int,
    *,
    draft_cost: float,
    verify_cost: Callable[[int], float] | None = None,
    overhead: float = 0.0,
) -> float:
    """Return the time of plain decoding over the time with drafts: E[tokens] / (k c + verify_cost(k + 1) + overhead).

    Without `verify_cost` and `overhead` it is (1 - a^(k + 1)) / ((1 - a) (k c + 1)), Leviathan et al., theorem 3.8.
    Length 0 is plain decoding: nothing is drafted, so it has no overhead and gives 1 / verify_cost(1), which is 1.

    Args:
        accept_rate: a, as in `expected_tokens`.
        length: k, the number of drafts.
        draft_cost: c, the time of drafting one token, in plain steps.
        verify_cost: Time of a target pass over N nodes (root included), in plain steps; None is 1 for every N, as
            where reading the weights takes all the time.
        overhead: Time of a step with drafts that goes to neither, in plain steps.

    Raises:
        ValueError: If a rate, length or cost is impossible; it names what it got and what it takes.
    """
    tokens = expected_tokens(accept_rate, length)
    return tokens / _step_time(length, draft_cost, verify_cost, overhead)


def best_length(
    accept_rate: float,
    *,
    draft_cost: float,
    verify_cost: Callable[[int], float] | None = None,
    overhead: float = 0.0,
    longest: int = 64,
) -> int:
    """Return the length from 0 to `longest` with the largest `speedup`, the smallest among equals; 0: do not draft.

    Without `verify_cost` and `overhead` drafts pay if a > c (Leviathan et al., corollary 3.9), and only then.
    All arguments but `longest` are those of `speedup`; `verify_cost` is asked for 1 to `longest + 1` nodes.

    Raises:
        ValueError: If a rate, length or cost is impossible.
    """
    _checked("longest", longest, "a whole number of at least 0", kind=Integral)

    def gain(length: int) -> float:
        return speedup(accept_rate, length, draft_cost=draft_cost, verify_cost=verify_cost, overhead=overhead)

    return max(range(longest + 1), key=gain)  # the first of equals


def break_even(
    length: int, *, draft_cost: float, verify_cost: Callable[[int], float] | None = None, overhead: float = 0.0
) -> float | None:
    """Return the acceptance rate at which `speedup`, which grows with the rate, is 1: from there on drafts pay.

    The arguments are those of `speedup`; `length` is at least 1.

    Returns:
        The rate; 0.0 if drafts never lose, not even if all are rejected; None if they lose even if all are accepted.

    Raises:
        ValueError: If the length is no whole number of at least 1, or a cost is impossible.
    """
    _checked("length", length, "a whole number of at least 1 (0 drafts always break even)", kind=Integral, least=1)
    time = _step_time(length, draft_cost, verify_cost, overhead)
    if time <= 1:
        return 0.0
    if time > length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, length) >= time else (middle, high)
    return high


def _step_time(length: int, draft_cost: float, verify_cost: Callable[[int], float] | None, overhead: float) -> float:
    """Return the time of a step with `length` drafts, in plain steps; 0 drafts have no overhead."""
    draft = _checked("draft_cost", draft_cost, "at least 0 and finite")
    extra = _checked("overhead", overhead, "at least 0 and finite")
    if verify_cost is not None and not callable(verify_cost):
        raise ValueError(f"verify_cost must be a function of the number of nodes, or None, got {verify_cost!r}")
    nodes = length + 1
    cost = 1.0 if verify_cost is None else verify_cost(nodes)
    verify = _checked(f"verify_cost({nodes})", cost, "above 0 and finite", least=sys.float_info.min)
    return length * draft + verify + (extra if length else 0.0)


def _checked(
    name: str,
    value: float,
    expected: str,
    *,
    kind: type = Real,
    least: float = 0.0,
    most: float = sys.float_info.max,
) -> float:
    """Return the value as a float if it is a number of this kind and range, and else say what was expected."""
    if not isinstance(value, kind) or not least <= value <= most:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(value)
