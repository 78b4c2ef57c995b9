"""Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.1): K residual heads on the target's last state.

Head k reads the state at token t and predicts token t + 2 + k; the target itself predicts t + 1 from the same state.
The heads do not see each other's tokens, so the logits of a tree node depend on its depth only and one pass fills any
tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import FeatureBatch, Head, HeadConfig, HeadOutput, Lender
from heads.losses import vocabulary_loss


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Sizes and loss weights of Medusa heads."""

    num_heads: int = 4
    """K, the draft depth."""
    num_layers: int = 1
    """Residual blocks in each head."""
    own_lm_head: bool = False
    """Whether each head trains an output projection of its own, started from the target's. The default shares the
    target's: a head is then 2 * D * D bytes in bf16, and a step reads the projection once for all heads."""
    draft_vocab_size: int | None = None
    """U: heads predict only this many tokens (see `MedusaHead.set_vocabulary`); None for the whole vocabulary."""
    head_decay: float = 0.8
    """Head k's loss weighs `head_decay ** k` (the paper's lambda_k)."""
    ce_weight: float = 0.2
    """Weight of the cross-entropy with the token in the data."""
    kl_weight: float = 0.8
    """Weight of KL(target || head): the target's whole distribution, not only the token that was drawn from it."""
    chunk_size: int = 256
    """Label positions whose [K, U] logits are in memory at one time."""

    def __post_init__(self) -> None:
        """Reject sizes that make no head."""
        for name in ("num_heads", "num_layers", "chunk_size"):
            value = vars(self)[name]
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be between 1 and the target's {self.vocab_size}, got {self.draft_vocab_size}; "
                "leave it out to draft from the whole vocabulary"
            )
        if self.ce_weight < 0 or self.kl_weight < 0 or self.ce_weight + self.kl_weight == 0:
            raise ValueError(
                f"ce_weight and kl_weight must not be negative or both 0, got {self.ce_weight} and {self.kl_weight}"
            )


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


