"""From a head's folder to an engine's: which heads and which options each format takes, and writing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from heads.base import Head
from heads.checkpoint import load_head, read_target, stored_dtype
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.export.commands import misread, serve_head, serve_model
from heads.export.gguf import LAYERS, write_gguf
from heads.export.model import copy_model, left_behind
from heads.formats import FORMATS, eagle, eagle3
from heads.formats.folder import read_config, write_folder
from heads.formats.target_files import TargetFiles
from heads.hub import find_head
from heads.medusa import MedusaConfig

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "eagle3": ("target", "dtype"),
    "speculators": ("target", "dtype", "tokens"),
    "medusa": ("target", "dtype"),
    "eagle": ("target", "dtype", "engine"),
    "hf": ("target",),
    "gguf": ("target", "dtype", "llama_cpp"),
}
"""What each format takes."""
FLAGS = {"target": "--target", "dtype": "--dtype", "tokens": "--tokens", "engine": "--for", "llama_cpp": "--llama-cpp"}
NEEDED = {
    "eagle": ("engine", "'vllm' or 'sglang', which want different configs"),
    "gguf": ("llama_cpp", "the folder of llama.cpp, whose converter writes the file"),
}
HEAD_TYPES = {name: module.HEAD_TYPE for name, module in FORMATS.items()} | {"gguf": eagle3.HEAD_TYPE}
FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""Of a repository on the hub, what is downloaded: a head, or a model with its tokenizer."""
NOBODY = {
    "hydra": "no inference engine loads Hydra heads; their authors' code (zankner/Hydra) and `decode` do. For vLLM, "
    "SGLang or llama.cpp train EAGLE-3"
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Written:
    """What there is to say of an export."""

    notes: list[str]
    """What is lost or differs there, in sentences."""
    commands: list[tuple[str, str]]
    """Engines and how to start them."""
    left: list[str] = field(default_factory=list)
    """What was not copied of a draft model's folder, in sentences, which only its owner should read."""


def write(
    head: str | Path, out: str | Path, *, to: str, options: Mapping[str, Any], name: str | None = None
) -> Written:
    """Write a head or a draft model for engines; see `heads.export`, also for errors.

    Args:
        head: Head folder, or the folder of a draft model; or a name on the hub.
        out: What to write.
        to: The format.
        options: As `heads.export` has them.
        name: By which engines will know it; `out` by default.
    """
    written = _write(head, out, to, options)
    return replace(written, notes=[*written.notes, *misread(to, name or str(out))])


def _write(head: str | Path, out: str | Path, to: str, options: Mapping[str, Any]) -> Written:
    _check_options(to, options)
    folder = find_head(head, *FILES)
    if os.path.realpath(out) == os.path.realpath(folder):  # `Path.resolve` raises for links in a circle
        raise ValueError(f"{out} is the head's own folder; export to another")
    if "model_type" in read_config(folder):
        if to != "hf":
            raise ValueError(f"{head} is a model, not a head; as a draft model it is exported to 'hf', not to {to!r}")
        return _copy_model(folder, Path(out), options["target"])
    kind, recorded = read_target(folder)
    formats = [name for name, read in HEAD_TYPES.items() if read == kind]
    if not formats:
        raise ValueError(NOBODY.get(kind, f"there is no format for {kind} heads"))
    if to not in formats:
        raise ValueError(f"{head} is of type {kind}, which is exported to {' or '.join(formats)}, not to {to}")
    target = TargetFiles(recorded if options["target"] is None else options["target"])
    stored = stored_dtype(folder)
    return _write_head(load_head(folder, target, dtype=stored), target, out, to, options)


def formats_of(head: Head) -> list[tuple[str, str | None]]:
    """Return the formats that take a head, and for which engine where they need one; empty if nobody loads it."""
    config = head.config
    if isinstance(config, MedusaConfig) and config.own_lm_head and config.draft_vocab_size is not None:
        return []
    if isinstance(config, EagleConfig):
        biased = bool(head.state_dict().get(eagle.BIAS, torch.zeros(1)).any())
        return [("eagle", engine) for engine in eagle.ARCHITECTURES if engine != "vllm" or not biased]
    three = isinstance(config, Eagle3Config) and len(config.feature_layers) == LAYERS
    return [(name, None) for name, kind in HEAD_TYPES.items() if kind == head.kind and (name != "gguf" or three)]


def _check_options(to: str, options: Mapping[str, Any]) -> None:
    if to not in OPTIONS:
        raise ValueError(f"unknown format {to!r}; there are {', '.join(OPTIONS)}")
    for name, value in options.items():
        if value is not None and name not in OPTIONS[to]:
            raise ValueError(f"the format {to} takes no {name} ({FLAGS[name]}); leave it out")
    name, what = NEEDED.get(to, ("", ""))
    if name and options[name] is None:
        raise ValueError(f"the format {to} needs {name} ({FLAGS[name]}): {what}")
    if options["dtype"] not in (None, *DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {options['dtype']}")


def _write_head(head: Head, target: TargetFiles, out: str | Path, to: str, options: Mapping[str, Any]) -> Written:
    dtype = head.dtype if options["dtype"] is None else options["dtype"]
    if to == "gguf":
        foreign = eagle3.to_engine(head, target)  # type: ignore[arg-type]
        write_gguf(foreign, target, Path(out), dtype=dtype, llama_cpp=Path(options["llama_cpp"]))
        foreign.notes = eagle3.notes_of_llama_cpp(target)  # and none of others
    else:
        chosen = {name: options[name] for name in ("engine", "tokens") if options[name] is not None}
        foreign = FORMATS[to].to_engine(head, target, **chosen)
        write_folder(foreign, out, dtype=dtype)
    commands = serve_head(
        to,
        head,
        str(out),
        target.name,
        options["engine"],
        dtype=target.dtype,
        folder=str(target.folder),
        num_layers=target.num_layers,
    )
    return Written(foreign.notes, commands)


def _copy_model(folder: Path, out: Path, target: str | Path | None) -> Written:
    """Copy a draft model without what `decode.tune` measured."""
    model = TargetFiles(folder)  # complete
    notes: list[str] = []
    known: dict[str, str] = {}
    if target is not None:
        files_of_target = TargetFiles(target)
        known = {"dtype": files_of_target.dtype, "folder": str(files_of_target.folder)}
        sizes = [files.number("vocab_size") for files in (model, files_of_target)]
        if sizes[0] != sizes[1]:
            notes.append(f"vLLM refuses it: its vocabulary has {sizes[0]} tokens, the target's {sizes[1]}")
    left = left_behind(copy_model(model, out))
    return Written(notes, serve_model(str(out), "TARGET" if target is None else str(target), **known), left)
