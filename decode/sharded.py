"""Targets whose decoder layers are spread over the processes of a run, by FSDP2 (Zhao et al. 2023, arXiv:2304.11277).

Each process holds a part of every layer, and a whole layer only while it computes it, for which all processes send
their parts. So all must make the same number of passes, in the same order, whatever each of them reads: one that makes
a pass more waits for the others for ever. Embedding, final norm and lm_head, which heads read, are whole everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from decode.capture import decoder_layers

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def shard_model(model: PreTrainedModel, device: torch.device) -> None:
    """Spread a model's decoder layers over all processes; those call this together.

    Args:
        model: In the memory of the host; a layer at a time goes to the device, and its part stays there.
        device: Of this process.

    Raises:
        UnsupportedTargetError: If it has no decoder layers that can be told.
    """
    model.requires_grad_(False)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    layers = decoder_layers(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    ends = {parameter for parameter in model.parameters() if parameter not in inside}
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ends)  # the next layer comes while one computes
    model.to(device)  # type: ignore[arg-type]


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model's layers are spread over processes."""
    return isinstance(model, FSDPModule)


def one_mode(model: nn.Module) -> AbstractContextManager[object]:
    """Let passes for training be in inference mode, as those of decoding are, where layers are gathered.

    The first pass makes the memory that they are gathered into, which then takes passes of its mode only.
    """
    return torch.inference_mode() if is_sharded(model) else nullcontext()


def ordinary(tensor: MaybeTensor) -> MaybeTensor:
    """Return a tensor that autograd can save: a copy of one that was made in `one_mode`."""
    made_so = tensor is not None and tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.clone() if tensor is not None and made_so else tensor
