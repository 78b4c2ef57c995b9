"""Linear layers packed for inference on a CPU.

oneDNN multiplies a few rows by a weight that it has laid out beforehand at nearly the cost of one row; the plain path
pays 1.7 times for two rows, so that verifying drafts could not win. Packing changes how a layer computes, not what it
holds: parameters, names and state dict stay, training goes the ordinary way, and a layer whose weight has changed
since falls back.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            for module in model.modules():
                if (
                    type(module) is nn.Linear
                    and module.weight.device.type == "cpu"
                    and module.weight.dtype == torch.float32
                ):
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

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute unpacked within the block."""
        self.disable()
        try:
            yield
        finally:
            self.enable()


class _PackedForward:
    """Replaces `nn.Linear.forward` of one layer."""

    def __init__(self, linear: nn.Linear) -> None:
        # the parameters, not the layer: a reference to the layer from its own attribute would be a cycle
        self._weight, self._bias = linear.weight, linear.bias
        self._version = linear.weight._version
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if torch.is_grad_enabled() or self._weight._version != self._version or x.dtype != torch.float32:
            return nn.functional.linear(x, self._weight, self._bias)
        bias = None if self._bias is None else self._bias.detach()
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
