"""What a training run is made of: frozen dataclasses, which are the schema of the YAML files and of the command line.

The `head` section holds the type of head and the fields of its own config, without the sizes that come from the target,
so that a new head needs no second schema. `command_line` reads all of it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from decode.limits import check_temperature


class ConfigError(ValueError):
    """A key that does not exist, a value of the wrong type, or a run that cannot go on with this config."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


@contextmanager
def naming(key: str, way_out: str, *further: type[Exception]) -> Iterator[None]:
    """Name the key whose value made a file or folder impossible to read or write, and the way out.

    Args:
        key: The key.
        way_out: What the user can do.
        further: Errors that mean it beside `OSError`; torch and safetensors have their own.
    """
    known: tuple[type[Exception], ...] = (OSError, *further)
    try:
        yield
    except known as error:
        raise ConfigError(f"{key}: {error}; {way_out}") from error


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model that is to be accelerated. accelerate chooses the device."""

    name: str
    """Name on the hub, or a folder."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number format of the target's weights, and of the states it hands to the head."""
    quantize: Literal["8bit", "4bit"] | None = None
    """Round the weights of its linear layers while it is loaded; embedding and lm_head stay as target.dtype says."""
    device_map: Literal["auto", "balanced", "sequential"] | None = None
    """Spread its layers over all GPUs, as accelerate does it; for a run of one process."""
    shard: bool = False
    """Spread its layers over the processes of the run, which gather each for its pass; the head is whole in all."""

    def __post_init__(self) -> None:
        require(
            not self.shard or (self.quantize is None and self.device_map is None),
            "target.shard spreads layers as they are stored; leave target.quantize and target.device_map out, or it",
        )
        require(
            self.quantize is None or self.dtype != "float64",
            f"target.quantize={self.quantize} computes in float32, bfloat16 or float16, not in target.dtype=float64",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the head is trained on: conversations whose answers the target wrote (python -m data.distill)."""

    source: str
    """JSONL or Parquet file, or a name on the hub, with conversations."""
    max_length: int = 2048
    """Conversations are cut after this many tokens."""
    turns: Literal["all", "last"] = "all"
    """Assistant turns that are learned from; last: for templates that rewrite earlier ones, as Qwen3's does."""
    limit: int | None = None
    """Use only the first conversations of the source; null: all."""
    feature_memory: float = 4.0
    """GiB of memory, in each process, for the target's states. What fits is computed once, the rest in every epoch."""
    feature_dir: str | None = None
    """Folder for the target's states and features: all are computed before training, and read from there, by this run
    and others on the same data. null: they are computed while training, see data.feature_memory."""
    feature_dtype: Literal["target", "bfloat16"] = "target"
    """Number format in data.feature_dir: the target's, which changes no bit of the training, or bfloat16, which rounds
    the states and takes half the room of float32."""

    def __post_init__(self) -> None:
        require(self.max_length >= 2, f"data.max_length must be at least 2, got {self.max_length}")
        require(self.limit is None or self.limit >= 1, f"data.limit must be null or at least 1, got {self.limit}")
        require(self.feature_dir != "", "data.feature_dir is empty; name a folder, or null for no folder")
        require(self.feature_memory >= 0, f"data.feature_memory must not be negative, got {self.feature_memory}")
        require(
            self.feature_dir is not None or self.feature_dtype == "target",
            f"data.feature_dtype={self.feature_dtype} is the number format of a folder; set data.feature_dir too",
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule. Give either steps or epochs."""

    lr: float = 1e-3
    """Peak learning rate (1e-3: FasterDecoding/Medusa, scripts/train_vicuna_7b.sh)."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: fall to zero along a cosine, or stay."""
    steps: int | None = None
    """Length of the run in optimiser steps."""
    epochs: float | None = None
    """Length of the run in passes over the data."""
    batch_size: int = 16
    """Conversations per optimiser step, over all processes and micro-batches."""
    accumulation: int = 1
    """Micro-batches per optimiser step. Changes the memory needed, not the step, but for the noise of an EAGLE head
    (head.noise), which is drawn for each micro-batch."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be above 0, got {self.lr}")
        require((self.steps is None) != (self.epochs is None), "set exactly one of optim.steps and optim.epochs")
        length = self.epochs if self.steps is None else self.steps
        require(length is not None and length > 0, f"optim.steps or optim.epochs must be above 0, got {length}")
        require(self.warmup_steps >= 0, f"optim.warmup_steps must not be negative, got {self.warmup_steps}")
        require(self.max_grad_norm >= 0, f"optim.max_grad_norm must not be negative, got {self.max_grad_norm}")
        require(
            self.accumulation >= 1 and self.batch_size >= 1 and self.batch_size % self.accumulation == 0,
            f"optim.batch_size ({self.batch_size}) must be a multiple of optim.accumulation ({self.accumulation})",
        )

    def total_steps(self, num_samples: int) -> int:
        """Return the number of optimiser steps on `num_samples` conversations."""
        if self.steps is not None:
            return self.steps
        return math.ceil((self.epochs or 0) * num_samples / self.batch_size)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Where the run is kept and how often things happen. Periods are in optimiser steps, 0: not before the end."""

    name: str
    """The run lives in <dir>/<name>; the same name continues it."""
    dir: str = "runs"
    """Folder of all runs."""
    init: str | None = None
    """Folder of a trained head of this target to start from; null: an untrained one. The optimiser starts anew."""
    seed: int = 0
    """Seeds the order of the data and the head's random numbers."""
    eval_every: int = 0
    """Decode the evaluation prompts this often; always at the end."""
    save_every: int = 100
    """Write a checkpoint this often; also before each evaluation, on SIGTERM or Ctrl-C, and at the end."""
    log_every: int = 1
    """Write train/* to metrics.jsonl and the tracker this often."""
    keep: int = 2
    """Number of checkpoints kept, the newest."""
    tracker: Literal["wandb", "tensorboard", "trackio"] | None = None
    """Where metrics go besides metrics.jsonl (WANDB_MODE=offline works); docs/tracking.md says what each gets."""

    def __post_init__(self) -> None:
        require(
            self.name not in ("", ".", "..") and Path(self.name).name == self.name,
            f"run.name must be one folder name, got {self.name!r}",
        )
        for period in ("eval_every", "save_every"):
            value = dataclasses.asdict(self)[period]
            require(value >= 0, f"run.{period} must not be negative, got {value}; 0 means only at the end")
        require(self.log_every >= 1, f"run.log_every must be at least 1, got {self.log_every}")
        require(self.keep >= 1, f"run.keep must be at least 1, got {self.keep}")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name


RESERVED = re.compile(r"chain|accept_rate|drift|t\d.*")
"""Names in eval/* that no prompt set can have."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation by real decoding: prompts that are not trained on, with and without the head, one at a time."""

    prompts: tuple[str, ...] = ()
    """JSONL files, each a prompt set that is called like the file. Empty: `eval.num_prompts` conversations of the
    source, chosen by a hash of their ids, are kept out of training and their prompts used."""
    num_prompts: int = 8
    """Number of prompts of each set, the first of its file; 0: no evaluation."""
    max_new_tokens: int = 64
    """Tokens decoded for each prompt."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Temperatures to decode at. 0, which is greedy, must be one: it is measured with tree and chain, the others with
    the tree only."""
    tree: tuple[int, ...] = (3, 2, 1, 1)
    """Children of each node at depth 1, 2, ...: the tree of eval/tokens_per_step, which `best/` is chosen by, unless
    the head has a tree of its own. A chain as deep is measured too. Depths beyond the head's are left out."""

    def __post_init__(self) -> None:
        require(self.num_prompts >= 0, f"eval.num_prompts must not be negative, got {self.num_prompts}")
        require(bool(self.tree) and min(self.tree) >= 1, f"eval.tree needs numbers of at least 1, got {self.tree}")
        require(self.max_new_tokens >= 2, f"eval.max_new_tokens must be at least 2, got {self.max_new_tokens}")
        require(
            0 in self.temperatures and len({*self.temperatures}) == len(self.temperatures),
            f"eval.temperatures needs 0, by which the best head is chosen, and others above it, each once; got "
            f"{list(self.temperatures)}",
        )
        for value in self.temperatures:
            try:
                check_temperature("eval.temperatures", value)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        names = [Path(file).stem for file in self.prompts]
        require(
            len(set(names)) == len(names) and not any(map(RESERVED.fullmatch, names)),
            f"the files of eval.prompts name the prompt sets, which need names of their own, and none of chain, "
            f"accept_rate, drift or t<number>, which name metrics; got {names}: rename a file",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    target: TargetConfig
    head_type: str
    """Type of head; the key `head.type`."""
    head: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the head's config, without the sizes that come from the target."""
    data: DataConfig
    optim: OptimConfig
    run: RunPlan
    eval: EvalConfig
    precision: Literal["float32", "bf16"] = "float32"
    """Number format of the head's arithmetic; bf16 through accelerate's autocast, weights stay float32."""


ADAPTING = frozenset({"medusa2"})
"""Types of heads that are trained with an adapter, whose layers replace modules of the target: it is not packed."""
SECTIONS: Mapping[str, type] = {
    "target": TargetConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "run": RunPlan,
    "eval": EvalConfig,
}
