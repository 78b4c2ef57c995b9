"""What a head is, and what every head is given and must return.

A head predicts tokens further ahead than the target's own next token, from the states of the frozen target. This file
holds the words that training (`Head.forward`) and decoding (`Head.drafter`) share. It knows torch, not transformers.

Shape letters, used in all packages: `B` rows, `T` training time, `L` committed tokens in this call, `N` tree nodes
(root included), `W` frontier width, `K` depth or number of heads, `D` hidden, `V` target vocabulary, `U` draft
vocabulary, `H` attention heads, `E` head dim, `S` cache slots, `F` feature width.

One convention removes most off-by-one errors: **one more token than states**. Wherever tokens and states travel
together, `hidden[j]` is the target's state *at* `token_ids[j]` (so it predicted `token_ids[j + 1]`), and the last
token, the new root, has no state yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from heads.products import PackedRows


def from_target() -> Any:
    """Return a field of a head's config that the trainer copies from the target and no user sets."""
    return field(metadata={"from_target": True})


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes that every head shares with its target; each head's own config adds its fields."""

    hidden_size: int = from_target()
    """D, of the target."""
    vocab_size: int = from_target()
    """V, of the target."""
    draft_vocab_size: int | None = None
    """U: the head predicts only this many tokens (see `Head.set_vocabulary`); None for the whole vocabulary."""
    depth_decay: float = 0.8
    """The loss of tokens drafted at depth k, from 0, weighs `depth_decay ** k` (Medusa's lambda_k)."""

    def __post_init__(self) -> None:
        """Reject a draft vocabulary and weights that are none."""
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be between 1 and the target's {self.vocab_size}, got {self.draft_vocab_size}; "
                "leave it out to draft from the whole vocabulary"
            )
        if not 0 < self.depth_decay < math.inf:
            raise ValueError(f"depth_decay must be a number above 0, such as 0.8, got {self.depth_decay}")

    def check_at_least(self, least: int, *names: str) -> None:
        """Refuse fields that are not integers of at least `least`."""
        for name in names:
            value = vars(self)[name]
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")


@dataclass(frozen=True)
class FeatureBatch:
    """What every head trains on: tokens, which of them are supervised, and the target's states at them."""

    token_ids: Tensor
    """[B, T] int64, padded on the right."""
    loss_mask: Tensor
    """[B, T] bool, True on tokens the target itself would have to produce (assistant tokens); False on padding."""
    hidden: Tensor
    """[B, T, D] input of the target's lm_head (after the final norm)."""
    features: Tensor | None = None
    """[B, T, F] outputs of the decoder layers in `Head.feature_layers`, side by side; None where there are none."""


class HeadOutput(NamedTuple):
    """What a training forward returns; a tuple, as FSDP2 and DeepSpeed find tensors in no other class."""

    loss: Tensor
    """[] SUM over the supervised positions. The training loop divides by the number of supervised tokens of the global
    batch, so that gradient accumulation and several processes give the same step as one large batch."""
    metrics: Mapping[str, Tensor]
    """Detached `[2]` tensors (sum, count), added up over micro-batches and processes before they are divided; the keys
    are tracker names below `train/`."""


class Drafter(Protocol):
    """The drafting state of B sequences; made by `Head.drafter()`, one per session, never shared."""

    @property
    def max_depth(self) -> int:
        """How many tokens past the root can be drafted."""

    @property
    def vocab_size(self) -> int:
        """V, of the target."""

    @property
    def vocabulary(self) -> Tensor | None:
        """[U] target id of each logit column, or None where the columns are the target's vocabulary."""

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        """Absorb newly committed tokens and return the logits of the root's children.

        Args:
            token_ids: [B, L + 1] newly committed tokens, padded on the right; row b holds `lengths[b] + 1` of them and
                the last is the new root. The first call carries the whole prompt.
            hidden: [B, L, D] the target's states; row b holds `lengths[b]` of them.
            lengths: Number of states in each row, at least 1.
            features: [B, L, F] outputs of the head's `feature_layers` at the same tokens, where it asks for any.

        Returns:
            [B, U] logits.
        """

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Add one level of W nodes to each row's tree and return the logits of their children.

        Args:
            token_ids: [B, W] target ids of the nodes.
            parents: [B, W] number of each node's parent, in the order in which nodes were added (root = 0).

        Returns:
            [B, W, U] logits, or [B, 1, U] from a head whose logits depend on the depth only.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and forget the others (their sequences have ended)."""


class Lender(Protocol):
    """The parts of a target that heads borrow. `decode.Target` is one."""

    @property
    def name(self) -> str:
        """Name or path the target was loaded from."""

    @property
    def fingerprint(self) -> str:
        """Short hash of the target's sizes and weights, equal for the same weights loaded in any precision."""

    @property
    def quantize(self) -> str | None:
        """How its weights are rounded, such as "4bit"; None if they are not."""

    @property
    def embed(self) -> nn.Module:
        """Token embedding, with a `weight` [V, D]."""

    @property
    def lm_head(self) -> nn.Module:
        """Output projection, with a `weight` [V, D]."""


