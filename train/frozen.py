"""The target of a run: loaded as its config says, where the launch allows it, and its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from data.conversations import Encoded
from data.feature_plan import contents_for, prepare_folder
from data.features import Features, Most, OnlineFeatures
from data.stored_features import StoredFeatures
from decode import Target
from train.config import ADAPTING, RunConfig, require
from train.inputs import Inputs


def load_target(config: RunConfig, accelerator: Accelerator) -> Target:
    """Load the target of a run.

    Raises:
        ValueError: If it cannot be loaded so.
        OSError: If there is no such model.
    """
    wanted, processes = config.target, accelerator.num_processes
    require(
        wanted.device_map is None or processes == 1,
        f"target.device_map={wanted.device_map} gives one process all GPUs, and {processes} processes were launched; "
        "launch one (accelerate launch --num_processes 1), or leave it out",
    )
    adapting = config.head_type in ADAPTING
    if wanted.shard:
        kind = accelerator.distributed_type
        require(
            kind in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU) and not adapting,
            f"target.shard spreads the target over processes that each have the whole head, and this is {kind.value} "
            f"with {config.head_type}; launch several processes with DDP for another head, or leave it out",
        )
    return Target.from_pretrained(
        wanted.name,
        dtype=wanted.dtype,
        device=None if wanted.device_map else accelerator.device,
        pack=not adapting,
        shard=wanted.shard,
        quantize=wanted.quantize,
        device_map=wanted.device_map,
    )


def find_features(
    accelerator: Accelerator,
    config: RunConfig,
    target: Target,
    feature_layers: Sequence[int],
    inputs: Inputs,
    say: Callable[[str], None],
) -> Features:
    """Return where the features come from; with a folder, after all processes have filled it together."""
    samples, path = inputs.samples, config.data.feature_dir
    if path is None:
        return features_in_memory(accelerator, config, target, samples, feature_layers)
    wanted = contents_for(target, samples, feature_layers, inputs=inputs.hash(target), dtype=config.data.feature_dtype)
    if accelerator.is_main_process:
        prepare_folder(target, samples, path, wanted, processes=accelerator.num_processes, say=say)
    accelerator.wait_for_everyone()
    source = StoredFeatures(target, samples, path, wanted)
    number, count, hide = accelerator.process_index, accelerator.num_processes, not accelerator.is_main_process
    source.fill(number, count, hide=hide, most=find_most(accelerator, target))
    accelerator.wait_for_everyone()
    return source


def features_in_memory(
    accelerator: Accelerator,
    config: RunConfig,
    target: Target,
    samples: Sequence[Encoded],
    feature_layers: Sequence[int],
) -> OnlineFeatures:
    """Return features that are computed while training."""
    memory = int(config.data.feature_memory * 2**30)
    return OnlineFeatures(target, samples, memory, feature_layers, find_most(accelerator, target))


def find_most(accelerator: Accelerator, target: Target) -> Most | None:
    """Return what compares numbers of all processes, where the target wants them in lock-step; else None."""

    def most(numbers: Sequence[int]) -> Sequence[int]:
        found = accelerator.gather(torch.tensor([list(numbers)], device=accelerator.device))
        return [int(number) for number in found.amax(dim=0)]

    return most if target.sharded else None
