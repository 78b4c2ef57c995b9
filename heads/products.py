"""Products with packed weights: oneDNN lays a weight out beforehand, for float32 on a CPU; see `heads.packing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

_ROWS_HINT = 16


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is a plain linear layer whose weight can be packed."""
    # a quantised layer may be a plain one whose weight is of its own type
    return type(module) is nn.Linear and type(module.weight) in (Tensor, nn.Parameter) and _can_pack(module.weight)


class PackedProduct:
    """One product in place of those of several linear layers with the same input: their outputs, side by side."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self._released = False
        self.pack()

    def _parameters(self) -> list[Tensor | None]:
        return [parameter for linear in self.linears for parameter in linear._parameters.values()]  # weight and bias

    def pack(self) -> None:
        """Lay out the present weights."""
        if not self._released:
            self._present: list[_Present | None] = [None if p is None else _Present(p) for p in self._parameters()]
            self._packed: Tensor | None = _pack(self._joined_weight())
            self._bias = self._joined_bias()

    def _joined_weight(self) -> Tensor:
        weights = [linear.weight.detach() for linear in self.linears]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _joined_bias(self) -> Tensor | None:
        """Return a copy, as the packed weight is one: a part of the checkpoint's file would hold all of it."""
        biases = [linear.bias for linear in self.linears]
        if all(bias is None for bias in biases):
            return None
        sizes = [linear.out_features for linear in self.linears]
        return torch.cat([torch.zeros(n) if b is None else b.detach() for b, n in zip(biases, sizes, strict=True)])

    def forget(self) -> None:
        """Drop the packed weights; they are packed again when they are needed."""
        if not self._released:
            self._present, self._packed, self._bias = [], None, None

    def is_ready(self) -> bool:
        """Return whether the present weights are packed, after packing those that have changed if that can be."""
        if self._released:
            return True
        parameters = self._parameters()
        if len(self._present) == len(parameters) and all(map(_is_still, self._present, parameters)):
            return True
        if not all(map(can_pack, self.linears)):
            self.forget()
            return False
        self.pack()
        return True

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, and add the residual if there is one. Only after `is_ready`.

        Args:
            x: [..., in] float32.
            residual: [..., out].

        Returns:
            [..., out], `out` of all layers together.
        """
        assert self._packed is not None
        if residual is None:
            return _multiply(x, self._packed, self._bias)
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return total

    def outputs(self, x: Tensor) -> Sequence[Tensor]:
        """Return each layer's output, [..., in] -> [..., out of each]. Only after `is_ready`."""
        joined = self(x)
        if len(self.linears) == 1:
            return [joined]
        return torch.split(joined, [linear.out_features for linear in self.linears], dim=-1)

    def release(self) -> None:
        """Give up the plain weights, so that the packed ones are the only copy."""
        self._released, self._present = True, []
        for linear in self.linears:
            for name, parameter in list(linear.named_parameters(recurse=False)):
                setattr(linear, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))

    def require_weights(self) -> None:
        """Raise RuntimeError if there are no plain weights, which all but the packed product need."""
        if self._released:
            raise RuntimeError(
                "these layers are packed for inference and have no plain weights; load the model with "
                "keep_weights=True, or with pack=False, to copy it, to compute gradients, to change its precision or "
                "to put adapters in"
            )

    def __getstate__(self) -> dict[str, object]:
        """Leave the packing out: it cannot be copied."""
        self.require_weights()
        return {"linears": self.linears, "_released": False, "_present": [], "_packed": None, "_bias": None}


def may_use(products: Sequence[PackedProduct], x: Tensor) -> bool:
    """Return whether x can be multiplied by packed weights; else the module must compute in its own way.

    Raises:
        RuntimeError: If it must and cannot, as its plain weights are gone.
    """
    if torch.is_grad_enabled():
        for product in products:
            product.forget()  # what comes now may change the weight unseen, as fused optimisers do
    elif x.dtype == torch.float32 and all(product.is_ready() for product in products):
        return True
    for product in products:
        product.require_weights()
    return False


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
        if not _is_still(self._weight, weight) or not torch.equal(self._rows, rows):
            self._weight, self._rows = _Present(weight), rows.clone()
            self._packed = _pack(weight.detach()[rows])
        packed = self._packed
        return lambda x: _multiply(x, packed, None)

    def __getstate__(self) -> dict[str, object]:
        """Leave the packing out: it cannot be copied."""
        return vars(PackedRows())


class _Present:
    """A weight as it was, to tell whether it has changed since. Holds its memory, which could become another's."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.version = weight.detach(), weight._version


def _is_still(present: _Present | None, weight: Tensor | None) -> bool:
    """Return whether a weight has not changed, but through `.data`, which torch does not count."""
    if present is None or weight is None:
        return present is None and weight is None
    return weight.data_ptr() == present.weight.data_ptr() and weight._version == present.version


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
