"""Copies of draft models: what engines read of a model's folder, and nothing else that lies there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from heads.checkpoint import TUNED
from heads.files import write_atomically
from heads.formats.folder import CONFIG, writing
from heads.formats.target_files import TargetFiles

FILES = (
    *(CONFIG, "generation_config.json", "gorgon.json", "README.md", "LICENSE*", "NOTICE*"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""Beside the weights; `gorgon.json` is of `train/draft_model.py`. Others may be of training, or nobody's business."""
SHOWN = 8


def copy_model(model: TargetFiles, out: Path) -> list[str]:
    """Copy a model, and return the names of what is left behind; the config comes last, so that nobody loads a half.

    Plans of `decode.tune` and hidden files are left behind without a word.

    Args:
        model: The model.
        out: Folder; made if missing, and must be empty.

    Raises:
        ValueError: If it is not empty.
        OSError: If it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another folder, or empty this one")
    found = {file for pattern in FILES for file in model.folder.glob(pattern) if file.is_file()}
    files = {*found, *model.weight_files}
    others = {file for file in model.folder.iterdir() if not file.name.startswith(".") and file.name != TUNED}
    taken = {model.folder / file.relative_to(model.folder).parts[0] for file in files}
    with writing(out), _all_or_nothing(out):
        for file in sorted(files, key=lambda file: (file == model.folder / CONFIG, file)):
            place = out / file.relative_to(model.folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, lambda temporary, file=file: shutil.copyfile(file, temporary))  # type: ignore[misc]
    return [file.name + "/" * file.is_dir() for file in sorted(others - taken)]


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Delete what a failure leaves, which would be in the way of the next try."""
    try:
        yield
    except BaseException:
        shutil.rmtree(out)
        raise


def left_behind(names: Sequence[str]) -> list[str]:
    """Return what was not copied, in a sentence; nothing if all was."""
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"not copied, as no engine reads it of a model: {', '.join(names[:SHOWN])}{more}"]
