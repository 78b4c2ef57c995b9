"""Linear layers packed for inference on a CPU.

oneDNN multiplies a few rows by a weight that it has laid out beforehand at nearly the cost of one row; the plain path
pays 1.7 times for two rows, so that verifying drafts could not win. Packing changes how a layer computes, not what it
holds: parameters, names and state dict stay, training goes the ordinary way, and a layer whose weight has changed
since falls back.
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
        """Let the layers compute as transformers left them."""
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


def project_onto(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies [..., in] by `weight`, [out, in] as it is now; packed where that can be."""
    if not _can_pack(weight):
        return lambda x: nn.functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _can_pack(weight: Tensor) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and weight.device.type == "cpu" and weight.dtype == torch.float32


class _PackedForward:
    """Replaces `nn.Linear.forward` of one layer."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.pack()

    def pack(self) -> None:
        """Lay out the layer's present weight."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._linear.weight.detach(), _ROWS_HINT)
        self._state = self._weight_state()

    def _weight_state(self) -> tuple[int, int, torch.device]:
        weight = self._linear.weight
        return weight.data_ptr(), weight._version, weight.device

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight, bias = self._linear.weight, self._linear.bias
        if torch.is_grad_enabled() or x.dtype != torch.float32 or self._weight_state() != self._state:
            return nn.functional.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
