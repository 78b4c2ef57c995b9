"""A folder of features: what is in it, its files, and how damage and foreign content are told.

    manifest.json            which target, layers, number format and conversations the folder is for
    features_00000.safetensors ...   some conversations each, end to end: `hidden` [N, D] and `layer.<k>` [N, D]

Every file carries a key, which only these settings give, and a checksum of its content. It is written beside its place,
synced and renamed, so a kill costs the one file that was being made. Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.files import write_atomically

MANIFEST, LOCK, FORMAT = "manifest.json", ".lock", 1
HIDDEN = "hidden"
MISSING = "is missing"
FILE_CONVERSATIONS, FILE_BYTES = 64, 2**28
"""A file is closed when it holds so many conversations, or before it would be larger."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a folder of features is for."""

    target: str
    """Name of the target, for people; the same model may be called by another path."""
    fingerprint: str
    """Of the target."""
    target_dtype: str
    """The target's number format when it computed them, and the rounding of its weights; see `Target.precision`."""
    dtype: str
    """Number format on disk."""
    layers: tuple[int, ...]
    """Decoder layers whose outputs are there beside the states."""
    inputs: str
    """Hash of the tokens and masks of all conversations, in order."""
    bounds: tuple[int, ...]
    """File f holds conversations `bounds[f]` to `bounds[f + 1]`, without the last."""

    @property
    def num_files(self) -> int:
        """Number of files when the folder is complete."""
        return len(self.bounds) - 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """Number format on disk."""
        dtype = vars(torch)[self.dtype]
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def names(self) -> list[str]:
        """Names of the tensors in each file."""
        return [HIDDEN, *map(layer_name, self.layers)]

    def key(self, number: int) -> str:
        """Return what a file must carry to be used as file `number`."""
        settings = [value for name, value in sorted(asdict(self).items()) if name != "target"]
        return hashlib.sha256(json.dumps([FORMAT, number, *settings]).encode()).hexdigest()[:32]

    def conflicts(self, wanted: Contents) -> list[str]:
        """Return a line for each setting that keeps these contents from serving a run that wants `wanted`."""
        lines = []
        if self.fingerprint != wanted.fingerprint:
            lines.append(
                f"target: {self.target} (fingerprint {self.fingerprint}) -> {wanted.target} ({wanted.fingerprint})"
            )
        elif self.inputs != wanted.inputs:  # this hash has the target in it
            lines.append(
                f"conversations: {self.inputs} -> {wanted.inputs}: data.source or its file, data.limit, "
                "data.max_length, or those held out for the evaluation"
            )
        if self.target_dtype != wanted.target_dtype:
            lines.append(f"target.dtype, target.quantize: {self.target_dtype} -> {wanted.target_dtype}")
        if self.dtype != wanted.dtype:
            lines.append(f"number format on disk (data.feature_dtype): {self.dtype} -> {wanted.dtype}")
        if not set(wanted.layers) <= set(self.layers):
            lines.append(f"layers: has {list(self.layers)}, the head reads {list(wanted.layers)}")
        return lines


def layer_name(layer: int) -> str:
    """Return the name of the tensor with the outputs of a decoder layer."""
    return f"layer.{layer}"


