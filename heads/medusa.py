"""Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.1): K residual heads on the target's last state.

Head k reads the state at token t and predicts token t + 2 + k; the target itself predicts t + 1 from the same state.
The heads do not see each other's tokens, so the logits of a tree node depend on its depth only and one pass fills any
tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import FeatureBatch, Head, HeadConfig, HeadOutput, Lender
from heads.drafter import HeadDrafter
from heads.labels import find_labels
from heads.losses import check_losses, label_loss
from heads.packing import SharedInput, outputs
from heads.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Sizes and losses of Medusa heads."""

    num_heads: int = 4
    """K, the draft depth."""
    num_layers: int = 1
    """Residual blocks in each head."""
    own_lm_head: bool = False
    """Whether each head trains an output projection of its own, started from the target's. The default shares the
    target's: a head is then 2 * D * D bytes in bf16, and a step reads the projection once for all heads."""
    losses: Mapping[str, float] = field(default_factory=lambda: {"ce": 0.2, "kl": 0.8})
    """Weights of the losses over tokens; see `heads.objectives`. "kl" learns the target's whole distribution, not only
    the token that was drawn from it."""
    chunk_size: int = 256
    """Label positions whose [K, U] logits are in memory at one time."""

    def __post_init__(self) -> None:
        """Reject sizes and losses that make no head."""
        super().__post_init__()
        self.check_at_least(1, "num_heads", "num_layers", "chunk_size")
        check_losses(self.losses)


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`, with W and b zero at the start so that an untrained head repeats the target's own guess."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return x + F.silu(self.linear(x))


class MedusaHead(Head, SharedInput):
    """K independent residual heads; their output projection is the target's unless `own_lm_head` is set."""

    Config = MedusaConfig
    kind = "medusa"
    config: MedusaConfig
    projection: nn.Parameter | None

    def __init__(self, config: MedusaConfig, target: Lender) -> None:
        super().__init__(config, target)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        rows = self.lent_weight()
        self.projection = None
        if config.own_lm_head:
            self.projection = nn.Parameter(rows.float().expand(config.num_heads, -1, -1).clone())  # [K, U, D]

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Choose the draft vocabulary, and start own projections from its rows; see `Head.set_vocabulary`."""
        super().set_vocabulary(token_ids)
        if self.projection is not None:
            with torch.no_grad():
                self.projection.copy_(self.lent_weight().float().expand_as(self.projection))

    @property
    def same_input(self) -> tuple[nn.Linear, ...]:
        """Each head's first, which all read the target's state."""
        firsts = [next(block.children()) for block in self.blocks]
        return tuple(first.linear for first in firsts if isinstance(first, ResidualBlock))

    def states(self, hidden: Tensor) -> Tensor:
        """Map the target's states to each head's: [..., D] -> [..., K, D]."""
        states = hidden[..., None, :] + F.silu(torch.stack(list(outputs(self.same_input, hidden)), dim=-2))
        if self.config.num_layers == 1:
            return states
        further = [nn.Sequential(*list(block.children())[1:]) for block in self.blocks]
        return torch.stack([rest(state) for rest, state in zip(further, states.unbind(-2), strict=True)], dim=-2)

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the loss summed over label positions and heads; see `vocabulary_loss` for one term.

        The label at position j, predicted by the target's state at j - 1, trains head k from the state at j - 2 - k.
        The term counts where everything from the root (j - 1 - k) to the label is supervised, as in decoding, and
        where the label lies in the draft vocabulary (a token outside can never be drafted).
        """
        labels = find_labels(batch, self.config.num_heads, self.vocabulary)
        weight = self.lent_weight()
        gathered = batch.hidden[labels.rows[:, None], labels.sources()]  # [n, K, D]
        states = torch.stack([block(gathered[:, k]) for k, block in enumerate(self.blocks)], dim=1)
        return label_loss(
            batch,
            labels,
            states,
            weight if self.projection is None else self.projection,
            weight,
            decay=self.config.depth_decay,
            losses=self.config.losses,
            chunk_size=self.config.chunk_size,
        )

    def output_projection(self) -> Callable[[Tensor], Tensor]:
        """Return the output projection, [B, K, D] -> [B, K, U], for drafting."""
        own = self.projection
        if own is None:
            return self.lent_projection()
        return lambda states: torch.einsum("bkd,kud->bku", states, own)

    def drafter(self) -> MedusaDrafter:
        """Return a fresh drafting state."""
        return MedusaDrafter(self)


class MedusaDrafter(HeadDrafter[MedusaHead]):
    """Logits of all depths after the last committed state, and the depth of the tree grown so far."""

    def __init__(self, head: MedusaHead) -> None:
        super().__init__(head, head.config.num_heads)
        self._project: Callable[[Tensor], Tensor] | None = None
        self._logits = torch.empty(0)
        self._depth = 0

    @torch.inference_mode()
    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        """Compute all heads at each row's last state; see `Drafter.sync`."""
        if self._project is None:
            self._project = self._head.output_projection()
        last = hidden[torch.arange(len(lengths), device=hidden.device), to_device(lengths, hidden.device) - 1]  # [B, D]
        self._logits = self._project(self._head.states(last.to(self._head.dtype)))
        self._depth = 0
        return self._logits[:, 0]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Return the next depth's logits, shared by all nodes: [B, 1, U]; see `Drafter.extend`."""
        self._depth += 1
        return self._logits[:, self._depth, None]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self._logits = self._logits[list(rows)]


HEAD = MedusaHead
