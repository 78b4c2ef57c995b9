"""The plan of a run, before it is made: memory, disk and length; and what to change where it cannot fit.

Memory is predicted for the process and the moment that need most (`train.memory_plan`); the speed is measured
(`train.pace`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data.conversations import Encoded
from data.feature_files import FeatureFolder, is_taken, open_folder
from data.feature_plan import contents_for
from data.features import bytes_per_token, size_text
from decode import Target
from decode.loading import find_dtype
from decode.quantized import LIBRARIES, can_round, linear_layers, predicted_bytes
from heads.base import Head
from train.config import ADAPTING, ConfigError, RunConfig
from train.imagined import UnpredictableError
from train.inputs import Inputs
from train.memory_plan import Memory, Work, held_bytes, plan_memory, target_pass_bytes
from train.room import disk_of, free_memory, free_on_device
from train.ways_out import refusal

TIGHT = 1.3
"""What a run adds to what a process holds already may be so much more than is predicted."""


@dataclass(frozen=True)
class Disk:
    """Bytes that a run will write in one place."""

    what: str
    path: Path
    needed: int
    way_out: str

    def describe(self) -> str:
        """Return it in one line, for people."""
        return f"disk: {size_text(self.needed)} of {self.what} in {self.path}, {size_text(disk_of(self.path)[1])} free"


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    work: Work
    memory: Sequence[Memory]
    disk: Sequence[Disk]
    filling: int
    """Tokens whose states are not in data.feature_dir yet."""
    unknown: str | None = None
    """Why `memory` is empty, if it is."""

    def lines(self) -> list[str]:
        """Return the plan for people."""
        work, optim = self.work, self.work.config.optim
        tokens = len(work.steps) * optim.batch_size * mean_length(work.samples)
        longest = max(len(row.token_ids) for rows in work.largest for row in rows)
        processes = f" in each of {work.processes} processes" if work.processes > 1 else ""
        unknown = f"plan: the memory of a step of {work.head.kind} heads cannot be predicted ({self.unknown})"
        return [
            *([unknown] if self.unknown else []),
            *(f"plan: {memory.describe()}{processes}" for memory in self.memory),
            *(f"plan: {disk.describe()}" for disk in self.disk),
            f"plan: {len(work.steps)} steps of {optim.batch_size} conversations, about {tokens:,.0f} tokens; the "
            f"largest micro-batch is {work.micro_batch} x {longest} tokens",
            *(
                f"plan: {memory.place} may not be enough: it is close, and predictions can be a fifth too low"
                for memory in self.memory
                if memory.free is not None and 0 <= memory.free - memory.added < (TIGHT - 1) * memory.added
            ),
        ]

    def check_disk(self) -> None:
        """Refuse what does not fit on the disks.

        Raises:
            ConfigError: With the ways out.
        """
        for disk in self.disk:
            number, free = disk_of(disk.path)
            together = [other for other in self.disk if disk_of(other.path)[0] == number]
            needed = sum(other.needed for other in together)
            if needed > free:
                what = " and ".join(f"{size_text(other.needed)} of {other.what}" for other in together)
                ways = "; ".join(other.way_out for other in together)
                raise ConfigError(
                    f"{what} do not fit on the disk of {disk.path}: {size_text(free)} are free, "
                    f"{size_text(needed - free)} too little; {ways}"
                )


def mean_length(samples: Sequence[Encoded]) -> float:
    """Return the mean number of tokens."""
    return sum(len(sample.token_ids) for sample in samples) / len(samples)


def check_loading(config: RunConfig, accelerator: Accelerator) -> None:
    """Refuse a target that does not fit, before it is loaded.

    What loads into a GPU is mapped from its files and takes no memory of the host's.

    Raises:
        ConfigError: With the way out.
    """
    name, dtype, on_gpu = config.target.name, config.target.dtype, accelerator.device.type == "cuda"
    memory = free_memory()
    free = None if memory is None else memory // _local_processes(accelerator)
    if on_gpu:
        free = free_on_device(accelerator.device)
    spread = config.target.device_map is not None or config.target.shard
    empty = None if free is None or spread else without_weights(name)
    if free is None or empty is None:
        return
    packs = not on_gpu and config.head_type not in ADAPTING and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    rounding = config.target.quantize
    needed = loading_bytes(empty, dtype, rounding, packs=packs)
    if needed > free:
        ways: dict[str, tuple[str, str | None]] = {"--target.dtype=bfloat16": ("bfloat16", rounding)}
        known = [name for name in LIBRARIES if can_round(linear_layers(empty, name), name, accelerator.device)]
        ways |= {f"--target.quantize={name}": (dtype, name) for name in known}
        ways |= {f"--target.dtype=bfloat16 --target.quantize={name}": ("bfloat16", name) for name in known}
        fits = [way for way, settings in ways.items() if loading_bytes(empty, *settings, packs=packs) <= free]
        way_out = f"{fits[0]} would fit; or take" if fits else "take"
        count = sum(parameter.numel() for parameter in empty.parameters())
        kind = dtype if rounding is None else f"{dtype} and {rounding}"
        raise ConfigError(
            f"target.name={name} has {count:,} weights, which take {size_text(needed)} in {kind} while they are "
            f"loaded; {size_text(free)} of {'GPU ' if on_gpu else ''}memory are there: {way_out} a smaller target"
        )


def without_weights(name: str) -> PreTrainedModel | None:
    """Return a model without its weights, to count them; None where that cannot be done.

    Loading says better what is wrong with a model than this could, and loads some that cannot be counted: quantised
    ones are smaller, and a model's own code may compute with weights that have no numbers here.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except Exception:  # of that code, of the hub, of a file: any
        return None
    quantized = getattr(config, "quantization_config", None) is not None
    return None if quantized else model


