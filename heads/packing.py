"""Layers packed for inference on a CPU.

oneDNN multiplies a few rows by a weight that it has laid out beforehand at nearly the cost of one row; the plain path
pays 1.7 times for two rows, so that verifying drafts could not win. Packing changes how a layer computes, not what it
holds: parameters, names and state dict stay, training goes the ordinary way, and a layer whose weight has changed
since is packed again. `PackedModules.release` gives the plain weights up, where nobody else needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

_ROWS_HINT = 16


class PackedForward(Protocol):
    """What computes in place of a module's `forward`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute what the module does."""
        ...

    @property
    def products(self) -> Sequence[PackedProduct]:
        """Its products with packed weights."""
        ...


class PackedModules:
    """Modules that compute packed, in place. Costs a second copy of their weights until `release`."""

    def __init__(self, forwards: Sequence[tuple[nn.Module, PackedForward]]) -> None:
        self._forwards = list(forwards)
        self._released = False
        self.enable()

    def __len__(self) -> int:
        return len(self._forwards)

    def enable(self) -> None:
        """Let the modules compute packed."""
        for module, packed in self._forwards:
            module.forward = packed

    def disable(self) -> None:
        """Let the modules compute as they did before.

        Raises:
            RuntimeError: If their plain weights are gone.
        """
        if self._released:
            raise RuntimeError(
                "the plain weights of this model were given up when it was packed; load it with keep_weights=True"
            )
        for module, _ in self._forwards:
            vars(module).pop("forward", None)

    def repack(self) -> None:
        """Pack the present weights. Needed after edits through `.data`, which torch does not count as changes."""
        for _, packed in self._forwards:
            for product in packed.products:
                product.pack()

    def release(self, *, keep: nn.Module) -> None:
        """Give up the plain weights, for good: only the packed ones stay, for inference.

        Args:
            keep: A module whose weight others read.
        """
        self._released = True
        for module, packed in self._forwards:
            if module is not keep:
                for product in packed.products:
                    product.release()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute unpacked within the block."""
        self.disable()
        try:
            yield
        finally:
            self.enable()


def pack_linears(model: nn.Module) -> PackedModules:
    """Pack the float32 linear layers of a model on a CPU, in place.

    Embeddings and subclasses of `nn.Linear` (quantised layers, adapters) are left alone, as are models on other
    devices.
    """
    return PackedModules([(module, PackedLinear(module)) for module in model.modules() if can_pack(module)])


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is a plain linear layer whose weight can be packed."""
    return type(module) is nn.Linear and _can_pack(module.weight)


class PackedProduct:
    """One product in place of those of several linear layers with the same input: their outputs, side by side."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = tuple(linears)
        self._released = False
        self.pack()

    def _parameters(self) -> list[Tensor | None]:
        return [parameter for linear in self._linears for parameter in (linear.weight, linear.bias)]

    def pack(self) -> None:
        """Lay out the present weights."""
        if not self._released:
            self._present: list[_Present | None] = [None if p is None else _Present(p) for p in self._parameters()]
            self._packed: Tensor | None = _pack(_joined([linear.weight.detach() for linear in self._linears]))
            self._bias = self._joined_bias()

    def _joined_bias(self) -> Tensor | None:
        biases = [linear.bias for linear in self._linears]
        if all(bias is None for bias in biases):
            return None
        sizes = [linear.out_features for linear in self._linears]
        return _joined([torch.zeros(n) if b is None else b.detach() for b, n in zip(biases, sizes, strict=True)])

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
        if not all(map(can_pack, self._linears)):
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

    def release(self) -> None:
        """Give up the plain weights, so that the packed ones are the only copy."""
        self._released, self._present = True, []
        for linear in self._linears:
            linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)

    def refuse_training(self) -> None:
        """Raise RuntimeError if there are no plain weights, which gradients need."""
        if self._released:
            raise RuntimeError(
                "these layers are packed for inference and have no plain weights; load the model with "
                "keep_weights=True, or with pack=False, to compute gradients or in another precision"
            )

    def __getstate__(self) -> dict[str, object]:
        """Leave the packing out: it cannot be copied."""
        self.refuse_training()
        return {"_linears": self._linears, "_released": False, "_present": [], "_packed": None, "_bias": None}


class PackedLinear:
    """Replaces `nn.Linear.forward` of one layer."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._product = PackedProduct([linear])

    @property
    def products(self) -> Sequence[PackedProduct]:
        """Its only product."""
        return [self._product]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if may_use([self._product], x):
            return self._product(x)
        return nn.functional.linear(x, self._linear.weight, self._linear.bias)


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
        product.refuse_training()
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


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
