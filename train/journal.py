"""What a run shows and logs: the progress bar, `metrics.jsonl` and, through accelerate, wandb or TensorBoard.

Only the main process writes. `metrics.jsonl` has one JSON object a line, `{"step": n, "train/loss": ...}` for each
logged optimiser step and `{"step": n, "eval/tokens_per_step": ...}` for each evaluation. `curves.png` beside it is
drawn from it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from heads.files import write_atomically
from train.checkpoints import Progress, writing_run
from train.config import ConfigError, RunConfig
from train.config_file import flat
from train.picture import draw_curves

CURVES = "curves.png"


class Journal:
    """Owns the bar, the metrics file and the trackers of one run, from `open` to `close`."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self._accelerator = accelerator
        self._path = path
        self._bar: tqdm[Any] | None = None

    def open(self, config: RunConfig, progress: Progress, total_steps: int, facts: Mapping[str, int]) -> None:
        """Cut the metrics back to `progress`, start the trackers with config and `facts`, and show the bar."""
        if self._accelerator.is_main_process:
            with writing_run():
                cut_metrics(self._path, progress)
        if config.run.tracker is not None:
            settings = {
                "name": config.run.name,
                "dir": str(config.run.folder),
                "id": progress.tracker_id,
                "resume": "allow",
            }
            # TensorBoard takes only numbers, booleans and text
            values = {
                key: value if isinstance(value, int | float | str) else str(value)
                for key, value in {**flat(config), **facts, "git_revision": git_revision()}.items()
            }
            options = {"wandb": settings} if config.run.tracker == "wandb" else {}
            self._accelerator.init_trackers("gorgon", config=values, init_kwargs=options)
        hide = not self._accelerator.is_main_process
        self._bar = tqdm(total=total_steps, initial=progress.step, desc="train", unit="step", disable=hide)

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
        self._accelerator.log(dict(values), step=step)

    def draw(self) -> None:
        """Draw `curves.png`. A run of hours does not end because that cannot be done, but says so."""
        if self._accelerator.is_main_process and self._path.exists():
            try:
                draw_curves(self._path, self._path.with_name(CURVES))
            except OSError as error:
                self.say(f"could not draw {self._path.with_name(CURVES)}: {error}; the numbers are in {self._path}")

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.close()


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


def check_tracker(name: str | None) -> None:
    """Raise `ConfigError` unless the tracker's package is installed: accelerate would leave it out without a word."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ConfigError(f"run.tracker is {name}, which is not installed; pip install {name}, or --run.tracker=null")


def git_revision() -> str | None:
    """Return the commit of this code, with `-dirty` after local changes, or None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
