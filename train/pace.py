"""How fast a run goes, and when it will be done, by its first steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from data.features import Features
from train.memory_plan import Work

WARM_UP, MEASURED = 1, 2
"""Steps before the clock starts, and steps that are timed."""


@dataclass
class Pace:
    """Times the first steps, without what is between them, and says once what they tell."""

    work: Work
    source: Features
    say: Callable[[str], None]
    filling: int = 0
    """Tokens whose states go to a folder before training."""
    steps: int = field(default=0, init=False)
    """Steps seen."""
    seconds: float = field(default=0.0, init=False)
    """Of the timed steps."""
    tokens: int = field(default=0, init=False)
    """Trained on in them, in all processes."""
    _start: float = field(default=0.0, init=False)
    _before: float = field(default=0.0, init=False)
    """The target's seconds before the timed steps."""

    def begin(self) -> None:
        """Start the clock of a step."""
        if self.steps == WARM_UP:
            self._before = self.source.target_seconds
        self._start = time.perf_counter()

    def end(self, indices: Sequence[int]) -> None:
        """Stop it; `indices` is the step's global batch."""
        self.steps += 1
        if WARM_UP < self.steps <= WARM_UP + MEASURED:
            self.seconds += time.perf_counter() - self._start
            self.tokens += self.source.num_tokens(indices)
        if self.steps == WARM_UP + MEASURED:
            self.say(self.describe())

    def describe(self) -> str:
        """Return speed and remaining time in one line, for people."""
        target = self.source.target_seconds - self._before
        head = max(self.seconds - target, 1e-9)
        left = self._left(head / self.tokens)
        alone = f", {self.tokens / head:,.0f} where the target's states are kept" if target else ""
        return (
            f"plan: {self.tokens / self.seconds:,.0f} tokens per second{alone}; about {tqdm.format_interval(left)} for "
            f"{len(self.work.steps)} steps, evaluations and checkpoints not counted"
        )

    def _left(self, head_seconds: float) -> float:
        """Return the seconds that all steps take, at `head_seconds` for a token of the global batch."""
        work, source = self.work, self.source
        trained = len(work.steps) * work.config.optim.batch_size
        mean = source.num_tokens(range(len(work.samples))) / len(work.samples)
        once = min(trained, len(work.samples))
        computed = float(self.filling)
        if work.config.data.feature_dir is None:
            kept = work.kept[0] / (len(work.samples) * mean * work.state_size) / work.processes
            computed = (once + (trained - once) * max(0.0, 1 - kept)) * mean
        speed = source.target_seconds / max(1, source.target_tokens)  # of one process
        return trained * mean * head_seconds + computed * speed / work.processes
