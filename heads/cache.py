"""Keys and values of B sequences, each with an uncommitted token tree at its end.

One preallocated block per layer, on the layer's own device. Row b's committed tokens sit in slots `0 … lengths[b] - 1`;
the nodes of its current tree are written behind them, in one pass or in several, node j in slot `lengths[b] + j`, and
`commit` moves the nodes of the accepted path together. Keys are stored after rotation by *depth*, so moving a slot does
not change what it means. Used by the target, by draft models and by heads that attend to their own past.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.transfer import move, to_device


class TreeCache:
    """K/V of B rows with per-row lengths. One per session; not safe to share."""

    def __init__(self, rows: int, capacity: int) -> None:
        """Make an empty cache.

        Args:
            rows: B.
            capacity: S, slots per row: the longest committed sequence plus the largest tree.
        """
        self.capacity = capacity
        self.lengths = [0] * rows
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.nodes = 0
        """Nodes of the current tree, over all passes since the last commit."""
        self._new = range(0)
        self._slots: tuple[Tensor, Tensor] | None = None
        """Rows and slots of the pass's nodes, [B, 1] and [B, N], where rows differ in length."""

    @property
    def used(self) -> int:
        """Slots that attention reads in the current pass: the longest row with its tree."""
        return max(self.lengths) + self.nodes

    def reserve_for(self, nodes: int) -> None:
        """Make room for `nodes` more nodes, doubling the slots where they do not fit; what is stored stays."""
        if self.used + nodes <= self.capacity:
            return
        self.capacity = 2 * (self.used + nodes)
        for blocks in (self._keys, self._values):
            for layer, block in enumerate(blocks):
                blocks[layer] = self._allocate(block)
                blocks[layer][:, :, : block.shape[2]] = block

    def begin(self, nodes: int, device: torch.device) -> None:
        """Announce a forward pass that adds `nodes` nodes to each row's tree.

        Raises:
            RuntimeError: If they do not fit.
        """
        total = self.nodes + nodes
        if max(self.lengths) + total > self.capacity:
            raise RuntimeError(
                f"cache of {self.capacity} slots cannot take {total} nodes after {max(self.lengths)} tokens; "
                "open the session with a larger capacity"
            )
        self._new = range(self.nodes, total)
        self.nodes = total
        self._slots = None
        if len(set(self.lengths)) > 1:
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            slots = to_device(self.lengths, device)[:, None] + torch.arange(*self._slice(0), device=device)
            self._slots = rows, slots

    def _slice(self, length: int) -> tuple[int, int]:
        """Return the first slot of the pass's nodes behind `length` tokens, and the one after the last."""
        return length + self._new.start, length + self._new.stop

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new nodes and return all slots in use.

        Args:
            layer: Layer number; layers are first written in order.
            keys: [B, H, N, E] of the announced nodes, rotated.
            values: [B, H, N, E'].

        Returns:
            Keys [B, H, used, E] and values [B, H, used, E'], views of the block.
        """
        if layer == len(self._keys):
            self._keys.append(self._allocate(keys))
            self._values.append(self._allocate(values))
        stored = []
        for block, new in ((self._keys[layer], keys), (self._values[layer], values)):
            if self._slots is None:
                block[:, :, slice(*self._slice(self.lengths[0]))] = new
            else:
                rows, slots = (part.to(new.device) for part in self._slots)  # layers may be on several devices
                block[rows, :, slots] = new.transpose(1, 2)
            stored.append(block[:, :, : self.used])
        return stored[0], stored[1]

    def _allocate(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        # zeros, not empty: masked slots are multiplied by a weight of 0, and 0 * NaN is NaN
        return like.new_zeros((rows, heads, self.capacity, size))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes on each row's path, in path order, and forget the rest of the tree.

        Args:
            paths: For each row the accepted nodes, root (0) first; empty to keep nothing.
        """
        for row, path in enumerate(paths):
            start = self.lengths[row]
            moved = next((i for i, node in enumerate(path) if node != i), len(path))
            if moved < len(path):
                nodes = torch.tensor([start + node for node in path[moved:]])
                sources = {place: move(nodes, place) for place in {block.device for block in self._keys}}
                for block in (*self._keys, *self._values):
                    # index_select copies, so overlapping slots are safe
                    kept = block[row].index_select(1, sources[block.device])
                    block[row, :, start + moved : start + len(path)] = kept
            self.lengths[row] = start + len(path)
        self.nodes = 0

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        index = list(rows)
        self._keys = [block[index] for block in self._keys]
        self._values = [block[index] for block in self._values]
        self.lengths = [self.lengths[row] for row in index]

    def forget_tree(self) -> None:
        """Forget the nodes written since the last commit."""
        self.nodes = 0

    def poison(self) -> None:
        """Overwrite all slots behind each row's committed tokens, with NaN where no pass reads them. For checks.

        Where rows differ in length, a pass multiplies the slots behind the shorter ones by an attention weight of 0,
        which NaN would survive; those get a number that is large and fits into half precision's products.
        """
        value = float("nan") if len(set(self.lengths)) == 1 else 100.0
        for block in (*self._keys, *self._values):
            for row, length in enumerate(self.lengths):
                block[row, :, length:] = value

    def contents(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's committed keys and values of `row`: `[H, length, E]` pairs. For checks."""
        length = self.lengths[row]
        return [(k[row, :, :length], v[row, :, :length]) for k, v in zip(self._keys, self._values, strict=True)]
