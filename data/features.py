"""The target's states and features for batches of conversations: computed when needed, kept in memory while they fit.

The target's pass costs several times a head's, and its states never change, so further epochs reuse what fits. It runs
one conversation at a time: a state then depends on its own conversation only, not on what it was batched with, and a
resumed or re-batched run sees the same bits whether they come from memory, from the target or from disk
(`data.stored_features`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from data.batches import collate
from data.conversations import Encoded
from decode import Target
from heads.base import FeatureBatch
from heads.transfer import move, to_device

Most = Callable[[Sequence[int]], Sequence[int]]
"""The largest of each number in any process."""


class States(NamedTuple):
    """What a head reads of one conversation."""

    hidden: Tensor
    """[T, D] the target's states."""
    features: Tensor | None
    """[T, F] outputs of the feature layers, side by side; None for no layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.hidden.nbytes + (0 if self.features is None else self.features.nbytes)

    def cpu(self) -> States:
        """Return them in the host's memory."""
        return States(self.hidden.cpu(), None if self.features is None else self.features.cpu())


def compute_states(target: Target, sample: Encoded, feature_layers: Sequence[int]) -> States:
    """Run the target over one conversation; the states are on its device."""
    token_ids = to_device([sample.token_ids], target.device)
    hidden, features = target.encode_features(token_ids, [len(sample.token_ids)], feature_layers)
    return States(hidden[0], None if features is None else features[0])


def bytes_per_token(hidden_size: int, feature_layers: Sequence[int], dtype: torch.dtype) -> int:
    """Return what the states of one token take; a layer's output is as wide as the state."""
    return (1 + len(feature_layers)) * hidden_size * dtype.itemsize


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


class Features(ABC):
    """Feature batches of `samples`; where the states come from is the subclass's affair.

    Args:
        target: The frozen model; batches are placed on its device, in its dtype.
        samples: Encoded conversations; `batch` takes indices into them.
        feature_layers: Decoder layers whose outputs are wanted; see `heads.Head.feature_layers`.

    Raises:
        ValueError: If there is no such layer.
    """

    def __init__(self, target: Target, samples: Sequence[Encoded], feature_layers: Sequence[int]) -> None:
        target.check_layers(feature_layers)
        self._target = target
        self._samples = samples
        self._feature_layers = tuple(feature_layers)
        self.target_seconds, self.target_tokens = 0.0, 0  # what passes of the target took while batches were made

    @abstractmethod
    def states(self, index: int) -> States:
        """Return the states of one sample, on the CPU or the target's device; not to be written to."""

    @abstractmethod
    def describe(self) -> str:
        """Return how much there is and where it is kept, for people."""

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return tokens, loss mask, states and features of the samples at `indices`, padded on the right with zeros."""
        token_ids, loss_mask = collate([self._samples[index] for index in indices])
        rows = [self.states(index) for index in indices]
        hidden = self._pad([row.hidden for row in rows])
        features = (
            self._pad([row.features for row in rows if row.features is not None]) if self._feature_layers else None
        )
        device = self._target.device
        return FeatureBatch(move(token_ids, device), move(loss_mask, device), hidden, features)

    def _pad(self, rows: Sequence[Tensor]) -> Tensor:
        """Return rows of [T, D] as one tensor [B, T, D] where batches belong."""
        size = (len(rows), max(map(len, rows)), rows[0].shape[-1])
        padded = torch.zeros(size, dtype=self._target.dtype, device=self._target.device)
        for row, part in enumerate(rows):
            padded[row, : len(part)].copy_(part, non_blocking=True)
        return padded

    def num_supervised(self, indices: Sequence[int]) -> int:
        """Return the number of supervised tokens of the samples at `indices`."""
        return sum(sum(self._samples[index].loss_mask) for index in indices)

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens, without padding, of the samples at `indices`."""
        return sum(len(self._samples[index].token_ids) for index in indices)


class OnlineFeatures(Features):
    """Features from a target in the same process; owns the states it keeps.

    Args:
        target: See `Features`.
        samples: See `Features`.
        memory_bytes: Bytes of host memory for kept states. First come, first kept: nothing is evicted, because every
            epoch visits every sample once and eviction would only swap one for another.
        feature_layers: See `Features`.
        most: Returns the largest numbers of all processes, which call it together. Only for a target whose layers are
            spread over them: what one process lacks, all compute, each its own conversation.
    """

    def __init__(
        self,
        target: Target,
        samples: Sequence[Encoded],
        memory_bytes: int,
        feature_layers: Sequence[int] = (),
        most: Most | None = None,
    ) -> None:
        super().__init__(target, samples, feature_layers)
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes must not be negative, got {memory_bytes}; 0 keeps nothing")
        self._memory_bytes = memory_bytes
        self._kept: dict[int, States] = {}
        self.kept_bytes = 0
        self._most = most
        self._lacking: dict[int, States] = {}  # of a batch, in lock-step

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return the samples at `indices`; see `Features.batch`. All processes ask for as many."""
        if self._most is not None:
            lacking = self._most([int(index not in self._kept) for index in indices])
            pairs = zip(indices, lacking, strict=True)
            self._lacking = {index: self._compute(index) for index, anywhere in pairs if anywhere}
        try:
            return super().batch(indices)
        finally:
            self._lacking = {}

    def states(self, index: int) -> States:
        """Return the states of one sample, on the CPU if they are kept; not to be written to."""
        found = self._kept.get(index, self._lacking.get(index))
        return self._compute(index) if found is None else found

    def _compute(self, index: int) -> States:
        """Compute the states of one sample, and keep them if they fit."""
        start = time.perf_counter()
        states = compute_states(self._target, self._samples[index], self._feature_layers)
        keep = index not in self._kept and self.kept_bytes + states.nbytes <= self._memory_bytes
        if keep:
            states = self._kept[index] = states.cpu()
            self.kept_bytes += states.nbytes
        elif self._target.device.type != "cpu":
            torch.accelerator.synchronize(self._target.device)  # the clock is read next
        self.target_seconds += time.perf_counter() - start
        self.target_tokens += len(states.hidden)
        return states

    def describe(self) -> str:
        """Return how many of the samples' states fit into the memory allowed, for people."""
        size = bytes_per_token(self._target.hidden_size, self._feature_layers, self._target.dtype)
        sizes = [len(sample.token_ids) * size for sample in self._samples]
        fitting, used = 0, 0
        for needed in sizes:
            if used + needed <= self._memory_bytes:
                fitting, used = fitting + 1, used + needed
        tail = "all are computed once" if fitting == len(sizes) else "the others are computed again in every epoch"
        layers = f" and outputs of layers {list(self._feature_layers)}" if self._feature_layers else ""
        return (
            f"target states{layers}: {size_text(sum(sizes))}; about {fitting} of {len(sizes)} conversations fit "
            f"into {size_text(self._memory_bytes)}, {tail}"
        )
