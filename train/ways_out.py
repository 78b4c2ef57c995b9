"""Which changes to its config would make a run fit that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from data.conversations import Encoded
from data.features import size_text
from decode.loading import DTYPES
from decode.quantized import FORMATS, LIBRARIES, can_round, is_rounded, linear_layers
from heads.base import Head
from train.config import RunConfig
from train.imagined import UnpredictableError
from train.memory_plan import Memory, Work

Build = Callable[[RunConfig], Head]
"""Makes the untrained head of a config."""
Predict = Callable[[Work], Sequence[Memory]]
LEAST = {"head.chunk_size": 32, "head.draft_vocab_size": 1024, "data.max_length": 128}
"""Where halving ends."""


def refusal(work: Work, memory: Sequence[Memory], build: Build, predict: Predict) -> str:
    """Return why a run cannot fit, and what would.

    Args:
        work: The run.
        memory: What it needs.
        build: Makes the head of another config.
        predict: Returns what another run needs.
    """
    each = f" in each of {work.processes} processes" if work.processes > 1 else ""
    lacks = "; ".join(f"{part.describe()}: {size_text(part.excess)} too little{each}" for part in memory if part.excess)
    single = []
    for key, values in changes(work, memory):
        for value in values:
            needed = _fitting(changed(work, key, value, build), predict)
            if needed:
                single.append(f"\n  --{key}={value}: {_totals(needed)}")
                break
    if single:
        return f"the run does not fit: {lacks}. Any one of these makes it fit:{''.join(single)}"
    together, keys = work, []
    for key, values in changes(work, memory):
        together = changed(together, key, values[-1], build)
        keys.append(f"--{key}={values[-1]}")
        needed = _fitting(together, predict)
        if needed:
            return (
                f"the run does not fit: {lacks}. No single change is enough; together these are:\n  "
                f"{' '.join(keys)}: {_totals(needed)}"
            )
    tried = f" (tried {' '.join(keys)})" if keys else ""
    return f"the run does not fit: {lacks}. No setting makes it fit{tried}; take a smaller target or more memory"


def _fitting(work: Work, predict: Predict) -> Sequence[Memory]:
    """Return what a run needs, if that is known and fits, else nothing."""
    try:
        needed = predict(work)
    except UnpredictableError:
        return []
    return [] if any(part.excess for part in needed) else needed


def changes(work: Work, memory: Sequence[Memory]) -> Iterator[tuple[str, list[Any]]]:
    """Yield keys that save memory, and values to try, the mildest first."""
    config = work.config
    kept, _ = work.kept
    if kept:
        most = max(part.excess for part in memory if "kept states" in part.parts)
        rest = max(0, kept - most) / 2**30
        yield "data.feature_memory", [int(rest * 100) / 100]
        yield "data.feature_dir", [f"features/{config.run.name}"]
    accumulation, pieces = [config.optim.accumulation], config.optim.batch_size // work.processes
    accumulation += [n for n in range(accumulation[0] + 1, pieces + 1) if pieces % n == 0]
    if accumulation[1:]:
        yield "optim.accumulation", accumulation[1:]
    if config.head.get("activation_checkpointing") is False:
        yield "head.activation_checkpointing", [True]
    vocabulary = config.head.get("draft_vocab_size") or work.target.vocab_size
    starts = {
        "head.chunk_size": config.head.get("chunk_size", 0),
        "head.draft_vocab_size": vocabulary if work.head.vocabulary is not None or "own_lm_head" in config.head else 0,
        "data.max_length": max(len(sample.token_ids) for sample in work.samples),
    }
    for key, start in starts.items():
        values = []
        while start // 2 >= LEAST[key]:
            start //= 2
            values.append(start)
        if values:
            yield key, values
    if work.dtype.itemsize > 2:
        yield "target.dtype", ["bfloat16"]
    if not is_rounded(work.target.model) and work.dtype in FORMATS:
        layers = {name: linear_layers(work.target.model, name) for name in LIBRARIES}
        yield "target.quantize", [name for name in layers if can_round(layers[name], name, work.target.device)]


def changed(work: Work, key: str, value: Any, build: Build) -> Work:
    """Return the run with another value of `key`."""
    section, _, name = key.partition(".")
    config = work.config
    if section == "head":
        config = replace(config, head={**config.head, name: value})
        return replace(work, config=config, head=build(config))
    config = replace(config, **{section: replace(vars(config)[section], **{name: value})})
    if key == "target.dtype":
        dtype = next(dtype for dtype in DTYPES if str(dtype).endswith(value))
        share = dtype.itemsize / work.dtype.itemsize
        return replace(work, config=config, dtype=dtype, target_pass=int(work.target_pass * share))
    if key == "target.quantize":  # a layer is multiplied by in the states' number format
        layer = max(part.get_parameter("weight").numel() for part in linear_layers(work.target.model, value))
        return replace(work, config=config, target_pass=work.target_pass + layer * work.dtype.itemsize)
    if key == "data.max_length":
        longest = max(len(sample.token_ids) for sample in work.samples)
        samples = [Encoded(sample.token_ids[:value], sample.loss_mask[:value]) for sample in work.samples]
        return replace(work, config=config, samples=samples, target_pass=work.target_pass * value // longest)
    return replace(work, config=config)


def _totals(memory: Sequence[Memory]) -> str:
    return ", ".join(f"{size_text(part.total)} of {part.place}" for part in memory)
