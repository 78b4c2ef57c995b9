"""The folder of a run: made, checked against the config, and locked."""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator

from heads.files import write_atomically
from train.checkpoints import Checkpoints
from train.config import ConfigError, RunConfig
from train.config_file import differences, flat, read_flat, to_yaml
from train.model_folder import recover

CONFIG = "run.yaml"


def open_folder(
    accelerator: Accelerator, config: RunConfig, checkpoints: Checkpoints, *, dry: bool
) -> AbstractContextManager[object]:
    """Make the run's folder, or check that what is in it can be continued; return the lock that keeps others out.

    With `dry` nothing is made or locked.
    """
    folder = config.run.folder
    probe = folder / f".writable-{os.getpid()}"
    if not dry:
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    if checkpoints.newest() is not None:
        changed = differences(read_flat(folder / CONFIG), flat(config))
        if changed:
            lines = "".join(f"\n  {line}" for line in changed)
            raise ConfigError(
                f"{folder} holds a run with another config:{lines}\nStart another run with --run.name, delete the "
                "folder, or undo the change"
            )
    if dry:
        return nullcontext()
    lock = (folder / ".lock").open("w")
    if accelerator.is_main_process:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training {folder}; wait for it or stop it (SIGTERM to the trainer itself, not to "
                "accelerate launch, saves first), or choose another --run.name"
            ) from None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoints.remove_incomplete()
        for name in ("best", "last"):
            recover(config.run.folder / name)
        write_atomically(folder / CONFIG, lambda new: new.write_text(to_yaml(config)))
    accelerator.wait_for_everyone()
    return lock
