"""Which samples are in which batch, as a pure function of the seed and the step, and how they become tensors.

Resuming a run needs nothing but the step: there is no iterator whose state would have to be saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from data.conversations import Encoded


@dataclass(frozen=True)
class BatchPlan:
    """An endless sequence of batches over `num_samples` samples.

    Epoch e is a permutation of all samples drawn from (seed, e). The epochs are laid end to end and cut into batches of
    exactly `batch_size`, so a batch may hold the end of one epoch and the start of the next, and no sample is dropped.
    """

    num_samples: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}; are there any conversations?")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps after which every sample was seen at least once."""
        return -(-self.num_samples // self.batch_size)

    def indices(self, step: int) -> list[int]:
        """Return the sample numbers of batch `step` (from 0); always `batch_size` of them."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        picked = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, offset = divmod(position, self.num_samples)
            picked.append(int(_permutation(self.num_samples, self.seed, epoch)[offset]))
        return picked


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def collate(samples: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T] int64 and loss mask [B, T] bool of the samples, padded on the right with 0 and False.

    Raises:
        ValueError: If there are no samples.
    """
    if not samples:
        raise ValueError("collate needs at least one sample, got none")
    length = max(len(sample.token_ids) for sample in samples)
    token_ids = torch.zeros(len(samples), length, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids, dtype=torch.int64)
        loss_mask[row, : len(sample.loss_mask)] = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return token_ids, loss_mask
