"""A head's folder in the format of an engine: its config, its tensors, and what a reader should know."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.files import write_atomically

CONFIG, WEIGHTS, MEDUSA_WEIGHTS = "config.json", "model.safetensors", "medusa_lm_head.safetensors"
TOKEN_MAP = "token_map"
MAP_FILE = f"{TOKEN_MAP}.pt"
"""Of SGLang: the ids of a draft vocabulary, in a file of its own; read as a tensor `token_map`, as vLLM calls it."""
PICKLES = ("*.bin", "*.pt")
DAMAGED = (  # what torch's reader raises on pickles that are none, cut off, or hold more than weights
    *(pickle.UnpicklingError, struct.error, EOFError, RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, AssertionError),
)
INDICES = ("d2t", "t2d", TOKEN_MAP)
"""Ends of the names of tensors of token ids."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
WHOLE_MODEL = "medusa_head."
"""Of a checkpoint with such names, all others are of the target."""
OURS = {"format": "pt", "written_by": "gorgon"}
"""What the weights of an export say of themselves."""


@dataclass
class Foreign:
    """A head as an engine names things."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    """What is lost, or differs there, in sentences."""
    weights: str = WEIGHTS
    """Name of the file of the tensors."""
    map_file: bool = False
    """Whether `token_map` is stored in SGLang's file."""

    def take(self, name: str, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """Remove and return a tensor.

        Raises:
            ValueError: If it is missing, or of another shape.
        """
        if name not in self.tensors:
            raise ValueError(f"{name} is missing; there are {sorted(self.tensors)}")
        found = self.tensors.pop(name)
        if shape is not None and tuple(found.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(found.shape)}, expected {shape}")
        return found


def read_config(folder: str | Path, name: str = CONFIG) -> dict[str, Any]:
    """Return what a JSON file of a folder holds, by default its `config.json`.

    Raises:
        ValueError: If there is none, or it is damaged.
    """
    path = Path(folder) / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no folder of a head or a model: it has no {name}") from None
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8, and of lists in lists without end
        raise ValueError(f"{path} is not valid JSON ({error}); copy the folder again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got {str(config)[:60]}")
    return config


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a config; an empty one where it is missing or null.

    Raises:
        ValueError: If it is no object.
    """
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"config.json must have an object as {name}, got {found!r}")
    return found


def read_folder(folder: str | Path) -> Foreign:
    """Read a config and all weights of a head: safetensors, or else pickles, which are loaded as weights only.

    Raises:
        ValueError: If something is missing or damaged.
    """
    path, config = Path(folder), read_config(folder)
    tensors = _read_safetensors(sorted(path.glob("*.safetensors"))) or _read_pickles(path)
    if not tensors:
        raise ValueError(f"{folder} holds no weights (*.safetensors, {', '.join(PICKLES)})")
    if (path / MAP_FILE).is_file():
        _merge(tensors, {TOKEN_MAP: _ids(path / MAP_FILE)}, path / MAP_FILE)
    return Foreign(config, tensors)


def _read_safetensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Read the head's tensors only, as a checkpoint of a whole model may be large."""
    tensors: dict[str, Tensor] = {}
    names = {file: tensor_names(file) for file in files}
    heads_only = any(name.startswith(WHOLE_MODEL) for found in names.values() for name in found)
    for file, found in names.items():
        with safe_open(file, framework="pt") as opened:
            wanted = [name for name in found if not heads_only or name.startswith(WHOLE_MODEL)]
            _merge(tensors, {name: opened.get_tensor(name) for name in wanted}, file)
    return tensors


def tensor_names(file: Path) -> list[str]:
    """Return the names in a file of safetensors.

    Raises:
        ValueError: If it is damaged.
    """
    file.open("rb").close()  # safetensors says of what may not be read that it is not there
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); copy it again") from error


