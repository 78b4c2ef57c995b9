"""What a folder of features must hold, what filling it takes, and whether the disk allows it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from data.conversations import Encoded
from data.feature_files import Contents, FeatureFolder, cut, is_taken, open_folder, write_contents
from data.features import bytes_per_token, compute_states, size_text
from decode import Target

StoredDtype = Literal["target", "bfloat16"]
"""Number format on disk."""
PROBES = 4
"""Conversations that are run through the target, after one that warms up, to tell how long it will take."""


@dataclass(frozen=True)
class Estimate:
    """What filling a folder takes, without the files that are there."""

    folder: FeatureFolder
    missing: int
    """Files to write."""
    needed: int
    """Bytes of their tensors, exactly; headers add less than a thousandth."""
    margin: int
    """Bytes that must stay free beyond that: a file is written beside its place, and others write there too."""
    free: int
    """Bytes free on the folder's file system."""
    largest: int
    """Bytes of the largest file, all of which is in memory before it is written."""
    seconds: float | None
    """By the speed of a few conversations; None where one process alone cannot run the target."""

    def describe(self) -> str:
        """Return it in one line, for people."""
        contents = self.folder.contents
        layers = f" and outputs of layers {list(contents.layers)}" if contents.layers else ""
        there = contents.num_files - self.missing
        time_ = "" if self.seconds is None else f"about {tqdm.format_interval(self.seconds)}, "
        return (
            f"target states{layers} go to {self.folder.path} in {contents.dtype}: {size_text(self.needed)} in "
            f"{self.missing} files{f' ({there} are there)' if there else ''}, {size_text(self.free)} free; "
            f"{time_}{size_text(self.largest)} of memory beside the target"
        )

    def check(self) -> None:
        """Refuse what does not fit on the disk.

        Raises:
            ValueError: With the ways out.
        """
        if self.needed + self.margin > self.free:
            large = self.folder.contents.torch_dtype.itemsize > torch.bfloat16.itemsize
            round_off = "set data.feature_dtype=bfloat16 (half of float32), " if large else ""
            raise ValueError(
                f"{self.folder.path} is on a file system with {size_text(self.free)} free, but the features need "
                f"{size_text(self.needed)} and {size_text(self.margin)} to spare; lower data.limit or data.max_length, "
                f"{round_off}choose a data.feature_dir on another disk, or leave data.feature_dir out: the features "
                "are then computed while training"
            )


def contents_for(
    target: Target, samples: Sequence[Encoded], feature_layers: Sequence[int], *, inputs: str, dtype: StoredDtype
) -> Contents:
    """Return what a folder must hold to give the features of `samples`.

    Args:
        target: The model that computes them.
        samples: Encoded conversations.
        feature_layers: Decoder layers whose outputs are wanted beside the states.
        inputs: A hash of the target and of the tokens and masks of `samples`, in order.
        dtype: Number format on disk.
    """
    stored = target.dtype if dtype == "target" else torch.bfloat16
    size = bytes_per_token(target.hidden_size, feature_layers, stored)
    return Contents(
        target=target.name,
        fingerprint=target.fingerprint,
        target_dtype=target.precision,
        dtype=str(stored).removeprefix("torch."),
        layers=tuple(feature_layers),
        inputs=inputs,
        bounds=cut([len(sample.token_ids) * size for sample in samples]),
    )


def prepare_folder(
    target: Target,
    samples: Sequence[Encoded],
    path: str | Path,
    wanted: Contents,
    *,
    processes: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Make sure that the folder `path` can be filled with `wanted`, and print what that takes.

    Args:
        target: The model that computes the features.
        samples: Encoded conversations.
        path: Made if missing; may hold the same features, of these or more layers, complete or not. A complete one
            is not written to.
        wanted: `contents_for` these.
        processes: How many will fill it.
        say: Prints a line.

    Raises:
        ValueError: If it holds other features, or the disk is too small; no feature in it was changed. OSError: If it
            cannot be written to.
    """
    target.check_layers(wanted.layers)
    folder = FeatureFolder(Path(path), wanted)
    if is_taken(folder.path) and not open_folder(folder.path, wanted).missing():
        return  # a manifest, once there, and whole files do not change: no lock is needed
    with folder.lock(None):
        taken = is_taken(folder.path)
        if taken:
            folder = open_folder(folder.path, wanted)
        missing = folder.missing()
        if missing:
            estimate = estimate_folder(folder, target, samples, missing, processes)
            say(estimate.describe())
            estimate.check()
        if not taken:  # another trainer that starts meanwhile compares with it, though there is no file yet
            write_contents(folder.path, wanted)


def estimate_folder(
    folder: FeatureFolder, target: Target, samples: Sequence[Encoded], missing: Sequence[int], processes: int
) -> Estimate:
    """Return what computing the files `missing` in `processes` processes takes."""
    contents = folder.contents
    size = bytes_per_token(target.hidden_size, contents.layers, contents.torch_dtype)
    lengths = [len(sample.token_ids) for sample in samples]
    tokens = [sum(lengths[contents.bounds[number] : contents.bounds[number + 1]]) for number in missing]
    needed, largest = sum(tokens) * size, max(tokens) * size
    return Estimate(
        folder=folder,
        missing=len(missing),
        needed=needed,
        margin=largest + needed // 20,
        free=shutil.disk_usage(folder.path).free,
        largest=largest,
        seconds=None if target.sharded else sum(tokens) / _speed(target, samples, contents.layers) / processes,
    )


def _speed(target: Target, samples: Sequence[Encoded], layers: Sequence[int]) -> float:
    """Return how many tokens of a few conversations the target reads in a second."""
    probes = samples[:: max(1, len(samples) // PROBES)][:PROBES]
    compute_states(target, probes[0], layers)  # the first pass allocates
    start = time.perf_counter()
    for sample in probes:
        compute_states(target, sample, layers)
    return sum(len(sample.token_ids) for sample in probes) / (time.perf_counter() - start)
