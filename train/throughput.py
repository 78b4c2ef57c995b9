"""How fast heads are trained, beside the bound of that: the target's forward alone on the same batches.

Steps are made on features that are computed for them, nothing is kept, and before each the target alone runs over its
batch; so both see what the machine does meanwhile. What a step would take on kept states follows from its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from data.batches import BatchPlan, collate
from data.features import OnlineFeatures, compute_states
from heads.base import FeatureBatch
from train.distributed import clip, prepare
from train.loop import accumulate_gradients, make_optimizer, schedule_factor, split
from train.memory_plan import Work
from train.plan import Plan

WARM_UP, LEAST, SECONDS = 1, 3, 30.0
"""Steps before the clock starts; steps that are timed at least, and then until so many seconds have passed or the run
has no more."""
PARTS = ("target", "batch", "forward", "backward", "optimiser")
"""Of a step: the target's passes, what else makes a batch, the head's forward with its loss, its backward, the rest."""


@dataclass
class Clock:
    """Adds up seconds by what they were spent on; waits for the device, which works behind the program's back."""

    device: torch.device
    spent: dict[str, float] = field(default_factory=dict)
    """What for -> seconds."""
    _since: float = 0.0

    def start(self) -> None:
        """Forget the time since the last `lap`."""
        self._since = self._now()

    def lap(self, name: str) -> float:
        """Add the time since the last call to `name`, and return it."""
        now = self._now()
        seconds, self._since = now - self._since, now
        self.spent[name] = self.spent.get(name, 0.0) + seconds
        return seconds

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class TimedFeatures(OnlineFeatures):
    """Computes all features anew, and says on a clock when it did; owns nothing."""

    def __init__(self, work: Work, clock: Clock) -> None:
        super().__init__(work.target, work.samples, 0, work.head.feature_layers)
        self._clock = clock

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return features; the time before was that of a backward pass, if there was one."""
        self._clock.lap("backward")
        before = self.target_seconds
        batch = super().batch(indices)
        self._clock.lap("batch")
        seconds = self.target_seconds - before
        self._clock.spent["batch"] -= seconds
        self._clock.spent["target"] = self._clock.spent.get("target", 0.0) + seconds
        return batch


@contextmanager
def timed_forward(head: nn.Module, clock: Clock) -> Iterator[None]:
    """Put the time of `head`'s forward on the clock while in the block; what is before it counts as the batch's."""

    def before(*unused: Any) -> None:
        clock.lap("batch")

    def after(*unused: Any) -> None:
        clock.lap("forward")

    handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward_alone(work: Work, rows: Sequence[int], clock: Clock) -> None:
    """Run the target over the conversations `rows`, all at once and one by one, and put both on the clock."""
    samples = [work.samples[row] for row in rows]
    token_ids, _ = collate(samples)
    clock.start()
    work.target.encode_features(token_ids, [len(sample.token_ids) for sample in samples], work.head.feature_layers)
    clock.lap("together")
    for sample in samples:
        compute_states(work.target, sample, work.head.feature_layers)
    clock.lap("apart")


def throughput(accelerator: Accelerator, plan: Plan, say: Callable[[str], None]) -> None:
    """Make steps of a run for their speed, and say it. The head is not what it was; nothing is written."""
    work, config = plan.work, plan.work.config
    clock = Clock(work.target.device)
    source = TimedFeatures(work, clock)
    optimizer = make_optimizer(work.head, config.optim)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factor(config.optim, work.steps.stop))
    head, prepared, _ = prepare(accelerator, work.head, optimizer, scheduler)
    batches = BatchPlan(len(work.samples), config.optim.batch_size, config.run.seed)
    tokens = steps = 0
    least, most = WARM_UP + LEAST, len(work.steps)
    with timed_forward(head, clock):
        while _more(accelerator, steps < least or (steps < most and sum(clock.spent.values()) < SECONDS)):
            indices = batches.indices(work.steps.start + steps)
            mine = split(accelerator, indices, config.optim.accumulation)
            for rows in mine:
                forward_alone(work, rows, clock)
            clock.start()
            accumulate_gradients(accelerator, head, source, indices, config.optim.accumulation)
            clock.lap("backward")
            clip(accelerator, head, config.optim.max_grad_norm)  # with DeepSpeed it makes the step
            prepared.step()
            prepared.zero_grad()
            clock.lap("optimiser")
            steps += 1
            tokens += sum(source.num_tokens(rows) for rows in mine)
            if steps == WARM_UP:
                clock.spent.clear()
                tokens = 0
    for line in describe(work, clock.spent, tokens, steps - WARM_UP):
        say(line)


def _more(accelerator: Accelerator, wanted: bool) -> bool:
    """Return whether any process wants another step; all make the same number."""
    return bool(accelerator.reduce(torch.tensor(float(wanted), device=accelerator.device), "sum").item() > 0)


def describe(work: Work, spent: dict[str, float], tokens: int, steps: int) -> list[str]:
    """Return what was measured, for people.

    Args:
        work: The run.
        spent: Seconds of the target alone, `together` and `apart`, and of all `PARTS` of the steps.
        tokens: In the batches of this process, without padding.
        steps: How many there were.
    """
    optim, step = work.config.optim, sum(spent[part] for part in PARTS)
    bound = min(spent["together"], spent["apart"])
    where = f" in each of {work.processes} processes" if work.processes > 1 else ""
    speeds = {
        "target alone, a micro-batch at a time": spent["together"],
        "target alone, a conversation at a time": spent["apart"],
        "training, states computed": step,
        "training, states kept": step - spent["target"],
    }
    return [
        f"throughput: {steps} steps of {optim.batch_size} conversations, {tokens:,} tokens{where}; {work.head.kind} on "
        f"{work.target.name}, {work.target.device.type}, {work.config.target.dtype}, heads in {work.config.precision}",
        *(
            f"throughput: {name:38} {tokens / seconds:10,.0f} tokens/s, {bound / seconds:.2f} of the target alone"
            for name, seconds in speeds.items()
        ),
        "throughput: a step with its states is " + ", ".join(f"{part} {spent[part] / step:.1%}" for part in PARTS),
    ]
