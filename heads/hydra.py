"""Hydra heads (Ankner et al. 2024, arXiv:2402.05109): Medusa heads that see the tokens drafted before theirs.

Head k reads the target's state at token t and the embeddings of the tokens t + 1 to t + 1 + k, and predicts t + 2 + k;
t + 1 is the root, the others are the drafted tokens above. Hydra++ reads the state through one more decoder layer, the
prefix layer, which attends to the states of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import FeatureBatch, Head, HeadOutput, Lender
from heads.cache import TreeCache
from heads.drafter import HeadDrafter
from heads.growing import growing_tree
from heads.labels import Labels, find_labels
from heads.layers import DecoderLayer, LayerConfig, RMSNorm, attend, positions_behind, read_on
from heads.losses import check_losses, label_loss
from heads.medusa import ResidualBlock
from heads.packing import SharedInput, outputs
from heads.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class HydraConfig(LayerConfig):
    """Sizes and losses of Hydra heads; Hydra++ is `num_layers=4, prefix_layer=True, losses={"kl": 1}`."""

    num_heads: int = 4
    """K, the draft depth."""
    num_layers: int = 1
    """Residual blocks in each head."""
    prefix_layer: bool = False
    """Whether a decoder layer of the target's sizes reads the states of the whole text before the heads do."""
    losses: Mapping[str, float] = field(default_factory=lambda: {"ce": 0.2, "kl": 0.8})
    """Weights of the losses; see `heads.objectives`."""
    chunk_size: int = 256
    """Label positions whose [K, U] logits are in memory at one time."""

    def __post_init__(self) -> None:
        """Reject sizes and losses that make no head."""
        super().__post_init__()
        self.check_at_least(1, "num_heads", "num_layers", "chunk_size")
        check_losses(self.losses)


class FirstBlock(SharedInput):
    """`R x + SiLU(W x + b)` from a state and its embeddings to one state; at the start it returns the state."""

    def __init__(self, size: int, embeddings: int) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + embeddings) * size, size)
        self.res_connection = nn.Linear((1 + embeddings) * size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.eye_(self.res_connection.weight)
        nn.init.zeros_(self.res_connection.bias)

    @property
    def same_input(self) -> tuple[nn.Linear, ...]:
        """Both."""
        return self.res_connection, self.linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., (1 + embeddings) * D], the state first -> [..., D]."""
        residual, gate = outputs(self.same_input, x)
        return residual + F.silu(gate)


class PrefixLayer(DecoderLayer):
    """A causal decoder layer over the target's states; at the start it returns them.

    The paper's is followed by one more norm, which would change the states it starts from.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Read whole texts: [B, T, D] -> [B, T, D]."""
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        normal = self.input_layernorm(hidden)
        keys, values = self.self_attn.keys_values(normal, places)
        visible = places[..., None] >= places[:, None]  # [1, T, T]
        return self.finish(hidden, attend(self.self_attn.queries(normal, places), keys, values, visible))


class HydraHead(Head):
    """K residual heads, each on a state and the tokens after it, through the target's output projection."""

    Config = HydraConfig
    kind = "hydra"
    config: HydraConfig
    prefix: PrefixLayer | None

    def __init__(self, config: HydraConfig, target: Lender) -> None:
        super().__init__(config, target)
        self.tree = growing_tree(config.num_heads, config.draft_vocab_size or config.vocab_size)
        self.lent_weight()  # refuses a target whose lm_head the heads cannot use
        size = config.hidden_size
        self.prefix = PrefixLayer(config) if config.prefix_layer else None
        self.blocks = nn.ModuleList(
            nn.Sequential(FirstBlock(size, k + 1), *(ResidualBlock(size) for _ in range(config.num_layers - 1)))
            for k in range(config.num_heads)
        )

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the loss summed over label positions and heads, head k's weighted by `depth_decay ** k`.

        The label at position j, predicted by the target's state at j - 1, trains head k from the state at j - 2 - k
        and the tokens from there to j - 1; see `heads.labels` for which labels count.
        """
        labels = find_labels(batch, self.config.num_heads, self.vocabulary)
        weight = self.lent_weight()
        return label_loss(
            batch,
            labels,
            self._states(batch, labels),
            weight,
            weight,
            decay=self.config.depth_decay,
            losses=self.config.losses,
            chunk_size=self.config.chunk_size,
        )

    def _states(self, batch: FeatureBatch, labels: Labels) -> Tensor:
        """Return what each head makes of the text before each label: [n, K, D]."""
        hidden = batch.hidden if self.prefix is None else self.prefix(batch.hidden)
        sources = labels.sources()
        states = []
        for k, block in enumerate(self.blocks):
            # k + 1 tokens up to the one before the label; of heads that do not learn it, some would lie before the text
            tokens = (labels.positions[:, None] - 1 - k + torch.arange(k + 1, device=sources.device)).clamp(min=0)
            embedded = self.embedded(batch.token_ids[labels.rows[:, None], tokens])  # [n, k + 1, D]
            state = hidden[labels.rows, sources[:, k]]
            states.append(block(torch.cat([state, embedded.flatten(1)], dim=-1)))
        return torch.stack(states, dim=1)

    def drafter(self) -> HydraDrafter:
        """Return a fresh drafting state."""
        return HydraDrafter(self)


class HydraDrafter(HeadDrafter[HydraHead]):
    """What the heads read at each node of the tree's last level, and the prefix layer's K/V of committed states."""

    def __init__(self, head: HydraHead) -> None:
        super().__init__(head, head.config.num_heads)
        self._project: Callable[[Tensor], Tensor] | None = None
        self._cache: TreeCache | None = None
        self._inputs = torch.empty(0)  # [B, W, (2 + depth) * D]: the state, then the embeddings from the root on
        self._depth = 0
        self._first = 0  # number of the last level's first node

    @torch.inference_mode()
    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        """Start at each row's last state and root; see `Drafter.sync`."""
        head = self._head
        rows, count = torch.arange(len(lengths), device=hidden.device), to_device(lengths, hidden.device)
        if self._project is None:
            self._project = head.lent_projection()
        if head.prefix is None:
            state = hidden[rows, count - 1].to(head.dtype)
        else:
            if self._cache is None:
                self._cache = TreeCache(len(lengths), 2 * max(lengths))
            states = hidden.to(head.dtype)
            positions = positions_behind(self._cache, states.shape[1], states.device)
            rotation = head.prefix.self_attn.rotation(positions, head.dtype)
            normal = head.prefix.input_layernorm(states)
            state = read_on(head.prefix, normal, states, lengths, self._cache, rotation)[:, 0]
        self._inputs = torch.cat([state, head.embedded(token_ids[rows, count])], dim=-1)[:, None]
        self._depth = self._first = 0
        return self._logits()[:, 0]

    @torch.inference_mode()
    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Put one level of nodes below the last and run the next head on it; see `Drafter.extend`."""
        rows = torch.arange(len(token_ids), device=token_ids.device)[:, None]
        above = self._inputs[rows, parents - self._first]
        self._first += self._inputs.shape[1]
        self._inputs = torch.cat([above, self._head.embedded(token_ids)], dim=-1)
        self._depth += 1
        return self._logits()

    def _logits(self) -> Tensor:
        """Run the level's head: [B, W, U]."""
        assert self._project is not None
        return self._project(self._head.blocks[self._depth](self._inputs))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self._inputs = self._inputs[list(rows)]
        if self._cache is not None:
            self._cache.keep(rows)


HEAD = HydraHead