def loading_bytes(empty: PreTrainedModel, dtype: str, quantize: str | None, *, packs: bool) -> int:
    """Return what the weights of a model take while they are loaded; float32 ones that are packed are there twice."""
    copies = 2 if packs and dtype == "float32" and quantize is None else 1
    format_ = find_dtype(dtype)
    assert isinstance(format_, torch.dtype)
    return predicted_bytes(empty, quantize, format_) * copies


def _local_processes(accelerator: Accelerator) -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))


def make_plan(
    accelerator: Accelerator,
    config: RunConfig,
    target: Target,
    head: Head,
    inputs: Inputs,
    steps: range,
    build_head: Callable[[RunConfig, Target, Sequence[Encoded], Callable[[str], None]], Head],
    say: Callable[[str], None],
) -> Plan:
    """Print the plan of the optimiser steps `steps` and return it, if they fit.

    Args:
        accelerator: Says how many processes there are.
        config: The run.
        target: The target, loaded.
        head: The head, on the target's device.
        inputs: The data.
        steps: Optimiser steps that are to be made.
        build_head: Makes the head of another config, to see what would fit.
        say: Prints a line.

    Raises:
        ConfigError: If the run cannot fit, with what could.
    """
    work = Work(
        config=config,
        target=target,
        head=head,
        samples=inputs.samples,
        steps=steps,
        processes=accelerator.num_processes,
        dtype=target.dtype,
        target_pass=0,
    )
    local, unknown = _local_processes(accelerator), _unpredictable(accelerator, config)
    filling, size = _missing(work, inputs)
    disk, memory = _disk(work, filling * size), []
    if unknown is None:
        try:
            work = replace(work, target_pass=target_pass_bytes(target, inputs.samples, head.feature_layers))
            memory = plan_memory(work, local)
        except UnpredictableError as error:
            unknown = str(error)
    plan = Plan(work, memory, disk, filling, unknown)
    plan.check_disk()
    if any(memory.excess for memory in plan.memory):
        predict = partial(plan_memory, local=local, held=held_bytes(target))
        raise ConfigError(
            refusal(work, plan.memory, lambda c: build_head(c, target, inputs.samples, lambda line: None), predict)
        )
    for line in plan.lines():
        say(line)
    return plan


def _unpredictable(accelerator: Accelerator, config: RunConfig) -> str | None:
    """Return why the memory of a step is not even tried to predict, or None."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return f"{kind.value} spreads or offloads a part of it"
    if config.head_type in ADAPTING:
        return "they train layers inside the target"
    spread = config.target.device_map is not None or config.target.shard
    return "the target is spread over several devices or processes" if spread else None


def _disk(work: Work, features: int) -> list[Disk]:
    run, weights = work.config.run, sum(parameter.nbytes for parameter in work.head.parameters())
    there = sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file())
    # weights and two moments, one checkpoint more while it is written; best, last and one being written
    needed = max(3 * weights, 3 * weights * (run.keep + 1) + 3 * weights - there)
    text = f"checkpoints ({run.keep} of {size_text(3 * weights)}, another while it is written) and heads"
    disks = [Disk(text, run.folder, needed, "choose a run.dir on another disk or a lower run.keep")]
    if work.config.data.feature_dir is not None:
        ways_out = "choose a data.feature_dir on another disk, data.feature_dtype=bfloat16, or no data.feature_dir"
        disks.append(Disk("features", Path(work.config.data.feature_dir), features, ways_out))
    return disks


def _missing(work: Work, inputs: Inputs) -> tuple[int, int]:
    """Return how many tokens' states are not in data.feature_dir yet, and the bytes of one token's there."""
    data = work.config.data
    if data.feature_dir is None:
        return 0, 0
    path, layers = Path(data.feature_dir), work.head.feature_layers
    hashed = inputs.hash(work.target)
    wanted = contents_for(work.target, work.samples, layers, inputs=hashed, dtype=data.feature_dtype)
    folder = open_folder(path, wanted) if is_taken(path) else FeatureFolder(path, wanted)
    contents = folder.contents
    files = [work.samples[slice(*contents.bounds[number : number + 2])] for number in folder.missing()]
    tokens = sum(len(sample.token_ids) for file in files for sample in file)
    return tokens, bytes_per_token(work.target.hidden_size, contents.layers, contents.torch_dtype)
