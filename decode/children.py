"""Which tokens become the children of tree nodes: the best by rank, or drawn from the drafter's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decode import noise
from decode.sampling import Sampler

Draw = Literal["none", "without_replacement", "with_replacement", "hybrid"]
"""How a node's k children are chosen at temperature > 0. `none`: the k best. `without_replacement`,
`with_replacement`: k draws. `hybrid`: the k - 1 best and, as the last, one drawn from the others (Hu et al. 2025,
arXiv:2502.18779), which accepts most under `Rejection`."""


@dataclass(frozen=True)
class Children:
    """How the children of one level's nodes are chosen."""

    draw: Draw
    temperature: float
    """Of the drafts, above 0."""
    shared_noise: bool
    """Rank the best tokens with the noise the target will choose with (`Draw` none)."""
    columns: Tensor
    """[U] target ids of the logits' columns, which the noise goes by."""

    def choose(
        self, logits: Tensor, width: int, counts: Tensor, rows: Sequence[Sampler], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the children of the nodes at `depth - 1`.

        Args:
            logits: [B, W, U], or [B, 1, U] where all nodes share them.
            width: k, the largest of `counts`.
            counts: [W] number of children of each node.
            rows: B sources of noise; their text ends with the root.
            depth: Of the children.

        Returns:
            Columns [B, W, k] by rank, and the distribution that drawn ones were drawn from,
            [B, W, U], or None.
        """
        scores = logits.double() / self.temperature
        nodes = len(counts)
        if self.draw == "none":
            perturbed = scores + self._noise(rows, noise.TARGET, depth) if self.shared_noise else scores
            return ranked(perturbed, width, nodes), None
        if self.draw == "without_replacement":
            drawn = ranked(scores + self._noise(rows, noise.DRAFT, depth), width, nodes)
            return drawn, scores.softmax(-1)
        if self.draw == "with_replacement":
            draws = [(scores + self._noise(rows, noise.DRAFT, depth, rank)).argmax(-1) for rank in range(width)]
            return torch.stack(draws, dim=-1).expand(-1, nodes, -1), scores.softmax(-1)
        best = ranked(scores, width, nodes)
        rank = torch.arange(width, device=scores.device)
        others = scores.expand(-1, nodes, -1)
        taken = torch.where(rank < counts[:, None] - 1, -torch.inf, others.gather(-1, best))
        others = others.scatter(-1, best, taken)
        drawn = (others + self._noise(rows, noise.DRAFT, depth)).argmax(-1, keepdim=True)
        return torch.where(rank == counts[:, None] - 1, drawn, best), others.softmax(-1).nan_to_num(
            0.0
        )  # nothing left to draw: no law

    def _noise(self, rows: Sequence[Sampler], purpose: int, depth: int, rank: int = 0) -> Tensor:
        """Return Gumbel noise [B, 1, U] of the position at `depth`."""
        keys = [row.key(purpose, len(row.context) + depth - 1) for row in rows]
        if purpose == noise.DRAFT:
            # new in every step: a rule that looks at drafts it then drops must not meet their noise again
            keys = [noise.key(key, len(row.context), rank) for key, row in zip(keys, rows, strict=True)]
        return noise.gumbel(keys, self.columns)[:, None]


def ranked(scores: Tensor, width: int, nodes: int) -> Tensor:
    """Return the columns of the `width` best scores: [B, W or 1, U] -> [B, nodes, width]."""
    return scores.topk(width, dim=-1).indices.expand(-1, nodes, -1)
