"""Targets whose layers are on several devices, as accelerate places them (`device_map`).

Its hooks move what a layer is given to the layer's device. Heads read embedding and lm_head and stand where they are,
so both are put on one device, where inputs go and states come back too.
"""

from __future__ import annotations

from typing import Literal

from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers import PreTrainedModel

DeviceMap = Literal["auto", "balanced", "sequential"]
"""All begin with the first GPU, where heads are trained."""


def is_placed(model: nn.Module) -> bool:
    """Return whether accelerate has put parts of a model on devices of their own."""
    return "hf_device_map" in vars(model)


def join_ends(model: PreTrainedModel) -> None:
    """Put the lm_head where the embedding is.

    Raises:
        ValueError: If either is on no device, but is fetched for each pass.
    """
    embed = model.get_input_embeddings()
    lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = [part.get_parameter("weight") for part in (embed, lm_head)]
    if any(weight.is_meta for weight in weights):
        raise ValueError(
            f"device_map leaves no room on a device for embedding and lm_head of {model.config.name_or_path}, which "
            "heads read; round the target's weights with quantize, or take more or larger GPUs"
        )
    device = weights[0].device
    if weights[1].device != device:
        remove_hook_from_module(lm_head)
        add_hook_to_module(lm_head.to(device), AlignDevicesHook(execution_device=device))