def cut(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the `Contents.bounds` for conversations of `sizes` bytes."""
    bounds, used = [0], 0
    for index, size in enumerate(sizes):
        full = index - bounds[-1] == FILE_CONVERSATIONS or used + size > FILE_BYTES
        if full and index > bounds[-1]:
            bounds.append(index)
            used = 0
        used += size
    return (*bounds, len(sizes))


class FeatureFolder:
    """The files of one folder. Any number of processes, of one run or several, may use it at a time."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path = path
        self.contents = contents

    def file(self, number: int) -> Path:
        """Return where file `number` is, or will be."""
        return self.path / f"features_{number:05d}.safetensors"

    def fault(self, number: int, *, thorough: bool) -> str | None:
        """Return why file `number` cannot be used, or None. `thorough` reads all of it, else only its header.

        Raises:
            ValueError: If it is there but may not be read.
        """
        path = self.file(number)
        try:
            path.open("rb").close()  # safetensors says of what may not be read that it is not there
            with safe_open(path, "pt") as file:
                notes = file.metadata() or {}
                if notes.get("key") != self.contents.key(number):
                    return "holds other features than its folder's manifest says"
                if thorough and notes.get("checksum") != _checksum(
                    {n: file.get_tensor(n) for n in self.contents.names}
                ):
                    return "is damaged (wrong checksum)"
        except FileNotFoundError:
            return MISSING
        except SafetensorError as error:
            return f"is damaged ({error})"
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error}; choose another data.feature_dir") from error
        return None

    def missing(self) -> list[int]:
        """Return the numbers of the files that are not there, damaged at their head, or of other contents."""
        return [number for number in range(self.contents.num_files) if self.fault(number, thorough=False) is not None]

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write file `number`; at any moment it is not there, or whole.

        Raises:
            OSError: If it cannot be written.
        """
        notes = {"key": self.contents.key(number), "checksum": _checksum(tensors)}
        with _writing(self.path):
            write_atomically(self.file(number), lambda new: save_file(dict(tensors), new, metadata=notes))

    def open(self, number: int) -> Any:
        """Return file `number`, a `safetensors.safe_open`, mapped into memory; its content is taken as checked.

        Raises:
            ValueError: If it is not there or not of these contents.
        """
        fault = self.fault(number, thorough=False)
        if fault is not None:
            raise ValueError(f"{self.file(number)} {fault}; the same command computes it again")
        return safe_open(self.file(number), "pt")

    def lock(self, number: int | None) -> BinaryIO:
        """Keep other processes from file `number`, or, without one, from the manifest. Not to be nested.

        Returns:
            A file; closing it frees the lock, as does a kill.

        Raises:
            OSError: If the folder cannot be written to; it is made if it is missing.
        """
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("wb")
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 0 if number is None else 1 + number)
        return file


def open_folder(path: Path, wanted: Contents) -> FeatureFolder:
    """Return the folder `path` with what its manifest says it is for, which is `wanted` or has it as a part.

    Raises:
        ValueError: If it is for something else, or its manifest is missing or damaged.
    """
    there = _read_contents(path)
    conflicts = "".join(f"\n  {line}" for line in there.conflicts(wanted))
    if conflicts:
        raise ValueError(
            f"{path} is for other features than this run needs:{conflicts}\nChoose another data.feature_dir, delete "
            "the folder to write it anew, or undo the change"
        )
    return FeatureFolder(path, there)


def is_taken(path: Path) -> bool:
    """Return whether the folder `path` holds features, or says which it will; one that does not is free for any.

    Raises:
        ValueError: If it may not be read.
    """
    try:
        return (path / MANIFEST).exists() or any(path.glob("features_*.safetensors"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}; choose another data.feature_dir") from error


def _read_contents(path: Path) -> Contents:
    way_out = f"delete {path} and it is written anew, or choose another data.feature_dir"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        digest, found = manifest.pop("digest"), manifest.pop("format")
        if digest != _digest(manifest):
            raise ValueError("its digest is wrong")
    except FileNotFoundError:
        raise ValueError(f"{path} has no {MANIFEST} that says what its features are of; {way_out}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}); {way_out}") from error
    except OSError as error:
        raise ValueError(f"cannot read {path / MANIFEST}: {error}; choose another data.feature_dir") from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, this version reads {FORMAT}; {way_out}")
    contents = Contents(**manifest)
    return replace(contents, layers=tuple(contents.layers), bounds=tuple(contents.bounds))


def write_contents(path: Path, contents: Contents) -> None:
    """Write the manifest of the folder `path`.

    Raises:
        OSError: If it cannot be written.
    """
    manifest = asdict(contents)
    text = json.dumps({"format": FORMAT, **manifest, "digest": _digest(manifest)}, indent=2) + "\n"
    with _writing(path):
        write_atomically(path / MANIFEST, lambda new: new.write_text(text))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say how a run gets its features all the same where the folder `path` cannot be written to."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write to {path}: {error}; make room, and the same command goes on from the files that are there, "
            "or choose another data.feature_dir"
        ) from error


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
