"""What a run shows and logs: the progress bar, `metrics.jsonl`, `samples.html` and a tracker (`train.tracking`).

Only the main process writes. `metrics.jsonl` has one JSON object a line, `{"step": n, "train/loss": ...}` for each
logged optimiser step and `{"step": n, "eval/tokens_per_step": ...}` for each evaluation. `curves.png` beside it is
drawn from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from heads.files import write_atomically
from train.checkpoints import Progress, writing_run
from train.config import RunConfig
from train.picture import draw_curves
from train.samples import SAMPLES, Sample, write_samples
from train.tracking import Tracking

CURVES = "curves.png"


class Journal:
    """Owns the bar, the metrics file and the tracker of one run while it is `opened`."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self._accelerator = accelerator
        self._path = path
        self._bar: tqdm[Any] | None = None
        self._tracking: Tracking | None = None

    @contextmanager
    def opened(
        self, config: RunConfig, progress: Progress, total_steps: int, facts: Mapping[str, int]
    ) -> Iterator[None]:
        """Cut the metrics back to `progress`, start the tracker with config and `facts`, and show the bar."""
        if self._accelerator.is_main_process:
            with writing_run():
                cut_metrics(self._path, progress)
            if config.run.tracker is not None:
                self._tracking = Tracking(self._accelerator, config, config.run.tracker)
                self._tracking.start({**facts, "git_revision": git_revision()}, self._lines())
        hide = not self._accelerator.is_main_process
        self._bar = tqdm(total=total_steps, initial=progress.step, desc="train", unit="step", disable=hide)
        failed = True
        try:
            yield
            if self._tracking is not None:
                self._tracking.keep_heads(progress, self._lines())
            failed = False
        finally:
            self._bar.close()
            if self._tracking is not None:
                self._tracking.finish(failed=failed)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._accelerator.is_main_process:
            tqdm.write(text)

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """Move the bar by one optimiser step."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:.0f} tok/s", refresh=False)
            self._bar.update()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at an optimiser step."""
        if self._accelerator.is_main_process:
            with writing_run(), self._path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        if self._tracking is not None:
            self._tracking.add(step, values)

    def tell(self) -> None:
        """Let the tracker have what was logged since the last call: it is all of its step."""
        if self._tracking is not None:
            self._tracking.tell()

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Show texts of an evaluation: the first in the log, all in `samples.html` and in the tracker."""
        if self._accelerator.is_main_process and samples:
            self.say(samples[0].to_line(colour=sys.stdout.isatty()))
            self._make(SAMPLES, lambda path: write_samples(path, step, samples))
            if self._tracking is not None:
                self._tracking.show(step, samples)

    def draw(self) -> None:
        """Draw `curves.png`."""
        if self._accelerator.is_main_process and self._path.exists():
            self._make(CURVES, lambda path: draw_curves(self._path, path))

    def _make(self, name: str, make: Callable[[Path], None]) -> None:
        """Make a file to look at. A run of hours does not end because that cannot be done, but says so."""
        try:
            make(self._path.with_name(name))
        except OSError as error:
            self.say(f"could not make {self._path.with_name(name)}: {error}; the numbers are in {self._path}")

    def _lines(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []


def cut_metrics(path: Path, progress: Progress) -> None:
    """Drop the lines of `path` that a run continued from `progress` will write again, and a line torn by a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        is_eval = any(key.startswith("eval/") for key in entry)
        if entry["step"] <= (progress.evaluated_step if is_eval else progress.step):
            kept.append(line)
    write_atomically(path, lambda new: new.write_text("".join(kept)))


def git_revision() -> str | None:
    """Return the commit of this code, with `-dirty` after local changes, or None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
