"""The target's states for batches of conversations: computed when needed, kept in memory while they fit.

The target's pass costs several times a head's, and its states never change, so further epochs reuse what fits. It runs
one conversation at a time: a state then depends on its own conversation only, not on what it was batched with, and a
resumed or re-batched run sees the same bits whether they come from memory or from the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.batches import collate
from data.conversations import Encoded
from decode import Target
from heads.base import FeatureBatch


class OnlineFeatures:
    """Feature batches of `samples` from a target in the same process; owns the states it keeps.

    Args:
        target: The frozen model; batches are placed on its device, in its dtype.
        samples: Encoded conversations; `batch` takes indices into them.
        memory_bytes: Bytes of host memory for kept states. First come, first kept: nothing is evicted, because every
            epoch visits every sample once and eviction would only swap one for another.
    """

    def __init__(self, target: Target, samples: Sequence[Encoded], memory_bytes: int) -> None:
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes must not be negative, got {memory_bytes}; 0 keeps nothing")
        self._target = target
        self._samples = samples
        self._memory_bytes = memory_bytes
        self._kept: dict[int, Tensor] = {}
        self.kept_bytes = 0

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return tokens, loss mask and states of the samples at `indices`, padded on the right with zeros."""
        token_ids, loss_mask = collate([self._samples[index] for index in indices])
        states = [self._states(index) for index in indices]
        hidden = states[0].new_zeros((*token_ids.shape, states[0].shape[-1]))  # [B, T, D]
        for row, state in enumerate(states):
            hidden[row, : len(state)] = state
        device = self._target.device
        return FeatureBatch(token_ids.to(device), loss_mask.to(device), hidden.to(device))

    def num_supervised(self, indices: Sequence[int]) -> int:
        """Return the number of supervised tokens of the samples at `indices`."""
        return sum(sum(self._samples[index].loss_mask) for index in indices)

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens, without padding, of the samples at `indices`."""
        return sum(len(self._samples[index].token_ids) for index in indices)

    def describe(self) -> str:
        """Return how many of the samples' states fit into the memory allowed, for people."""
        size = self._target.hidden_size * self._target.dtype.itemsize
        sizes = [len(sample.token_ids) * size for sample in self._samples]
        fitting, used = 0, 0
        for needed in sizes:
            if used + needed <= self._memory_bytes:
                fitting, used = fitting + 1, used + needed
        gib = 2**30
        tail = "all are computed once" if fitting == len(sizes) else "the others are computed again in every epoch"
        return (
            f"target states: {sum(sizes) / gib:.2f} GiB; about {fitting} of {len(sizes)} conversations fit into "
            f"{self._memory_bytes / gib:.2f} GiB, {tail}"
        )

    def _states(self, index: int) -> Tensor:
        """Return the states [T, D] of one sample, on the CPU."""
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        token_ids = torch.tensor([self._samples[index].token_ids], device=self._target.device)
        states = self._target.encode(token_ids, [token_ids.shape[1]])[0].cpu()
        size = states.numel() * states.element_size()
        if self.kept_bytes + size <= self._memory_bytes:
            self._kept[index] = states
            self.kept_bytes += size
        return states
