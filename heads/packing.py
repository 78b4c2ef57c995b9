"""Linear layers packed for inference on a CPU.

oneDNN multiplies a few rows by a weight that it has laid out beforehand at nearly the cost of one row; the plain path
pays 1.7 times for two rows, so that verifying drafts could not win. Packing changes how a layer computes, not what it
holds: parameters, names and state dict stay, training goes the ordinary way, and a layer whose weight has changed
since is packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_ROWS_HINT = 16


class PackedLinears:
    """The float32 CPU linear layers of a model, packed in place. Costs a second copy of their weights.

    Embeddings and subclasses of `nn.Linear` (quantised layers, adapters) are left alone, as are models on other
    devices.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[tuple[nn.Linear, _PackedForward]] = []
        for module in model.modules():
            if type(module) is nn.Linear and _can_pack(module.weight):
                self._layers.append((module, _PackedForward(module)))
        self.enable()

    def __len__(self) -> int:
        return len(self._layers)

    def enable(self) -> None:
        """Let the layers compute packed."""
        for module, packed in self._layers:
            module.forward = packed  # type: ignore[method-assign, assignment]

    def disable(self) -> None:
        """Let the layers compute as they did before."""
        for module, _ in self._layers:
            vars(module).pop("forward", None)

    def repack(self) -> None:
        """Pack the present weights. Needed after edits through `.data`, which torch does not count as changes."""
        for _, packed in self._layers:
            packed.pack()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute unpacked within the block."""
        self.disable()
        try:
            yield
        finally:
            self.enable()


class PackedRows:
    """Products with chosen rows of another module's weight; packed once, and again when either has changed."""

    def __init__(self) -> None:
        self._weight: _Present | None = None
        self._rows = torch.empty(0)
        self._packed = torch.empty(0)

    def __call__(self, weight: Tensor, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """Return x -> x weight[rows]^T, [..., in] -> [..., U], for the present weight [out, in] and rows [U]."""
        if not _can_pack(weight):
            chosen = weight.detach()[rows]
            return lambda x: nn.functional.linear(x, chosen)
        if self._weight is None or not self._weight.is_still(weight) or not torch.equal(self._rows, rows):
            self._weight, self._rows = _Present(weight), rows.clone()
            self._packed = _pack(weight.detach()[rows])
        packed = self._packed
        return lambda x: _multiply(x, packed, None)

    def __getstate__(self) -> dict[str, object]:
        """Leave the packing out: it cannot be copied."""
        return vars(PackedRows())


def _can_pack(weight: Tensor) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return available and fits and not weight.is_inference()  # those do not tell their changes


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


class _Present:
    """A weight as it was, to tell whether it has changed since. Holds its memory, which could become another's."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._version = weight.detach(), weight._version

    def is_still(self, weight: Tensor) -> bool:
        """Return whether `weight` has not changed, but through `.data`, which torch does not count."""
        return weight.data_ptr() == self._weight.data_ptr() and weight._version == self._version


class _PackedForward:
    """Replaces `nn.Linear.forward` of one layer."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.pack()

    def pack(self) -> None:
        """Lay out the layer's present weight."""
        self._present: _Present | None = _Present(self._linear.weight)
        self._packed: Tensor | None = _pack(self._linear.weight.detach())

    def _forget(self) -> None:
        self._present = self._packed = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight, bias = self._linear.weight, self._linear.bias
        if torch.is_grad_enabled():
            self._forget()  # what comes now may change the weight unseen, as fused optimisers do
        elif x.dtype == torch.float32 and self._is_packed():
            assert self._packed is not None
            return _multiply(x, self._packed, bias)
        return nn.functional.linear(x, weight, bias)

    def _is_packed(self) -> bool:
        """Return whether the present weight is packed, after packing one that has changed if that can be."""
        weight = self._linear.weight
        if self._present is None or not self._present.is_still(weight):
            if not _can_pack(weight):
                self._forget()
                return False
            self.pack()
        return True

    def __getstate__(self) -> dict[str, object]:
        """Leave the packing out: it cannot be copied."""
        return {"_linear": self._linear, "_present": None, "_packed": None}