def _read_pickles(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in (file for pattern in PICKLES for file in sorted(path.glob(pattern)) if file.name != MAP_FILE):
        found = _unpickle(file)
        if not isinstance(found, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
        ):
            raise ValueError(f"{file} holds no mapping of names to tensors; if it is of no head, move it away")
        _merge(tensors, found, file)
    if any(name.startswith(WHOLE_MODEL) for name in tensors):
        return {name: tensor for name, tensor in tensors.items() if name.startswith(WHOLE_MODEL)}
    return tensors


def _unpickle(file: Path) -> Any:
    """Read a pickle, running nothing that it says."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        raise ValueError(  # without torch's advice, which is to run what it says
            f"cannot read {file} as weights only, it is damaged or holds more; copy it again, or ask for safetensors"
        ) from error


def _ids(file: Path) -> Tensor:
    found = _unpickle(file)
    try:
        ids = torch.as_tensor(found)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{file} must hold a list of token ids: {error}") from error
    return ids


def _merge(tensors: dict[str, Tensor], found: Mapping[str, Tensor], file: Path) -> None:
    if twice := sorted(tensors.keys() & found.keys()):
        raise ValueError(f"{file} holds {twice}, which other files of its folder hold too; leave one of them there")
    tensors |= found


def check_weights(tensors: Mapping[str, Tensor]) -> None:
    """Make sure that tensors are plain numbers, as heads have them.

    Raises:
        ValueError: If one is quantized, sparse, not finite, or of integers where no token ids are expected.
    """
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
        if plain and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} claims {tensor.numel()} numbers, which are not in its file; copy it again")
        whole = name.endswith(INDICES) and plain and tensor.dtype in INTEGERS
        if not whole and not (plain and tensor.dtype in FLOATS):
            raise ValueError(
                f"{name} is of {tensor.dtype} ({tensor.layout}), which heads here cannot have; expected is one of "
                f"{', '.join(map(str, INTEGERS if name.endswith(INDICES) else FLOATS))}; unpack or dequantize it first"
            )
        if not whole and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are infinite or none (NaN); copy or train the head again")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Keep others from writing to a folder, which is made if missing, and leave no half files in it.

    Raises:
        ValueError: If somebody else is writing there.
        OSError: If it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"somebody else is writing to {folder}; wait for that, or choose another folder") from None
        before = {*folder.glob("*.tmp")}
        try:
            yield
        except (SafetensorError, RuntimeError) as error:  # of a full disk, from Rust and from torch
            raise OSError(f"cannot write to {folder}: {error}; see whether the disk is full") from error
        finally:
            for half in {*folder.glob("*.tmp")} - before:
                half.unlink()
    finally:
        os.close(descriptor)


def check_out(out: str | Path) -> None:
    """Make sure that nothing but an earlier export, or the rest of one that was killed, is replaced at `out`.

    Raises:
        ValueError: If something else is there.
    """
    folder = Path(out)
    if not folder.exists():
        return
    way_out = "; choose another folder, or empty this one"
    if not folder.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    names = {file.name.removesuffix(".tmp") for file in folder.iterdir()}
    if other := sorted(names - {CONFIG, WEIGHTS, MEDUSA_WEIGHTS, MAP_FILE}):
        raise ValueError(f"{out} holds what no export has written ({', '.join(other[:5])}){way_out}")
    weights = [folder / name for name in (WEIGHTS, MEDUSA_WEIGHTS) if (folder / name).exists()]
    if not weights and (folder / CONFIG).exists():
        raise ValueError(f"{out} holds a {CONFIG} that no export has written{way_out}")
    for file in weights:
        tensor_names(file)
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}) != OURS:
                raise ValueError(f"{file} was not written by an export{way_out}")


def write_folder(foreign: Foreign, out: str | Path, *, dtype: torch.dtype) -> None:
    """Replace an earlier export at `out`, if there is one.

    Its config goes first and the new one comes last: no reader loads what a crash leaves between, and no reader finds
    weights of two heads.

    Args:
        foreign: What to write.
        out: Folder; made if missing.
        dtype: Store floating-point weights in this precision.

    Raises:
        ValueError: See `check_out` and `writing`; or if a weight has no number in this precision.
        OSError: If it cannot be written.
    """
    check_out(out)
    folder = Path(out)
    tensors = {}
    for name, tensor in foreign.tensors.items():
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if cast.is_floating_point() and not bool(cast.isfinite().all()):
            raise ValueError(
                f"{name} holds numbers that are infinite or none (NaN) in {dtype}; choose a wider precision (--dtype), "
                "or train the head again"
            )
        tensors[name] = cast.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
    text = json.dumps({**foreign.config, "torch_dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    with writing(folder):
        (folder / CONFIG).unlink(missing_ok=True)
        for file in list(folder.iterdir()):
            file.unlink()
        if foreign.map_file:
            ids = tensors.pop(TOKEN_MAP)
            write_atomically(folder / MAP_FILE, lambda temporary: torch.save(ids, temporary))
        write_atomically(folder / foreign.weights, lambda temporary: save_file(tensors, temporary, OURS))
        write_atomically(folder / CONFIG, lambda temporary: temporary.write_text(text))
