"""What one process of a run needs of memory when it needs most, without running it.

The weights are counted, forward and backward of the largest micro-batch are imagined (`train.imagined`), the target is
run once over the longest conversation, and what the process holds besides is measured. Evaluations and checkpoints hold
a copy of the head's weights at most, when the gradients, as large, are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from data.batches import BatchPlan
from data.conversations import Encoded
from data.features import bytes_per_token, compute_states, size_text
from decode import Target
from decode.quantized import is_rounded, predicted_bytes, weight_bytes
from heads.base import Head
from heads.memory import give_back
from train.config import RunConfig
from train.imagined import LiveBytes, counting, step_bytes
from train.room import free_memory, free_on_device, resident

GAPS = 0.5
"""What glibc's heap leaves unused between small blocks of activations, as a share of them. Short runs of all heads at
two sizes took 0.2 to 0.9 beyond what was alive; two of them next to nothing with a fixed MALLOC_MMAP_THRESHOLD_."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process in one place."""

    place: str
    """"memory" or "GPU memory"."""
    parts: Mapping[str, int]
    """What for -> bytes, when their sum is highest."""
    held: int
    """Bytes that it has already."""
    free: int | None
    """Bytes that it can have beyond those; None if the system does not say."""

    @property
    def total(self) -> int:
        """The most that is needed."""
        return sum(self.parts.values())

    @property
    def added(self) -> int:
        """The most that is needed beyond what is held."""
        return self.total - self.held

    @property
    def excess(self) -> int:
        """Bytes that are missing; 0 if it fits."""
        return 0 if self.free is None else max(0, self.added - self.free)

    def describe(self) -> str:
        """Return it in one line, for people."""
        room = "how much there is, is not known" if self.free is None else f"{size_text(self.held + self.free)} there"
        parts = " + ".join(f"{name} {size_text(count)}" for name, count in self.parts.items() if count >= 2**16)
        return f"{self.place}: {size_text(self.total)} at most, {room} ({parts})"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run is made of, as far as its memory is concerned."""

    config: RunConfig
    target: Target
    head: Head
    samples: Sequence[Encoded]
    steps: range
    """Optimiser steps that are to be made."""
    processes: int
    dtype: torch.dtype
    """Number format of the target's weights and states."""
    target_pass: int
    """Bytes that the target takes for the longest conversation; see `target_pass_bytes`."""

    @property
    def micro_batch(self) -> int:
        """Conversations in a micro-batch."""
        return self.config.optim.batch_size // (self.processes * self.config.optim.accumulation)

    @property
    def state_size(self) -> int:
        """Bytes of the states of one token."""
        return bytes_per_token(self.target.hidden_size, self.head.feature_layers, self.dtype)

    def micro_batches(self) -> Iterator[list[int]]:
        """Yield those of all processes and steps."""
        optim, size = self.config.optim, self.micro_batch
        plan = BatchPlan(len(self.samples), optim.batch_size, self.config.run.seed)
        for step in self.steps:
            indices = plan.indices(step)
            yield from (indices[start : start + size] for start in range(0, len(indices), size))

    @cached_property
    def largest(self) -> list[list[Encoded]]:
        """Return the micro-batch with the longest conversation, and that with most supervised tokens."""
        lengths = [len(sample.token_ids) for sample in self.samples]
        labels = [sum(sample.loss_mask) for sample in self.samples]
        longest, fullest = (0, 0, [0]), (0, 0, [0])
        for rows in self.micro_batches():
            length, supervised = max(lengths[row] for row in rows), sum(labels[row] for row in rows)
            longest = max(longest, (length, supervised, rows))
            fullest = max(fullest, (supervised, length, rows))
        found = [longest[2], fullest[2]] if longest[2] != fullest[2] else [longest[2]]
        return [[self.samples[row] for row in rows] for rows in found]

    @cached_property
    def kept(self) -> tuple[int, bool]:
        """Bytes of states that stay in memory, and whether all do."""
        if self.config.data.feature_dir is not None:
            return 0, False
        seen = {row for rows in self.micro_batches() for row in rows}  # by one of several processes: fewer, at first
        total = sum(len(self.samples[row].token_ids) for row in seen) * self.state_size
        allowed = int(self.config.data.feature_memory * 2**30)
        return min(total, allowed), total <= allowed


