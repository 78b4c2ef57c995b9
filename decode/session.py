"""B sequences being decoded on one target: prefill, score token trees, commit the accepted paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from decode.masks import prefill_visible, tree_visible
from decode.tree import TokenTree
from heads.cache import TreeCache
from heads.transfer import to_device

if TYPE_CHECKING:
    from decode.target import Target


@dataclass(frozen=True)
class TargetOutput:
    """What one target pass gives."""

    logits: Tensor
    """[B, N, V] after each node, in the model's precision; after a prefill [B, 1, V], each row's last token."""
    hidden: Tensor
    """[B, N, D] input of the lm_head at each token."""
    features: Tensor | None = None
    """[B, N, F] outputs of the session's feature layers at each token, side by side; None if it has none."""


FEW_ROWS = 4
"""oneDNN multiplies four rows by a packed weight in less time than one or two, so smaller passes are padded …"""
SHORT_CONTEXT = 512
"""… behind at most so many tokens: the attention of more nodes behind a longer text would cost more than that."""


class Sessions(Protocol):
    """What opens sessions; a `Target`."""

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        ...

    def session(self, rows: int, capacity: int, feature_layers: Sequence[int] = ()) -> Session:
        """Open a session; see `Target.session`."""
        ...


class Session:
    """B sequences being decoded on one target. Not safe to share."""

    def __init__(self, target: Target, rows: int, capacity: int, feature_layers: Sequence[int] = ()) -> None:
        self._target = target
        self.feature_layers = feature_layers
        self._pads = (
            target.packed is not None and target.packed.has_products and len(target.packed) > 1
        )  # the layers too
        self.cache = TreeCache(rows, capacity + (FEW_ROWS - 1 if self._pads else 0))

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row that have K/V: all but the root."""
        return self.cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], *, chunk_size: int = 512) -> TargetOutput:
        """Commit the prompts and return each row's logits after its last token.

        Args:
            prompts: B prompts of at least one token.
            chunk_size: Tokens in one pass; no [T, T] mask of a long prompt is made.

        Returns:
            Logits [B, 1, V], states [B, L, D] and features [B, L, F], padded on the right.
        """
        device = self._target.device
        longest = max(map(len, prompts))
        ids = to_device([[*prompt, *[prompt[-1]] * (longest - len(prompt))] for prompt in prompts], device)
        hidden: list[Tensor] = []
        features: list[Tensor] = []
        logits: list[Tensor | None] = [None] * len(prompts)
        for start in range(0, longest, chunk_size):
            chunk = ids[:, start : start + chunk_size]
            size = chunk.shape[1]
            positions = torch.arange(start, start + size, device=device).expand(len(prompts), -1)
            # rows that have ended run along: their tokens land behind their own length and are never read
            visible = prefill_visible(start, size, device).expand(len(prompts), -1, -1)
            last = [min(max(len(prompt) - 1 - start, 0), size - 1) for prompt in prompts]
            out = self._target.forward(chunk, positions, visible, self.cache, last, self.feature_layers)
            self.cache.commit([range(size)] * len(prompts))
            hidden.append(out.hidden)
            features += [] if out.features is None else [out.features]
            for row, prompt in enumerate(prompts):
                if start < len(prompt) <= start + size:
                    logits[row] = out.logits[row]
        self.cache.lengths = [len(prompt) for prompt in prompts]
        ends = torch.stack([row for row in logits if row is not None])
        return TargetOutput(ends, torch.cat(hidden, dim=1), torch.cat(features, dim=1) if features else None)

    @torch.inference_mode()
    def score(self, trees: Sequence[TokenTree]) -> TargetOutput:
        """Run the target once over all nodes of all rows' trees.

        Args:
            trees: One tree for each row; node 0 is the row's last committed token.

        Returns:
            Logits [B, N, V], states [B, N, D] and features [B, N, F]; rows with fewer than N nodes are padded, and N
            may be more than any has (see `FEW_ROWS`).
        """
        device = self._target.device
        self.cache.forget_tree()  # one that was scored and not committed
        largest = max(tree.shape.size for tree in trees)
        size = max(largest, self._least_nodes(len(trees)))
        ids = nn.utils.rnn.pad_sequence([tree.token_ids for tree in trees], batch_first=True)
        ids = nn.functional.pad(ids, (0, size - largest))
        positions = to_device(
            [
                [length + depth for depth in tree.shape.depths] + [length] * (size - tree.shape.size)
                for tree, length in zip(trees, self.lengths, strict=True)
            ],
            device,
        )
        visible = tree_visible([tree.shape for tree in trees], self.lengths, device, size=size)
        return self._target.forward(ids, positions, visible, self.cache, None, self.feature_layers)

    def _least_nodes(self, rows: int) -> int:
        """Return how many nodes each of so many trees is padded to at least."""
        return -(-FEW_ROWS // rows) if self._pads and max(self.lengths) <= SHORT_CONTEXT else 1

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the K/V of each row's path, in path order, and forget the rest of the scored trees."""
        self.cache.commit(paths)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others have ended."""
        self.cache.keep(rows)