Tree = Sequence[Sequence[int]] | Mapping[str, float] | None
"""Draft tree that a head or its folder recommends: paths of child ranks (`decode.StaticTree`), settings of a
`decode.DynamicTree`, or None for a chain."""


class Head(nn.Module, ABC):
    """Trained weights of one head type. The target's `embed` and `lm_head` are lent, not owned.

    Lent modules sit in a tuple, which keeps them out of `parameters()` and `state_dict()`: they are not saved, not
    optimised and not wrapped by DDP.
    """

    Config: ClassVar[type[HeadConfig]]
    kind: ClassVar[str]
    """Head type: the name of the file in `heads/`, written to checkpoints."""
    vocabulary: Tensor | None
    """[U] target id of each logit column, ascending; None where the columns are the target's vocabulary."""

    def __init__(self, config: HeadConfig, target: Lender) -> None:
        super().__init__()
        self.config = config
        self.tree: Tree = None
        self.tuned: Mapping[str, Any] = {}  # plans of `decode.tune`
        self._lent = (target.embed, target.lm_head)
        self._packed_rows = PackedRows()
        size = config.draft_vocab_size
        self.register_buffer("vocabulary", None if size is None else torch.arange(size))

    @property
    def feature_layers(self) -> Sequence[int]:
        """Decoder layers whose outputs the head reads, ascending; k is the output of the k-th layer, counted from 1.

        That is `output_hidden_states[k]` in transformers, except that the last layer's is taken before the final norm.
        """
        return ()

    @property
    def borrowed(self) -> Sequence[object]:
        """What is the target's: a copy of the head shares it."""
        return self._lent

    @property
    def embed(self) -> nn.Module:
        """The target's token embedding."""
        return self._lent[0]

    @property
    def lm_head(self) -> nn.Module:
        """The target's output projection."""
        return self._lent[1]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the trained weights."""
        return next(self.parameters()).dtype

    @property
    def drafting_model(self) -> nn.Module:
        """The module whose layers compute the drafts, which may be packed (`heads.packing`); the head itself."""
        return self

    def learning_rates(self) -> Mapping[float, Sequence[nn.Parameter]]:
        """Return the trained parameters by their share of the learning rate."""
        return {1.0: list(self.parameters())}

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the target's embeddings in the head's precision, without gradients: [...] -> [..., D]."""
        with torch.no_grad():
            return self.embed(token_ids).to(self.dtype)

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

    def lent_weight(self) -> Tensor:
        """[U, D] the target's output projection over the draft vocabulary.

        Raises:
            ValueError: If the target's lm_head has a bias, which heads do not know.
        """
        parameters = dict(self.lm_head.named_parameters(recurse=False))
        if "bias" in parameters:
            raise ValueError(
                f"the target's lm_head has a bias, which {self.kind} heads do not support; use a draft model"
            )
        weight = parameters["weight"].detach()
        return weight if self.vocabulary is None else weight[self.vocabulary.to(weight.device)]

    def lent_projection(self) -> Callable[[Tensor], Tensor]:
        """Return the target's output projection over the draft vocabulary, [..., D] -> [..., U], for drafting."""
        weight, rows = self.lm_head.get_parameter("weight"), self.vocabulary
        project = self.lm_head if rows is None else self._packed_rows(weight, rows.to(weight.device))
        dtype = weight.dtype
        return lambda states: project(states.to(dtype))

    @abstractmethod
    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the summed loss and metrics. `forward`, because DDP and DeepSpeed hook only that."""

    @abstractmethod
    def drafter(self) -> Drafter:
        """Return a fresh drafting state."""


def head_class(kind: str) -> type[Head]:
    """Return the head type that `heads/<kind>.py` (or, for a dotted name, that module) publishes as `HEAD`.

    Raises:
        ValueError: If there is no such module, or it publishes no head.
    """
    name = kind if "." in kind else f"{__package__}.{kind}"
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        found = False
    if not found:
        raise ValueError(f"unknown head type {kind!r}: there is no module {name}")
    head: type[Head] | None = vars(importlib.import_module(name)).get("HEAD")
    if head is None:
        raise ValueError(f"module {name} defines no HEAD, so {kind!r} is not a head type")
    return head


def create_head(kind: str, config: HeadConfig, target: Lender) -> Head:
    """Build an untrained head of type `kind` on `target`."""
    return head_class(kind)(config, target)
