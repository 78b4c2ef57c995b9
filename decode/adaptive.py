"""A controller that changes the drafts' tree while decoding, and drafts nothing where that is fastest.

For every depth it keeps an estimate of how often drafts are accepted, relative to what was calibrated, and takes the
tree with the most tokens per time by the costs that were measured (`decode.tune`). Where none beats a plain step it
drafts nothing for a while, then tries again. It reads no clock: what it does depends on text, settings and stored costs
alone, so a run can be repeated step for step. With the rule `Match` whatever it does leaves the text as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from decode.costs import on_lines
from decode.formulas import expected_tokens_by_depth
from decode.grow import Grow
from decode.propose import Drafting, DraftingState, Drafts
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape


@dataclass(frozen=True)
class Arm:
    """One way of drafting, as it was calibrated."""

    grow: Grow
    costs: Mapping[int, float]
    """Time of a step over that of a plain step, by rows of the batch."""
    reach: tuple[float, ...]
    """Share of steps that accept at least 1, 2, … drafts."""

    def __post_init__(self) -> None:
        """Reject what no calibration gives."""
        if not self.costs or not all(rows >= 1 and 0 < cost < math.inf for rows, cost in self.costs.items()):
            raise ValueError(
                "an arm needs the time of a step over that of a plain one, above 0 and finite, for one number of rows "
                f"or more, got costs {dict(self.costs)}"
            )
        shares = (1.0, *self.reach)
        if not all(0 <= now <= before for before, now in zip(shares, self.reach, strict=False)):
            raise ValueError(
                f"the shares of steps that accept at least 1, 2, … drafts fall from 1 to 0, got reach {self.reach}"
            )
        if len(self.reach) > self.grow.depth:
            raise ValueError(
                f"a tree {self.grow.depth} deep cannot accept {len(self.reach)} drafts (reach {self.reach})"
            )

    def cost(self, rows: int) -> float:
        """Return the time of a step over that of a plain step of as many rows."""
        return on_lines(self._points, rows)

    @cached_property
    def _points(self) -> list[tuple[int, float]]:
        return sorted(self.costs.items())

    @cached_property
    def rates(self) -> list[float]:
        """For each depth, the share of steps that reach it among those that reach the one before."""
        return conditional(self.reach)


def conditional(reach: Sequence[float]) -> list[float]:
    """Return for each depth the share of steps that reach it among those that reach the one before."""
    return [now / before if before else 0.0 for before, now in zip((1.0, *reach), reach, strict=False)]


@dataclass(frozen=True)
class Adaptive:
    """Drafts with the arm that is fastest by present estimates, or not at all; see the module."""

    head: Drafts
    arms: tuple[Arm, ...]
    prior: float = 8.0
    """Trials that calibration counts for at each depth."""
    half_life: float = 64.0
    """Steps with drafts after which an observation counts half."""
    pause: int = 32
    """Plain steps after drafts have ceased to pay, before they are tried again."""
    trial: int = 2
    """Steps of a trial; it goes on for as long as its drafts gain what they cost."""
    margin: float = 0.03
    """How much more than plain decoding a tree must promise. The best of many estimates is too good."""
    risk: float = 0.015
    """Share of the time that trials may lose: the next one comes when plain steps have made up for the last."""

    def __post_init__(self) -> None:
        """Reject arms that the head cannot fill, and settings that make no controller."""
        if not self.arms:
            raise ValueError("a controller needs at least one way of drafting; to draft nothing, leave it out")
        for arm in self.arms:
            Drafting(self.head, arm.grow)
        for name, least in (("prior", 0.0), ("half_life", 1.0), ("margin", 0.0)):
            value = vars(self)[name]
            if not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least {least:g} and finite, got {value!r}")
        for name in ("pause", "trial"):
            value = vars(self)[name]
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of steps, at least 1, got {value!r}")
        if not isinstance(self.risk, int | float) or not 0 < self.risk <= 1:
            raise ValueError(f"risk must be a share of the time, above 0 and at most 1, got {self.risk!r}")

    @property
    def max_nodes(self) -> int:
        """Largest tree of all arms."""
        return max(arm.grow.max_nodes for arm in self.arms)

    @property
    def feature_layers(self) -> Sequence[int]:
        """Those of the head."""
        return self.head.feature_layers

    def begin(self, rows: int, *, shared_noise: bool) -> AdaptiveState:
        """Open a session; see `Proposer.begin`."""
        return AdaptiveState(self, shared_noise)


class Estimates:
    """How much better or worse than calibrated drafts are accepted, at each depth.

    What is expected before anything was seen at a depth is what was found at the one above: a text that is hard to
    guess is so at all depths, and the deeper ones are seldom reached then.
    """

    def __init__(self, depth: int, prior: float, half_life: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._prior = prior
        self._accepted = [0.0] * depth
        self._expected = [0.0] * depth

    def learn(self, arm: Arm, accepted: Sequence[int]) -> None:
        """Count one step of an arm that accepted so many drafts in each row."""
        self._accepted = [self._keep * value for value in self._accepted]
        self._expected = [self._keep * value for value in self._expected]
        for number in accepted:
            for depth, rate in enumerate(arm.rates[: number + 1]):  # deeper nodes had no chance
                self._accepted[depth] += depth < number
                self._expected[depth] += rate

    def tokens_per_step(self, arm: Arm) -> float:
        """Return what an arm should give now: 1 + the sum over depths of the share of steps that reach it."""
        rates, factor = [], 1.0
        for rate, accepted, expected in zip(arm.rates, self._accepted, self._expected, strict=False):
            prior = self._prior * rate
            if expected + prior > 0:
                factor = (accepted + prior * factor) / (expected + prior)
            rates.append(min(1.0, rate * factor))
        return expected_tokens_by_depth(rates)


class Control:
    """Chooses the arm of every step of a session; knows nothing of drafters and texts."""

    def __init__(self, settings: Adaptive) -> None:
        self._settings = settings
        depth = max(len(arm.reach) for arm in settings.arms)
        self._estimates = Estimates(depth, settings.prior, settings.half_life)
        self._used: Arm | None = None
        self._pause = settings.pause  # plain steps before the next trial
        self._trial, self._balance = 0, 0.0  # steps of a trial that is going on; tokens of a row less their cost

    def choose(self, rows: int) -> Arm | None:
        """Return the arm for a step of so many rows, None to draft nothing."""
        settings = self._settings
        gains = [self._estimates.tokens_per_step(arm) / arm.cost(rows) for arm in settings.arms]
        gain, best = max(zip(gains, settings.arms, strict=True), key=lambda pair: pair[0])
        self._used = best
        if gain > 1.0 + settings.margin:
            self._pause, self._trial = settings.pause, 0
        elif self._trial and (self._trial < settings.trial or self._balance >= 0):
            self._trial += 1
        else:
            if self._trial:
                self._pause, self._trial = math.ceil(-self._balance / settings.risk), 0
            if self._pause:
                self._pause -= 1
                self._used = None
            else:
                self._trial, self._balance = 1, 0.0
        return self._used

    def learn(self, accepted: Sequence[int]) -> None:
        """Learn how many drafts the step accepted in each row."""
        if self._used is not None:
            self._balance += 1.0 + fmean(accepted) - self._used.cost(len(accepted))
            self._estimates.learn(self._used, accepted)


class AdaptiveState:
    """One session: the control, the drafter, and what it has not been told yet."""

    def __init__(self, settings: Adaptive, shared_noise: bool) -> None:
        self._control = Control(settings)
        self._drafting = DraftingState(settings.head, settings.arms[0].grow, shared_noise)
        self._pending: list[_Committed] = []

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        """Learn from the step and keep what was committed until something is drafted."""
        self._control.learn([length - 1 for length in lengths])  # of the prompt it learns nothing
        self._pending.append(_Committed(token_ids, hidden, list(lengths), features))

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        """Return the trees of the best arm, or the roots alone."""
        arm = self._control.choose(len(rows))
        if arm is None:
            return [TokenTree(root[None], chain_shape(1)) for root in roots]
        self._catch_up()
        self._drafting.grow = arm.grow
        return self._drafting.propose(roots, rows)

    def _catch_up(self) -> None:
        """Tell the drafter what was committed since it drafted last, plain steps in one piece."""
        # all but the first, which is the prompt or what was drafted last, are plain steps
        for committed in (*self._pending[:1], *_as_one(self._pending[1:])):
            self._drafting.sync(committed.token_ids, committed.hidden, committed.lengths, committed.features)
        self._pending = []

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._pending = [committed.keep(rows) for committed in self._pending]
        if self._drafting.started:
            self._drafting.keep(rows)

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        """Compare the drafter with a fresh one, once it knows all that was committed."""
        self._catch_up()
        self._drafting.check(rows, hidden, features)


@dataclass(frozen=True)
class _Committed:
    """Arguments of one `sync`."""

    token_ids: Tensor
    hidden: Tensor
    lengths: list[int]
    features: Tensor | None

    def keep(self, rows: Sequence[int]) -> _Committed:
        """Return what concerns these rows."""
        index, lengths = list(rows), [self.lengths[row] for row in rows]
        longest = max(lengths)  # rows that have left may have been longer
        features = None if self.features is None else self.features[index, :longest]
        return _Committed(self.token_ids[index, : longest + 1], self.hidden[index, :longest], lengths, features)


def _as_one(run: Sequence[_Committed]) -> list[_Committed]:
    """Join plain steps, each of which gave every row one token."""
    if not run:
        return []
    token_ids = torch.cat([run[0].token_ids, *(step.token_ids[:, 1:] for step in run[1:])], dim=1)
    features = [step.features for step in run if step.features is not None]
    return [
        _Committed(
            token_ids,
            torch.cat([step.hidden for step in run], dim=1),
            [len(run)] * len(token_ids),
            torch.cat(features, dim=1) if features else None,
        )
    ]
