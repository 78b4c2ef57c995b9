"""What `decode.tune` found, kept in the head's folder for each device and precision, and found there by `generate`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decode.adaptive import Adaptive, Arm
from decode.costs import VerifyCosts
from decode.machine import machine
from decode.propose import Drafting, Drafts, to_grow
from decode.target import Target
from heads.checkpoint import TUNED, read_plans
from heads.files import write_atomically

FORMAT = 1


@dataclass(frozen=True)
class TunedArm:
    """One way of drafting, as it was calibrated."""

    way: Sequence[Sequence[int]] | Mapping[str, float]
    """The tree, as `decode.propose.to_grow` reads it."""
    costs: Mapping[str, Mapping[str, float]]
    """Time of a step over that of a plain step, by temperature and rows of the batch."""
    reach: Mapping[str, Sequence[float]]
    """Share of steps that accept at least 1, 2, … drafts, by temperature."""


@dataclass(frozen=True)
class Choice:
    """The fastest way of drafting for batches of so many rows at a temperature."""

    temperature: float
    rows: int
    arm: int | None
    """Number of the arm; None to draft nothing."""
    tokens_per_step: float
    speedup: float
    """Predicted time of plain decoding over that with the choice."""
    needed: float
    """Tokens per step from which the best arm pays."""


@dataclass(frozen=True)
class Plan:
    """How to draft on one device in one precision."""

    arms: Sequence[TunedArm]
    choices: Sequence[Choice]
    costs: Sequence[Mapping[str, Any]]
    """Of target passes; see `VerifyCosts.read`."""
    format: int = FORMAT
    made: Mapping[str, Any] = field(default_factory=dict)
    """By which command, on which prompts, with which versions; acceptance by depth and rank."""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Plan:
        """Return a plan from its form in JSON.

        Raises:
            ValueError: If it is no such form.
        """
        try:
            arms = [TunedArm(**arm) for arm in content["arms"]]
            choices = [Choice(**choice) for choice in content["choices"]]
            plan = cls(arms, choices, content["costs"], content["format"], dict(content["made"]))
            VerifyCosts.read(plan.costs)
            for arm in arms:
                for temperature in ("0", *arm.reach):
                    plan.arm(arm, float(temperature))
            _check_ranks(arms)
            _check_choices(choices, len(arms))
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"{TUNED} holds no plan ({error!r}); delete it or run decode.tune again") from error
        return plan

    @staticmethod
    def arm(arm: TunedArm, temperature: float) -> Arm:
        """Return an arm as it was calibrated at the nearest temperature."""
        nearest = min(arm.reach, key=lambda name: abs(float(name) - temperature))
        costs = {int(rows): float(cost) for rows, cost in arm.costs[nearest].items()}
        return Arm(to_grow(arm.way), costs, tuple(map(float, arm.reach[nearest])))

    def choice(self, temperature: float, rows: int) -> Choice:
        """Return the choice for the nearest temperature, and of these for the nearest number of rows."""
        return min(self.choices, key=lambda c: (abs(c.temperature - temperature), abs(c.rows - rows)))

    def fixed(self, drafts: Drafts, temperature: float, rows: int) -> Drafting | None:
        """Return the chosen way of drafting, in every step the same; None to draft nothing."""
        number = self.choice(temperature, rows).arm
        with _made_for_these():
            return None if number is None else Drafting(drafts, to_grow(self.arms[number].way))

    def adaptive(self, drafts: Drafts, temperature: float) -> Adaptive | None:
        """Return a controller over all arms; None if there are none."""
        arms = tuple(self.arm(arm, temperature) for arm in self.arms)
        with _made_for_these():
            return Adaptive(drafts, arms) if arms else None


@contextmanager
def _made_for_these() -> Iterator[None]:
    """Say of a tree that cannot be filled where it comes from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{TUNED} was made for another head or draft model ({error}); delete it or run decode.tune again"
        ) from error


def _check_ranks(arms: Sequence[TunedArm]) -> None:
    """Refuse trees whose paths are not of whole numbers.

    Raises:
        ValueError: If there is one.
    """
    for arm in arms:
        if not isinstance(arm.way, Mapping) and not all(isinstance(rank, int) for path in arm.way for rank in path):
            raise ValueError(f"the ranks of a tree are whole numbers, got {arm.way}")


def _check_choices(choices: Sequence[Choice], arms: int) -> None:
    """Refuse choices that cannot be made.

    Raises:
        ValueError: If there are none, a number is none, or an arm is not among so many.
    """
    if not choices:
        raise ValueError("it chooses nothing")
    for choice in choices:
        numbers = [value for name, value in vars(choice).items() if name != "arm"]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise ValueError(f"a choice is made of numbers, got {choice}")
        if choice.arm is not None and not (isinstance(choice.arm, int) and 0 <= choice.arm < arms):
            raise ValueError(f"{choice} is of an arm that is not there; there are {arms}")


def plan_key(target: Target) -> str:
    """Return the name of what a plan is for: device, precision, how layers are computed, and the target."""
    place = machine(target)
    return f"{place['device']}, {place['dtype']}, layers {place['layers']}, target {target.fingerprint}"


def find_plan(tuned: Mapping[str, Any], target: Target) -> Plan | None:
    """Return the plan for a target as it is here among those of a folder; None if there is none in the present format.

    Raises:
        ValueError: If there is one and it is damaged.
    """
    content = tuned.get(plan_key(target), {}) if tuned else {}
    return Plan.read(content) if content.get("format") == FORMAT else None


def write_plan(folder: Path, key: str, plan: Plan) -> None:
    """Add a plan to those in a head's or a draft model's folder, in place of one for the same device and precision."""
    text = json.dumps({**read_plans(folder), key: asdict(plan)}, indent=1) + "\n"
    write_atomically(folder / TUNED, lambda temporary: temporary.write_text(text))