def target_pass_bytes(target: Target, samples: Sequence[Encoded], feature_layers: Sequence[int]) -> int:
    """Return the bytes that the target takes for the longest conversation, its states included; it is run once.

    Raises:
        UnpredictableError: If they cannot be counted.
    """
    counted = LiveBytes(target.device)
    with counting(), counted:
        compute_states(target, max(samples, key=lambda sample: len(sample.token_ids)), feature_layers)
    return counted.peak


def target_bytes(target: Target, dtype: torch.dtype, quantize: str | None) -> int:
    """Return the bytes of the target's weights in a number format, rounded or not."""
    if is_rounded(target.model):
        return weight_bytes(target.model)
    count = predicted_bytes(target.model, quantize, dtype)
    if quantize is None and target.packed and target.packed.has_products and dtype == torch.float32:
        count += target.lm_head.get_parameter("weight").nbytes  # packed and plain: heads read it
    return count


def head_parts(work: Work, *, on_cpu: bool) -> dict[str, int]:
    """Return what the head needs beside its weights: name -> bytes."""
    parameters = list(work.head.parameters())
    gradients = sum(parameter.nbytes for parameter in parameters)
    exchanged = gradients if work.processes > 1 else 0  # DDP's buckets
    passes = min(2, work.config.optim.accumulation)
    bf16 = work.config.precision == "bf16"
    steps = [step_bytes(work.head, rows, work.dtype, passes=passes, bf16=bf16) for rows in work.largest]
    step = max(peak + (int(GAPS * small) if on_cpu else 0) for peak, small in steps)
    # AdamW's square root and quotient of one parameter; on a GPU one of all at once
    temporaries = 2 * max(parameter.nbytes for parameter in parameters) if on_cpu else gradients
    before = gradients if passes > 1 else 0  # while features are made
    features = before + work.target_pass + batch_bytes(work, on_cpu=on_cpu)
    most = max(step, gradients + temporaries, features)
    return {
        "gradients": gradients + exchanged,
        "optimiser": 2 * gradients,
        "batch and activations": max(0, most - gradients),
    }


def padded_bytes(work: Work) -> int:
    """Return the bytes of the states of a micro-batch as the head gets them."""
    return max(len(rows) * max(len(row.token_ids) for row in rows) for rows in work.largest) * work.state_size


def own_bytes(work: Work) -> int:
    """Return the bytes of the states of a micro-batch's conversations."""
    return max(sum(len(row.token_ids) for row in rows) for rows in work.largest) * work.state_size


def batch_bytes(work: Work, *, on_cpu: bool) -> int:
    """Return the bytes that making a micro-batch takes where the target is: its states, padded, and those not kept.

    What comes from data.feature_dir is in the host's memory until it is padded.
    """
    apart = not work.kept[1] and (on_cpu or work.config.data.feature_dir is None)
    return padded_bytes(work) + (own_bytes(work) if apart else 0)


def held_bytes(target: Target) -> tuple[int, int]:
    """Return the bytes that this process holds of memory, and of its GPU."""
    give_back()
    return resident(), torch.cuda.memory_allocated(target.device) if target.device.type == "cuda" else 0


def plan_memory(work: Work, local: int, held: tuple[int, int] | None = None) -> list[Memory]:
    """Return what is needed in each place.

    Args:
        work: The run.
        local: Processes on this machine, which share its memory.
        held: What this process has, target and head included; None to measure it now.

    Raises:
        UnpredictableError: If a step of the head cannot be counted.
    """
    on_cpu = work.target.device.type != "cuda"
    parts = head_parts(work, on_cpu=on_cpu)
    held = held_bytes(work.target) if held is None else held  # with the code that counting has loaded
    now = target_bytes(work.target, work.target.dtype, work.target.quantize)
    wanted = target_bytes(work.target, work.dtype, work.config.target.quantize)
    weights = {"target": wanted, "head": sum(p.nbytes for p in work.head.parameters())}
    kept = {"kept states": work.kept[0]}
    free = free_memory()
    share = None if free is None else free // local
    if on_cpu:
        process = {"process": max(0, held[0] - now - weights["head"])}
        return [Memory("memory", {**process, **weights, **parts, **kept}, held[0], share)]
    other = {"other": max(0, held[1] - now - weights["head"])}
    device = Memory("GPU memory", {**other, **weights, **parts}, held[1], free_on_device(work.target.device))
    read = 0 if work.config.data.feature_dir is None else own_bytes(work)
    return [device, Memory("memory", {"process": held[0], "batch": read, **kept}, held[0], share)]
