"""The training loop: which steps are made, what one step is, and how the run stops.

One optimiser step is defined by its global batch alone: the loss is the sum over the supervised positions of all
processes and micro-batches, divided by the number of supervised tokens among them. Splitting a batch differently gives
the same step, but for random numbers that a head draws. The loop knows neither the target nor the kind of head; it gets
feature batches and an evaluation.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn

from heads.base import FeatureBatch, Head
from train.checkpoints import Checkpoints, Progress
from train.config import OptimConfig, RunConfig
from train.distributed import clip, micro_batch
from train.journal import Journal
from train.pace import Pace
from train.refused import save_batches


class FeatureSource(Protocol):
    """Where feature batches come from; `data.features.Features` is one."""

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return the samples at `indices`, padded."""
        ...

    def num_supervised(self, indices: Sequence[int]) -> int:
        """Return how many of their tokens are supervised."""
        ...

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Return how many tokens they have."""
        ...


class Plan(Protocol):
    """Which samples a step sees; `data.batches.BatchPlan` is one."""

    def indices(self, step: int) -> list[int]:
        """Return the global batch of optimiser step `step`, counted from 0."""
        ...


Evaluate = Callable[[Callable[[], bool]], Mapping[str, float] | None]
"""Decodes the held-out prompts and returns eval/*; asks its argument between prompts whether to give up (then None)."""


class StopRequest:
    """Set by SIGTERM or Ctrl-C; a later second one has its usual effect. A context manager."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Return whether the run was asked to stop."""
        return self._since is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > 3:  # torchrun repeats a Ctrl-C that the terminal has sent already
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def schedule_factor(optim: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate of step n (from 0) as a share of the peak: linear warm-up, then cosine or constant."""

    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / (optim.warmup_steps + 1)
        if optim.schedule == "constant":
            return 1.0
        done = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def make_optimizer(head: Head, optim: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW on the head's parameters, with the learning rates that the head wants."""
    groups = [{"params": list(group), "lr": optim.lr * share} for share, group in head.learning_rates().items()]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)


def split(accelerator: Accelerator, indices: Sequence[int], accumulation: int) -> list[Sequence[int]]:
    """Return the micro-batches of this process's share of the global batch `indices`."""
    share = len(indices) // accelerator.num_processes
    mine = indices[accelerator.process_index * share : (accelerator.process_index + 1) * share]
    size = share // accumulation
    return [mine[start : start + size] for start in range(0, share, size)]


def accumulate_gradients(
    accelerator: Accelerator, head: nn.Module, source: FeatureSource, indices: Sequence[int], accumulation: int
) -> dict[str, Tensor]:
    """Add the gradient of the global batch `indices` to the head's parameters; every process takes its share.

    Returns:
        name -> [2] (sum, count) of this process: the loss, as "loss", and the head's metrics.
    """
    micro_batches = split(accelerator, indices, accumulation)
    count = source.num_supervised(indices)
    dtype = next(head.parameters()).dtype
    sums: dict[str, Tensor] = {}
    for number, micro in enumerate(micro_batches, start=1):
        batch = source.batch(micro)
        with micro_batch(accelerator, head, last=number == len(micro_batches)) as backward:
            features = None if batch.features is None else batch.features.to(dtype)
            output = head(replace(batch, hidden=batch.hidden.to(dtype), features=features))
            # gradients are averaged over the processes; num_processes makes that a sum
            backward(output.loss * (accelerator.num_processes / count))
        loss = torch.stack([output.loss.detach(), output.loss.new_tensor(source.num_supervised(micro))])
        for name, value in {"loss": loss, **output.metrics}.items():
            sums[name] = sums.get(name, 0) + value.double()
    return sums


@dataclass
class Trainer:
    """One run, from its progress to its last step. Head, optimiser and schedule are prepared by accelerate."""

    accelerator: Accelerator
    head: nn.Module
    optimizer: AcceleratedOptimizer
    scheduler: AcceleratedScheduler
    source: FeatureSource
    plan: Plan
    config: RunConfig
    total_steps: int
    progress: Progress
    checkpoints: Checkpoints
    journal: Journal
    evaluate: Evaluate | None
    save_head: Callable[[str, Mapping[str, float]], None]
    """Writes the head folder `best` or `last`, with what was measured."""
    pace: Pace
    gather: Callable[[], None]
    """Brings the head that `evaluate` decodes with up to date."""

    measured: Mapping[str, float] = field(default_factory=dict, init=False)
    """Result of the evaluation at the current step."""
    tokens: int = field(default=0, init=False)
    """Tokens trained on since `since`."""
    since: float = field(default_factory=time.monotonic, init=False)

    def run(self) -> bool:
        """Train to the end and return True, or save and return False when asked to stop.

        Raises:
            FloatingPointError: If a loss or gradient is not finite; the state before that step is saved.
        """
        stopped = False
        with StopRequest() as stop:
            while True:
                step = self.progress.step
                evaluating = self._evaluation_due(step) and not stopped
                finished = step >= self.total_steps
                if stopped or finished or evaluating or self._due(step, self.config.run.save_every):
                    self._save()
                if evaluating:
                    stopped = not self._evaluate(stop)
                if not self._evaluation_due(step):
                    self.journal.tell()
                if evaluating or stopped or finished:
                    self.journal.draw()
                if stopped or finished:
                    return not stopped
                stopped = self._step(stop)

    def _step(self, stop: StopRequest) -> bool:
        """Make one optimiser step; return whether any process was asked to stop."""
        indices = self.plan.indices(self.progress.step)
        self.pace.begin()
        sums = accumulate_gradients(self.accelerator, self.head, self.source, indices, self.config.optim.accumulation)
        # one reduction for everything the processes must agree on
        flag = torch.tensor([float(stop()), 1.0], device=self.accelerator.device, dtype=torch.float64)
        names = list(sums)
        total = self.accelerator.reduce(torch.stack([flag, *sums.values()]), "sum").tolist()
        means = {name: part / max(count, 1.0) for name, (part, count) in zip(names, total[1:], strict=True)}
        rate = self.scheduler.get_last_lr()[0]
        finite = math.isfinite(means["loss"])
        norm = clip(self.accelerator, self.head, self.config.optim.max_grad_norm) if finite else math.nan
        if not math.isfinite(norm):
            self._refuse(indices, means["loss"], norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.pace.end(indices)
        self.progress.step += 1
        self.measured = {}
        self._report(indices, {**means, "lr": rate, "grad_norm": norm})
        return bool(total[0][0] > 0)

    def _report(self, indices: Sequence[int], values: Mapping[str, float]) -> None:
        self.tokens += self.source.num_tokens(indices)
        speed = self.tokens / max(time.monotonic() - self.since, 1e-9)
        step = self.progress.step
        self.journal.advance(values["loss"], speed)
        if self._due(step, self.config.run.log_every) or step == self.total_steps:
            named = {f"train/{name}": value for name, value in values.items()}
            self.journal.log(step, {**named, "train/tokens_per_second": speed})
            self._restart_clock()

    def _restart_clock(self) -> None:
        self.tokens, self.since = 0, time.monotonic()

    def _evaluate(self, stop: StopRequest) -> bool:
        """Evaluate, keep the best head, and return whether it was done to the end."""
        assert self.evaluate is not None
        self.gather()
        self.head.eval()
        with torch.random.fork_rng():
            measured = self.evaluate(stop)
        self.head.train()
        if measured is None:
            return False
        self.measured = measured
        self.progress.evaluated_step = self.progress.step
        named = {name if name.startswith("drift/") else f"eval/{name}": value for name, value in measured.items()}
        self.journal.log(self.progress.step, named)
        self.journal.say(summary(self.progress.step, measured))
        if measured["tokens_per_step"] >= self.progress.best:
            self.progress.best, self.progress.best_step = measured["tokens_per_step"], self.progress.step
            self.save_head("best", measured)
        self._save()
        self._restart_clock()
        return True

    def _save(self) -> None:
        self.checkpoints.save(self.accelerator, self.progress)
        self.save_head("last", self.measured)

    def _refuse(self, indices: Sequence[int], loss: float, norm: float) -> None:
        """Save the state before the step, and the batch that spoilt it; every process comes here, or none."""
        self.optimizer.zero_grad()
        self._save()
        step = self.progress.step + 1
        micro_batches = split(self.accelerator, indices, self.config.optim.accumulation)
        name = f"not_finite_step_{step}_process_{self.accelerator.process_index}.safetensors"
        path = self.checkpoints.folder.parent / name
        # made again, one at a time: the device may hold no more, and a source gives the same bits twice
        save_batches(path, map(self.source.batch, micro_batches), chain.from_iterable(micro_batches))
        self.accelerator.wait_for_everyone()  # the first to raise has the launcher end the others
        raise FloatingPointError(
            f"step {step}: loss {loss}, gradient norm {norm}; the step was not made and the state before it is saved. "
            f"Its batch is in {path} (each process has its own share), with the numbers of the conversations. Look at "
            "those, or start another run (--run.name) with a lower optim.lr or --precision=float32"
        )

    def _evaluation_due(self, step: int) -> bool:
        if self.evaluate is None or self.progress.evaluated_step == step:
            return False
        return step == self.total_steps or self._due(step, self.config.run.eval_every)

    @staticmethod
    def _due(step: int, period: int) -> bool:
        return period > 0 and step % period == 0


def summary(step: int, measured: Mapping[str, float]) -> str:
    """Return one line about an evaluation."""
    low, high = measured["tokens_per_step_low"], measured["tokens_per_step_high"]
    sampled = "".join(
        f", {value:.3f} at T = {name[1:].partition('/')[0]}"
        for name, value in measured.items()
        if re.fullmatch(r"t\d[^/]*/tokens_per_step", name)
    )
    return (
        f"step {step}: {measured['tokens_per_step']:.3f} tokens per step ({low:.2f} to {high:.2f}){sampled}; "
        f"{measured['speedup']:.2f} x plain decoding, {measured['mismatches']:.0f} mismatches"
    )
