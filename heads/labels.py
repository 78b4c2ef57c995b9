"""Which positions of a text train which depth of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.base import FeatureBatch


@dataclass(frozen=True)
class Labels:
    """n positions of a batch whose token some depth of a head learns to predict."""

    rows: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64, at least 2: the root of depth 0 stands before the label, and its state before the root."""
    columns: Tensor
    """[n] int64 logit column of the token there."""
    active: Tensor
    """[n, K] bool, which depths learn it."""

    def sources(self) -> Tensor:
        """Return the position of the state that each depth drafts from, [n, K]; 0 where there is none.

        Depth k predicts the label at position j from the target's state at j - 2 - k, the last before the root.
        """
        depths = torch.arange(self.active.shape[1], device=self.positions.device)
        return (self.positions[:, None] - 2 - depths).clamp(min=0)


def find_labels(batch: FeatureBatch, depth: int, vocabulary: Tensor | None) -> Labels:
    """Return the positions worth a term of the loss.

    Depth k learns the token at j where everything from its root (j - 1 - k) to the label is supervised, as in decoding,
    and where the label lies in the draft vocabulary (a token outside can never be drafted).

    Args:
        batch: The batch.
        depth: K.
        vocabulary: [U] target ids of the logit columns, ascending, or None.
    """
    run = batch.loss_mask.clone()
    run[:, 0] = False  # a root at position 0 has no state before it
    mask = run
    runs = []
    for k in range(depth):
        shifted = mask.roll(k + 1, dims=1)
        shifted[:, : k + 1] = False
        run = run & shifted  # supervised from k + 1 tokens before the label up to the label
        runs.append(run)
    active = torch.stack(runs, dim=-1)  # [B, T, K]
    columns = batch.token_ids
    if vocabulary is not None:
        columns = torch.searchsorted(vocabulary, batch.token_ids).clamp(max=len(vocabulary) - 1)
        active = active & (vocabulary[columns] == batch.token_ids)[..., None]
    rows, positions = active[..., 0].nonzero(as_tuple=True)
    return Labels(rows, positions, columns[rows, positions], active[rows, positions])
