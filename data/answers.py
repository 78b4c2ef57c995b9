"""Answers to prompts on disk, and beside them how they were made: what must survive a kill at any moment.

`out` holds one JSON row a line and only grows, by whole batches that are on disk before the next one starts.
`<out>.meta.json` is replaced atomically. Knows nothing of models.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.files import write_atomically


class AnswerFile:
    """The output of one distillation. Locked against other writers until it is closed."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and read which prompts have their answer.

        Raises:
            ValueError: If it cannot be written, another run holds it, or a line is no answer.
        """
        self.path = path
        self.finish_reasons: dict[str, str] = {}
        """By the id of the prompt."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path}: another run is writing to it; wait for it, or choose another output") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}); choose another output") from error
        self._complete = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                self._read(number, line)
                self._complete += len(line)

    def _read(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            name, reason = str(row["id"]), str(row["finish_reason"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path}:{number}: not an answer ({type(error).__name__}: {error}); delete the line and its "
                "prompt is answered again, or choose another output"
            ) from error
        if name in self.finish_reasons:
            raise ValueError(f"{self.path}:{number}: second answer to {name!r}; delete one of them")
        self.finish_reasons[name] = reason

    def drop_torn_line(self) -> None:
        """Cut off what follows the last complete line; a run killed while it wrote leaves it."""
        self._file.truncate(self._complete)

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows; when this returns they are on disk."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.finish_reasons.update((str(row["id"]), str(row["finish_reason"])) for row in rows)

    def close(self) -> None:
        """Close the file, which frees the lock."""
        self._file.close()


def meta_path(out: Path) -> Path:
    """Return where the provenance of `out` is."""
    return out.with_name(out.name + ".meta.json")


def load_meta(answers: AnswerFile, settings: Mapping[str, object]) -> dict[str, Any] | None:
    """Return the provenance of the answers there are, or None if there are none yet.

    Raises:
        ValueError: If there are answers made with other settings than these, or by unknown ones.
    """
    if not answers.finish_reasons:
        return None
    path = meta_path(answers.path)
    way_out = f"choose another output, or delete {answers.path} and {path} to start over"
    if not path.exists():
        raise ValueError(f"{answers.path} has answers but {path} does not say how they were made; {way_out}")
    try:
        meta: dict[str, Any] = json.loads(path.read_bytes())
        then = meta["settings"]
        changed = [f"{key} was {then[key]!r}, is {now!r}" for key, now in settings.items() if then[key] != now]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {way_out}") from error
    if changed:
        raise ValueError(f"{answers.path} was begun with other settings: {'; '.join(changed)}; {way_out}")
    return meta


def save_meta(out: Path, meta: Mapping[str, object]) -> None:
    """Write the provenance of `out`; at any moment the old or the new one is there, whole."""
    text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
    write_atomically(meta_path(out), lambda new: new.write_text(text, encoding="utf-8"))
