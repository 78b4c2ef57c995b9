"""What is recorded while a model runs: the input of its lm_head and the outputs of decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.support import UnsupportedTargetError
from heads.transfer import to_device


@contextmanager
def hidden_states(lm_head: nn.Module, last: Sequence[int] | None) -> Iterator[list[Tensor]]:
    """Record the lm_head's input; with `last`, let it compute only row b's position `last[b]`."""
    captured: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        captured.append(args[0])
        if last is None:
            return None
        rows = torch.arange(len(last), device=args[0].device)
        return (args[0][rows, to_device(last, args[0].device)][:, None], *args[1:])

    handle = lm_head.register_forward_pre_hook(hook)
    try:
        yield captured
    finally:
        handle.remove()


@contextmanager
def outputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Record the outputs of decoder layers, in the order in which they run."""
    captured: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def side_by_side(captured: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Join the features of several layers on a device, or return None for none: n x [B, T, D] -> [B, T, n * D]."""
    return torch.cat([part.to(device) for part in captured], dim=-1) if captured else None


def check_layers(wanted: Sequence[int], count: int, name: str) -> None:
    """Refuse numbers of decoder layers that the model `name` with `count` of them has not.

    Raises:
        ValueError: If they are not ascending or not between 1 and `count`.
    """
    layers = list(wanted)
    if layers != sorted(set(layers)) or (layers and not 1 <= layers[0] <= layers[-1] <= count):
        raise ValueError(
            f"feature layers must be ascending numbers from 1 to {count} (the decoder layers of {name}), got {layers}"
        )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers, found by its structure: its only outermost list of as many modules.

    Raises:
        UnsupportedTargetError: If there is no such list, or more than one.
    """
    number = int(model.config.get_text_config().num_hidden_layers)
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    outermost = [part for name, part in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    found = [part for part in outermost if len(part) == number]
    if len(found) != 1:
        raise UnsupportedTargetError(
            f"cannot tell which modules of {type(model).__name__} are its decoder layers: {len(found)} lists of "
            f"{number} modules; heads that read features of inner layers (EAGLE-3) need them, the others do not"
        )
    return found[0]
