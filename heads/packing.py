"""Layers packed for inference on a CPU.

oneDNN multiplies a few rows by a weight that it has laid out beforehand at nearly the cost of one row; the plain path
pays 1.7 times for two rows, so that verifying drafts could not win. Packing changes how a layer computes, not what it
holds: parameters, names and state dict stay, training goes the ordinary way, and a layer whose weight has changed
since is packed again. `PackedModules.release` gives the plain weights up, where nobody else needs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn

from heads.products import PackedProduct, can_pack, may_use


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

    @property
    def has_products(self) -> bool:
        """Whether any module multiplies by packed weights."""
        return any(packed.products for _, packed in self._forwards)

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

    def release(self, *, keep: nn.Module | None = None) -> None:
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


class SharedInput(nn.Module, ABC):
    """A module with linear layers that read the same input, and so can be packed as one product."""

    @property
    @abstractmethod
    def same_input(self) -> tuple[nn.Linear, ...]:
        """These layers, as they are given to `outputs`."""


def pack_linears(model: nn.Module) -> PackedModules:
    """Pack the float32 linear layers of a model on a CPU, in place; those of each `SharedInput` together.

    Embeddings and subclasses of `nn.Linear` (quantised layers, adapters) are left alone, as are models on other
    devices.
    """
    groups = [module.same_input for module in model.modules() if isinstance(module, SharedInput)]
    groups = [group for group in groups if all(map(can_pack, group))]
    grouped = set(chain.from_iterable(groups))
    groups += [(module,) for module in model.modules() if can_pack(module) and module not in grouped]
    products = [(group, PackedProduct(group)) for group in groups]
    return PackedModules([(linear, PackedLinear(linear, product)) for group, product in products for linear in group])


def outputs(linears: tuple[nn.Linear, ...], x: Tensor) -> Sequence[Tensor]:
    """Return what each of several layers makes of the same input, in one product if they are packed together."""
    packed = linears[0].forward
    if isinstance(packed, PackedLinear) and packed.product.linears == linears and may_use(packed.products, x):
        return packed.product.outputs(x)
    return [linear(x) for linear in linears]


def add_output(residual: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """Return `residual + linear(x)`, in one operation if the layer is packed."""
    packed = linear.forward
    if isinstance(packed, PackedLinear) and packed.product.linears == (linear,) and may_use(packed.products, x):
        return packed.product(x, residual)
    output: Tensor = linear(x)
    return residual + output


class PackedLinear:
    """Replaces `nn.Linear.forward` of one layer, whose product may be that of several."""

    def __init__(self, linear: nn.Linear, product: PackedProduct | None = None) -> None:
        self._linear = linear
        self.product = PackedProduct([linear]) if product is None else product

    @property
    def products(self) -> Sequence[PackedProduct]:
        """Its only product."""
        return [self.product]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if may_use(self.products, x):
            return self.product.outputs(x)[self.product.linears.index(self._linear)]
        return nn.functional.linear(x, self._linear.weight, self._linear.bias)
