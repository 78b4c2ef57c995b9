"""How many bytes a computation needs at one time: counted while it runs, or without running it.

`Imagined` lets torch work on tensors that have a shape but no memory, so a step that would not fit can be counted, for
any head and with the kernels of its device. What kernels take for themselves while they run is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from data.batches import collate
from data.conversations import Encoded
from heads.base import FeatureBatch, Head

SMALL = 2**25
"""glibc takes larger blocks from the system, and gives them back; smaller ones leave gaps in its heap."""


class UnpredictableError(Exception):
    """A computation cannot be counted; the message says why."""


@contextmanager
def counting() -> Iterator[None]:
    """Turn whatever goes wrong within the block into an `UnpredictableError`.

    What is counted is anybody's code: it may ask imagined tensors for numbers, or use operations that torch cannot
    imagine, and torch has no common error for those. Where the error is the run's own, the run will meet it again.
    """
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UnpredictableError(f"{type(error).__name__}: {reason}" if reason else type(error).__name__) from error


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors that are made within the block and still alive, and their peak; earlier ones do not count.

    Args:
        device: Whose memory is counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.live = 0
        """Bytes alive."""
        self.peak = 0
        """The most that were."""
        self.small = 0
        """The most that were in blocks below `SMALL`."""
        self._small_live = 0
        self._known: dict[int, Any] = {}  # storage -> a weak reference, which says when it is gone

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let torch compute, and count what is new."""
        args, kwargs = self.prepare(args, kwargs or {})
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        output = self.compute(func, args, kwargs)
        for tensor in _tensors(output):
            if tensor.device.type == self.device.type and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return output

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return what an operation is given; here as it is."""
        return args, kwargs

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return an operation's result."""
        return func(*args, **kwargs)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        small = size if size < SMALL else 0

        def gone(_: object) -> None:
            self.live -= size
            self._small_live -= small
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self._small_live += small
        self.peak, self.small = max(self.peak, self.live), max(self.small, self._small_live)


class Imagined(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts without computing: floating-point tensors have a shape only.

    Tokens, masks and positions are real, because how many labels there are, and so the shapes, depends on them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: Tensor) -> Tensor:
        """Return an imagined tensor of the same shape, which counts for nothing."""
        with self._mode:
            return torch.empty_like(tensor, requires_grad=tensor.requires_grad)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Replace floating-point tensors that are real, such as the target's weights."""

        def imagine(tensor: Tensor) -> Tensor:
            real = tensor.is_floating_point() and tensor.dim() > 0 and not isinstance(tensor, FakeTensor)
            return self._mode.from_tensor(tensor) if real else tensor

        return tree_map_only(Tensor, imagine, args), tree_map_only(Tensor, imagine, kwargs)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute with whole numbers and booleans, imagine the rest."""
        dtype = kwargs.get("dtype")
        imagined = any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, kwargs)))
        if not imagined and not (dtype is not None and dtype.is_floating_point):
            return func(*args, **kwargs)
        with self._mode:
            return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments or results, but for packed weights, which have no storage of torch's."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]


def step_bytes(
    head: Head, samples: Sequence[Encoded], dtype: torch.dtype, *, passes: int, bf16: bool
) -> tuple[int, int]:
    """Return the bytes that forward and backward take at one time, and those in small blocks.

    They are the batch, activations and gradients.

    Args:
        head: In training; its weights are not counted.
        samples: A micro-batch.
        dtype: Of the states that the target hands over.
        passes: 2 if gradients of an earlier micro-batch are there already, else 1.
        bf16: Whether the head computes in bfloat16.

    Raises:
        UnpredictableError: If the head computes what cannot be imagined.
    """
    with counting(), torch.random.fork_rng():
        try:
            imagined = _imagine(head, samples, dtype, passes, bf16)
        finally:
            for parameter in head.parameters():  # imagined gradients, where the head uses its own beside those given
                parameter.grad = None
    return imagined.peak, imagined.small


def _imagine(head: Head, samples: Sequence[Encoded], dtype: torch.dtype, passes: int, bf16: bool) -> Imagined:
    """Return what has counted forward and backward; arguments as in `step_bytes`."""
    device = head.lm_head.get_parameter("weight").device
    imagined = Imagined(device)
    weights = {name: imagined.like(parameter) for name, parameter in head.named_parameters()}
    weights |= {name: buffer.clone() for name, buffer in head.named_buffers()}  # the head may count in them
    token_ids, loss_mask = (part.to(device) for part in collate(samples))
    width = head.config.hidden_size
    with imagined:
        for _ in range(passes):
            sizes = (*token_ids.shape, width)
            hidden = torch.empty(sizes, dtype=dtype, device=device)
            layers = [torch.empty(sizes, dtype=dtype, device=device) for _ in head.feature_layers]
            features = torch.cat(layers, dim=-1) if layers else None
            del layers
            batch = FeatureBatch(token_ids, loss_mask, hidden, features)
            _forward_and_backward(head, weights, batch, bf16)
    return imagined


def _forward_and_backward(head: Head, weights: Mapping[str, Tensor], batch: FeatureBatch, bf16: bool) -> None:
    """As `train.loop.accumulate_gradients` does it."""
    features = None if batch.features is None else batch.features.to(head.dtype)
    given = FeatureBatch(batch.token_ids, batch.loss_mask, batch.hidden.to(head.dtype), features)
    with torch.autocast(batch.hidden.device.type, torch.bfloat16, enabled=bf16):
        output = functional_call(head, dict(weights), (given,))
    output.loss.backward()
