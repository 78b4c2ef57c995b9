"""A run at a tracker (wandb, TensorBoard or trackio), through accelerate; the main process only.

A tracker gets each logged step once and whole, `train/*`, `eval/*` and `drift/*` in one row that is numbered by the
optimiser step: wandb drops what comes for a step that is over, without an error. `tracker.json` says how far each
tracker has come, so that a continued run tells what is missing, from `metrics.jsonl`, and nothing twice.

A tracker that fails ends no training. What wandb cannot send it keeps and tries again by itself; where it cannot even
be asked to, or TensorBoard cannot write, the run says so and goes on. trackio gives its own warnings.
"""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from heads.files import write_atomically
from train.checkpoints import Progress, writing_run
from train.config import ConfigError, RunConfig
from train.config_file import flat
from train.samples import LEGEND, STYLE, Sample

TOLD = "tracker.json"
PROJECT = "gorgon"
FLUSH = 0.05
"""Seconds between writes of wandb's own file, 15 by default: a killed run loses what was not written."""
COLUMNS: tuple[str | int, ...] = ("prompt set", "prompt", f"text ({LEGEND})", "tokens per step")


class Tracking:
    """One run at its tracker, from `start` to `finish`."""

    def __init__(self, accelerator: Accelerator, config: RunConfig, tracker: str) -> None:
        """Read how far `tracker` has come with this run."""
        self._accelerator, self._config, self._tracker = accelerator, config, tracker
        self._path = config.run.folder / TOLD
        self._all: dict[str, dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._told = self._all.setdefault(tracker, {"id": uuid.uuid4().hex[:12], "step": -1})
        self._step = -1
        self._row: dict[str, Any] = {}

    def start(self, facts: Mapping[str, object], lines: Sequence[Mapping[str, float]]) -> None:
        """Open the tracker, give it the config and `facts`, and tell what it lacks of `lines`, the metrics so far.

        Raises:
            ConfigError: If it cannot be opened.
        """
        name, config = self._tracker, self._config
        values = {**flat(config), **facts}
        if name == "tensorboard":  # which takes only numbers, booleans and text
            values = {
                key: value if isinstance(value, int | float | str) else str(value) for key, value in values.items()
            }
        options: dict[str, dict[str, Any]] = {
            "wandb": self._wandb_options() if name == "wandb" else {},
            "trackio": {"name": config.run.name, "resume": "allow" if self._told["step"] >= 0 else "never"},
        }
        project = os.environ.get("WANDB_PROJECT", PROJECT) if name == "wandb" else PROJECT
        try:
            self._accelerator.init_trackers(project, config=values, init_kwargs=options)
        except failures(name) as error:
            way_out = ", wandb login, WANDB_MODE=offline" if name == "wandb" else ""
            raise ConfigError(f"run.tracker={name}: {error}; mend that{way_out}, or --run.tracker=null") from error
        if name == "wandb":
            self._told["id"] = self._run.id  # in a sweep that is the trial's
            if self._run.resumed:  # the server knows better: what was on its way when the run was killed is lost
                self._told["step"] = self._run.starting_step - 1
        self._write()
        for step, entries in groupby(lines, key=lambda line: int(line["step"])):
            self.tell()
            for entry in entries:
                self.add(step, {key: value for key, value in entry.items() if key != "step"})

    def _wandb_options(self) -> dict[str, Any]:
        import wandb

        return {
            "name": self._config.run.name,
            "dir": self._config.run.folder,
            "id": self._told["id"],
            "resume": "allow",
            "settings": wandb.Settings(x_transaction_log_flush_interval=FLUSH),
        }

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add `values` to the row of a step, which `tell` sends."""
        if step > self._told["step"]:
            self._step = step
            self._row |= values

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a table of texts, to wandb only: the others show no colours."""
        if self._tracker == "wandb" and step > self._told["step"] and self._accelerator.trackers:
            import wandb

            with self._surviving():
                rows = [
                    [sample.prompt_set, sample.prompt, wandb.Html(STYLE + sample.to_html()), sample.tokens_per_step]
                    for sample in samples
                ]
                self.add(step, {"eval/samples": wandb.Table(columns=list(COLUMNS), data=rows)})

    def tell(self) -> None:
        """Send the row that is gathered: nothing more will come for its step."""
        if self._row and self._accelerator.trackers:
            with self._surviving():
                # wandb would hold the row back until the next step, and lose it in a kill
                self._accelerator.log(self._row, step=self._step, log_kwargs={"wandb": {"commit": True}})
                self._told["step"] = self._step
                self._write()
        self._row = {}

    def keep_heads(self, progress: Progress, lines: Sequence[Mapping[str, float]]) -> None:
        """Keep `best/` and `last/` as versions of an artifact of wandb, with what was measured at their steps."""
        if self._tracker != "wandb" or not self._accelerator.trackers:
            return
        import wandb

        for name, step in (("best", progress.best_step), ("last", progress.step)):
            folder = self._config.run.folder / name
            if folder.is_dir():
                measured = {
                    key: value
                    for line in lines
                    for key, value in line.items()
                    if line["step"] == step and key.startswith(("eval/", "drift/"))
                }
                with self._surviving():
                    artifact = wandb.Artifact(f"head-{self._run.id}", "model", metadata={"step": step, **measured})
                    artifact.add_dir(str(folder))
                    self._run.log_artifact(artifact, aliases=[name])

    def finish(self, *, failed: bool) -> None:
        """Close the tracker; wandb first sends what it has kept."""
        if self._accelerator.trackers:
            with self._surviving():
                if self._tracker == "wandb":
                    self._run.finish(exit_code=int(failed))
                else:
                    self._accelerator.get_tracker(self._tracker).finish()
        self._accelerator.trackers.clear()  # else accelerate would do it again

    @property
    def _run(self) -> Any:
        return self._accelerator.get_tracker("wandb", unwrap=True)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Let the training go on without a tracker that fails."""
        try:
            yield
        except failures(self._tracker) as error:
            self._accelerator.trackers.clear()
            tqdm.write(
                f"warning: {self._tracker} failed: {error!r}; the run goes on without it. metrics.jsonl has all, "
                "and if the run is stopped and continued, the tracker is told what it lacks"
            )

    def _write(self) -> None:
        with writing_run():
            write_atomically(self._path, lambda new: new.write_text(json.dumps(self._all)))


def failures(tracker: str) -> tuple[type[Exception], ...]:
    """Return what a tracker raises where it cannot be reached or cannot write."""
    if tracker == "wandb":
        from wandb.errors import Error

        return OSError, Error
    return (OSError,)


def check_tracker(name: str | None) -> None:
    """Raise `ConfigError` unless the tracker's package is installed: accelerate would leave it out without a word."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ConfigError(f"run.tracker is {name}, which is not installed; pip install {name}, or --run.tracker=null")