class MedusaHead(Head):
    """K independent residual heads; their output projection is the target's unless `own_lm_head` is set."""

    Config = MedusaConfig
    kind = "medusa"
    config: MedusaConfig
    vocabulary: Tensor | None
    projection: nn.Parameter | None

    def __init__(self, config: MedusaConfig, target: Lender) -> None:
        super().__init__(config, target)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        size = config.draft_vocab_size
        self.register_buffer("vocabulary", None if size is None else torch.arange(size))
        self.projection = None
        if config.own_lm_head:
            rows = self._lent_weight().detach().float()
            self.projection = nn.Parameter(rows.expand(config.num_heads, -1, -1).clone())  # [K, U, D]
        bias = dict(self.lm_head.named_parameters(recurse=False)).get("bias")
        if bias is not None:
            raise ValueError("the target's lm_head has a bias, which Medusa heads do not support; choose another head")

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Choose the draft vocabulary: logit column u stands for the target's token `token_ids[u]`.

        Args:
            token_ids: [U] distinct target ids, ascending; U is `config.draft_vocab_size`.

        Raises:
            ValueError: If the size differs, or the ids are not ascending ids of the target.
        """
        if self.vocabulary is None or token_ids.shape != self.vocabulary.shape:
            raise ValueError(f"expected {self.config.draft_vocab_size} draft ids, got {tuple(token_ids.shape)}")
        ascending = bool((token_ids[1:] > token_ids[:-1]).all())
        if not ascending or int(token_ids[0]) < 0 or int(token_ids[-1]) >= self.config.vocab_size:
            raise ValueError(f"draft ids must be distinct, ascending and below {self.config.vocab_size}")
        self.vocabulary.copy_(token_ids)
        if self.projection is not None:
            self.projection.data.copy_(self._lent_weight().float().expand_as(self.projection))

    def _lent_weight(self) -> Tensor:
        """[U, D] the target's output projection over the draft vocabulary."""
        weight = self.lm_head.get_parameter("weight").detach()
        return weight if self.vocabulary is None else weight[self.vocabulary.to(weight.device)]

    def states(self, hidden: Tensor) -> Tensor:
        """Map the target's states to each head's: [..., D] -> [..., K, D]."""
        return torch.stack([block(hidden) for block in self.blocks], dim=-2)

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the loss summed over label positions and heads; see `vocabulary_loss` for one term.

        The label at position j, predicted by the target's state at j - 1, trains head k from the state at j - 2 - k.
        The term counts where everything from the root (j - 1 - k) to the label is supervised, as in decoding, and
        where the label lies in the draft vocabulary (a token outside can never be drafted).
        """
        rows, positions, labels, active = self._labels(batch)
        depth = torch.arange(self.config.num_heads, device=labels.device)
        sources = (positions[:, None] - 2 - depth).clamp(min=0)  # [n, K]
        decay = self.config.head_decay**depth
        weight = self._lent_weight().to(batch.hidden.dtype)
        gathered = batch.hidden[rows[:, None], sources]  # [n, K, D]
        states = torch.stack([block(gathered[:, k]) for k, block in enumerate(self.blocks)], dim=1)
        loss, terms, correct = vocabulary_loss(
            states,
            weight if self.projection is None else self.projection,
            labels,
            batch.hidden[rows, positions - 1],
            weight,
            active * decay,
            ce_weight=self.config.ce_weight,
            kl_weight=self.config.kl_weight,
            chunk_size=self.config.chunk_size,
        )
        count = active.sum(0)
        metrics = {}
        for k in range(self.config.num_heads):
            metrics[f"head{k}/loss"] = torch.stack([(terms * active)[:, k].sum(), count[k]])
            metrics[f"head{k}/top1"] = torch.stack([(correct & active)[:, k].sum(), count[k]]).to(terms.dtype)
        return HeadOutput(loss=loss, metrics=metrics)

    def _labels(self, batch: FeatureBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return row [n], position [n], label column [n] and active heads [n, K] of all positions worth a term."""
        mask = batch.loss_mask.clone()
        mask[:, 0] = False  # a root at position 0 has no state before it
        runs = [mask]
        for k in range(self.config.num_heads):
            # supervised from k + 1 tokens before the label up to the label
            shifted = mask.roll(k + 1, dims=1)
            shifted[:, : k + 1] = False
            runs.append(runs[-1] & shifted)
        active = torch.stack(runs[1:], dim=-1)  # [B, T, K]
        columns = batch.token_ids
        if self.vocabulary is not None:
            columns = torch.searchsorted(self.vocabulary, batch.token_ids).clamp(max=len(self.vocabulary) - 1)
            active = active & (self.vocabulary[columns] == batch.token_ids)[..., None]
        rows, positions = active[..., 0].nonzero(as_tuple=True)
        return rows, positions, columns[rows, positions], active[rows, positions]

    def drafter(self) -> MedusaDrafter:
        """Return a fresh drafting state."""
        return MedusaDrafter(self)


class MedusaDrafter:
    """Logits of all depths after the last committed state, and the depth of the tree grown so far."""

    def __init__(self, head: MedusaHead) -> None:
        self._head = head
        self._weight: Tensor | None = None
        self._logits = torch.empty(0)
        self._depth = 0

    @property
    def max_depth(self) -> int:
        """K."""
        return self._head.config.num_heads

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return self._head.config.vocab_size

    @property
    def vocabulary(self) -> Tensor | None:
        """[U] target ids of the logit columns, or None."""
        return self._head.vocabulary

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        """Compute all heads at each row's last state; see `Drafter.sync`."""
        if self._weight is None:
            own = self._head.projection
            self._weight = self._head._lent_weight() if own is None else own.detach()
        last = hidden[torch.arange(len(lengths)), torch.tensor(lengths) - 1]  # [B, D]
        states = self._head.states(last.to(next(self._head.blocks.parameters()).dtype)).to(self._weight.dtype)
        if self._weight.dim() == 2:
            self._logits = F.linear(states, self._weight)  # [B, K, U]
        else:
            self._logits = torch.einsum("bkd,kud->bku", states, self._weight)
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
