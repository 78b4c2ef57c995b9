"""The target's states and features from a folder that is filled once, before training.

    wanted = contents_for(...)                 see data.feature_plan
    prepare_folder(..., wanted)                one process: what it takes, and whether it can be done
    source = StoredFeatures(..., wanted)       every process, after that
    source.fill(process, processes)            every process its share; goes on where a kill left off
    source.batch([3, 1, 4])                    once all have come so far

A folder serves every head that reads the same layers or fewer. In the target's own number format training on it gives
the bits that computing the states while training gives; in bfloat16 it takes half the room (of float32) and does not.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.conversations import Encoded
from data.feature_files import HIDDEN, MISSING, Contents, layer_name, open_folder
from data.features import Features, Most, States, bytes_per_token, compute_states, size_text
from decode import Target

logger = logging.getLogger(__name__)


class StoredFeatures(Features):
    """Features of a prepared folder, read through memory maps: what was not used lately costs no memory.

    Args:
        target: The model the folder was prepared for.
        samples: The conversations it was prepared for.
        path: The folder.
        wanted: `contents_for` these; more layers than these may be stored.

    Raises:
        ValueError: If the folder is not prepared, or for something else.
    """

    def __init__(self, target: Target, samples: Sequence[Encoded], path: str | Path, wanted: Contents) -> None:
        super().__init__(target, samples, wanted.layers)
        self.folder = open_folder(Path(path), wanted)
        self._open: dict[int, Any] = {}
        self._passes = 0  # of the target, to fill the folder
        lengths = [len(sample.token_ids) for sample in samples]
        self._ends: list[int] = []  # row in its file at which each sample ends
        for start, end in pairwise(self.folder.contents.bounds):
            self._ends += accumulate(lengths[start:end])

    def fill(self, process: int = 0, processes: int = 1, *, hide: bool = False, most: Most | None = None) -> None:
        """Check this process's share of the files, all their bytes, and compute what is missing or damaged.

        Where nothing is, the folder need not be writable.

        Args:
            process: Which share, from 0.
            processes: How many shares there are.
            hide: Show no progress bar.
            most: Returns the largest numbers of all processes. Only for a target whose layers are spread over them:
                all make as many passes as the one that lacks most, the last of them for nothing.

        Raises:
            OSError: If a file cannot be written.
        """
        bounds = self.folder.contents.bounds
        mine = range(process, self.folder.contents.num_files, processes)
        total = sum(bounds[number + 1] - bounds[number] for number in mine)
        passes = self._passes
        if most is not None:
            faulty = [number for number in mine if self.folder.fault(number, thorough=True) is not None]
            passes += most([sum(bounds[number + 1] - bounds[number] for number in faulty)])[0]
        with tqdm(total=total, desc="features", unit=" conversations", disable=hide) as bar:
            for number in mine:
                if self.folder.fault(number, thorough=True) is not None and self._mend(number, bar):
                    continue
                bar.update(bounds[number + 1] - bounds[number])
        for _ in range(passes - self._passes):  # with the others, who are not done
            compute_states(self._target, self._samples[0], self.folder.contents.layers)

    def _mend(self, number: int, bar: tqdm[Any]) -> bool:
        """Compute a file and return True, or False if another process did it while this one waited for the lock."""
        with self.folder.lock(number):
            fault = self.folder.fault(number, thorough=True)
            if fault is None:
                return False
            if fault != MISSING:
                logger.warning("%s %s; it is computed again", self.folder.file(number), fault)
            self.folder.write(number, self._compute(number, bar))
        return True

    def _compute(self, number: int, bar: tqdm[Any]) -> dict[str, Tensor]:
        """Return the tensors of one file; every conversation passes through the target alone."""
        contents = self.folder.contents
        start, end = contents.bounds[number : number + 2]
        tensors: dict[str, Tensor] = {}
        for index in range(start, end):
            states = compute_states(self._target, self._samples[index], contents.layers).cpu()
            self._passes += 1
            layers = () if states.features is None else states.features.chunk(len(contents.layers), dim=-1)
            for name, part in zip(contents.names, (states.hidden, *layers), strict=True):
                if index == start:
                    tensors[name] = part.new_empty(self._ends[end - 1], part.shape[-1], dtype=contents.torch_dtype)
                tensors[name][self._ends[index] - len(part) : self._ends[index]] = part
            bar.update()
        return tensors

    def states(self, index: int) -> States:
        """Return the states of one sample, on the CPU; not to be written to."""
        number = bisect_right(self.folder.contents.bounds, index) - 1
        file = self._open.get(number)
        if file is None:
            file = self._open[number] = self.folder.open(number)
        end = self._ends[index]
        start = end - len(self._samples[index].token_ids)
        layers = [file.get_slice(layer_name(layer))[start:end] for layer in self._feature_layers]
        return States(file.get_slice(HIDDEN)[start:end], torch.cat(layers, dim=-1) if layers else None)

    def describe(self) -> str:
        """Return how much there is and where it is kept, for people."""
        contents = self.folder.contents
        tokens = self.num_tokens(range(len(self._samples)))
        total = tokens * bytes_per_token(self._target.hidden_size, contents.layers, contents.torch_dtype)
        layers = f" and outputs of layers {list(self._feature_layers)}" if self._feature_layers else ""
        return (
            f"target states{layers}: read from {self.folder.path}, {size_text(total)} in {contents.num_files} files, "
            f"{contents.dtype}"
        )
