"""A trained model as a plain Hugging Face folder, replaced in one piece."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from decode import Target
from heads.fingerprint import describe_target
from train.checkpoints import sync_folder

NOTES = "gorgon.json"


def recover(path: Path) -> None:
    """Bring back the folder `path` after a kill between the two renames of `replace_folder`."""
    new, old = _neighbours(path)
    if not path.exists() and old.exists():  # only then is what stands beside it known to be whole
        (new if new.exists() else old).rename(path)


def _neighbours(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".new"), path.with_name(path.name + ".old")


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `path` anew, replacing one that is there.

    The folder is written beside its place, synced and renamed: a kill leaves the old one, the new one, or both beside
    their place, where `recover` finds them.

    Args:
        path: The folder.
        write: Fills the folder that it is given.
    """
    recover(path)
    new, old = _neighbours(path)
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)
    new.mkdir()
    write(new)
    sync_folder(new)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def save_model(model: PreTrainedModel, target: Target, path: Path, notes: Mapping[str, Any]) -> None:
    """Write `model`, the target's tokenizer and `gorgon.json` to the folder `path`; see `replace_folder`.

    Args:
        model: The model.
        target: Whose tokenizer it shares.
        path: The folder.
        notes: How it was trained and measured.
    """

    def write(new: Path) -> None:
        with no_progress_bars():
            model.save_pretrained(new)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(new)
        record = {"target": describe_target(target), **notes}
        (new / NOTES).write_text(json.dumps(record, indent=2) + "\n")
        share_weights(new, like=new / NOTES)

    replace_folder(path, write)


def share_weights(folder: Path, *, like: Path) -> None:
    """Let who may read the file `like` read the weights, which safetensors makes for their owner alone."""
    for weights in folder.glob("*.safetensors"):
        weights.chmod(stat.S_IMODE(like.stat().st_mode))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for each file into the training's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
