"""What survives a kill: `<run>/checkpoints/step_XXXXXX/`, complete or not there at all.

A checkpoint is accelerate's state of head, optimiser, schedule and random numbers, and `state.json` with the progress.
It is written to a temporary folder, synced to disk and renamed; the frozen target is not in it.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME, load, set_seed
from safetensors import SafetensorError

from heads.files import sync_entry, write_atomically
from train.config import naming
from train.distributed import check_layout

STATE = "state.json"
TEMPORARY = ".incomplete"
DAMAGED = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError)
"""What reading a damaged file can raise."""


@dataclass
class Progress:
    """How far a run is; all of it is needed to go on as if nothing had happened."""

    step: int = 0
    """Optimiser steps done."""
    evaluated_step: int = -1
    """Step of the last complete evaluation, -1 before the first."""
    best: float = 0.0
    """Highest eval/tokens_per_step so far, 0 before the first evaluation."""
    best_step: int = -1
    """Where that was."""
    inputs: str = ""
    """Hash of the target and the encoded data, which must not change under a run."""


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay on disk."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, if there is one."""
        found = self._complete()
        return found[-1] if found else None

    def remove_incomplete(self) -> None:
        """Delete what a kill left half-written. Main process only."""
        for path in self.folder.glob(f"*{TEMPORARY}"):
            shutil.rmtree(path)

    def save(self, accelerator: Accelerator, progress: Progress) -> None:
        """Write a checkpoint of `progress.step`, or only its progress if there is one. Every process calls this."""
        path = self.folder / f"step_{progress.step:06d}"
        if not path.exists():
            temporary = path.with_name(path.name + TEMPORARY)
            with writing_run():
                accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                with writing_run():
                    (temporary / STATE).write_text(json.dumps(asdict(progress)))
                    sync_folder(temporary)
                    temporary.rename(path)
                    sync_entry(self.folder)
                    self._prune()
        elif accelerator.is_main_process:
            with writing_run():
                write_atomically(path / STATE, lambda new: new.write_text(json.dumps(asdict(progress))))
        accelerator.wait_for_everyone()

    def read(self, path: Path) -> Progress:
        """Return the progress of the checkpoint at `path`."""
        with _reading(path):
            fields = json.loads((path / STATE).read_text())
            fields.pop("tracker_id", None)  # older runs kept it here
            return Progress(**fields)

    def load(self, accelerator: Accelerator, path: Path, seed: int) -> None:
        """Put head, optimiser, schedule and random numbers back as they were at the checkpoint at `path`.

        Of another number of processes than it was written by, those that are new draw their random numbers from
        `seed`, the step and their own number.
        """
        saved = len(list(path.glob(f"{RNG_STATE_NAME}_*.pkl")))
        check_layout(accelerator, path, saved)
        is_new = 0 < saved <= accelerator.process_index
        with _reading(path):
            # accelerate passes over random numbers that it cannot read, and the run would not go on as it was
            load(str(path / f"{RNG_STATE_NAME}_{0 if is_new else accelerator.process_index}.pkl"))
            accelerator.load_state(str(path))
        if is_new:
            set_seed(seed + self._step(path), device_specific=True)

    def _complete(self) -> list[Path]:
        paths = [path for path in self.folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
        return sorted(paths, key=self._step)

    @staticmethod
    def _step(path: Path) -> int:
        return int(path.name.removeprefix("step_"))

    def _prune(self) -> None:
        for path in self._complete()[: -self._keep]:
            # renamed first, so that a kill in between leaves no half-deleted checkpoint behind
            shutil.rmtree(path.rename(path.with_name(path.name + TEMPORARY)))


def writing_run() -> AbstractContextManager[None]:
    """Say what helps where a run's folder cannot be written to."""
    way_out = "make room there, and the same command goes on from the newest checkpoint"
    return naming("run.dir", way_out, SafetensorError, RuntimeError)


def _reading(path: Path) -> AbstractContextManager[None]:
    return naming(
        f"cannot continue from {path}", "if it is damaged, delete it, and the run goes on from an earlier one", *DAMAGED
    )


def sync_folder(folder: Path) -> None:
    """Wait until every file in `folder`, and the folder itself, is on disk."""
    for path in folder.rglob("*"):
        sync_entry(path)
    sync_entry(folder)
