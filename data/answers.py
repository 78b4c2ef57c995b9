"""Answers to prompts on disk, and beside them how they were made: what must survive a kill at any moment.

`out` holds one JSON row a line and only grows, by whole batches that are on disk before the next one starts; where
several processes or threads answer, the finished file is put in order once. `<out>.meta.json` is replaced atomically.
Knows nothing of models.
"""

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from heads.files import write_atomically


class AnswerFile:
    """The output of one distillation. Locked against other writers until it is closed."""

    finish_reasons: dict[str, str]
    """By the id of the prompt, in the order of the file."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and read which prompts have their answer.

        Raises:
            ValueError: If it cannot be written, another run holds it, or a line is no answer.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path}: another run is writing to it; wait for it, or choose another output") from error
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}); choose another output") from error
        self._file.seek(0)
        self.finish_reasons, self._complete = _read(path, self._file)

    def drop_torn_line(self) -> None:
        """Cut off what follows the last complete line; a run killed while it wrote leaves it."""
        self._file.truncate(self._complete)

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows; when this returns they are on disk."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        with _uninterrupted():
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._complete += len(lines)
            self.finish_reasons.update((str(row["id"]), str(row["finish_reason"])) for row in rows)

    def take_over(self, parts: Sequence[Path]) -> None:
        """Append what the parts hold and this file does not, then delete them; a kill loses no answer."""
        self.drop_torn_line()
        for path in parts:
            with closing(AnswerFile(path)) as part, path.open("rb") as lines:
                rows = [json.loads(line) for _, line in zip(part.finish_reasons, lines, strict=False)]
                self.append([row for row in rows if str(row["id"]) not in self.finish_reasons])
                path.unlink()

    def arrange(self, names: Sequence[str]) -> None:
        """Put the rows into the order of these ids, others last; at any moment the old or the new file is there."""
        places = {name: place for place, name in enumerate(names)}
        self._file.seek(0)
        rows, start = [], 0
        for name, line in zip(self.finish_reasons, self._file, strict=True):
            rows.append((places.get(name, len(places)), start, len(line), name))
            start += len(line)
        if rows == sorted(rows):
            return

        def write(new: Path) -> None:
            file = new.open("a+b")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # stays locked under its final name
            for _, start, length, _ in sorted(rows):
                self._file.seek(start)
                file.write(self._file.read(length))
            file.flush()
            self._file.close()
            self._file = file

        with _uninterrupted():
            write_atomically(self.path, write)
            self.finish_reasons = {name: self.finish_reasons[name] for *_, name in sorted(rows)}

    def close(self) -> None:
        """Close the file, which frees the lock."""
        self._file.close()


def read_answers(path: Path) -> dict[str, str]:
    """Return how the answers of a file ended, by the ids of their prompts, without locking it.

    Raises:
        ValueError: If a line is no answer.
    """
    with path.open("rb") as lines:
        return _read(path, lines)[0]


def _read(path: Path, lines: Iterable[bytes]) -> tuple[dict[str, str], int]:
    """Return the finish reasons and how many bytes the complete lines have."""
    reasons: dict[str, str] = {}
    complete = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        complete += len(line)
        try:
            row = json.loads(line)
            name, reason = str(row["id"]), str(row["finish_reason"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: not an answer ({type(error).__name__}: {error}); delete the line and its "
                "prompt is answered again, or choose another output"
            ) from error
        if name in reasons:
            raise ValueError(f"{path}:{number}: second answer to {name!r}; delete one of them")
        reasons[name] = reason
    return reasons, complete


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block is left."""
    if threading.current_thread() is not threading.main_thread():  # others are never interrupted
        yield
        return
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [(each, signal.signal(each, lambda number, _: received.append(number))) for each in signals]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
        for number in received:
            signal.raise_signal(number)


def meta_path(out: Path) -> Path:
    """Return where the provenance of `out` is."""
    return out.with_name(out.name + ".meta.json")


def load_meta(answers: AnswerFile, settings: Mapping[str, object], parts: Sequence[Path] = ()) -> dict[str, Any] | None:
    """Return the provenance of the answers there are, also in `parts`, or None if there are none yet.

    A setting that the provenance does not know was None.

    Raises:
        ValueError: If there are answers made with other settings than these, or by unknown ones.
    """
    if not answers.finish_reasons and not parts:
        return None
    path = meta_path(answers.path)
    files = ", ".join(map(str, [answers.path, *parts]))
    way_out = f"choose another output, or delete {files} and {path} to start over"
    if not path.exists():
        raise ValueError(f"{answers.path} has answers but {path} does not say how they were made; {way_out}")
    try:
        meta: dict[str, Any] = json.loads(path.read_bytes())
        then = dict(meta["settings"])
        pairs = [(key, then.get(key), now) for key, now in settings.items()]
        changed = [f"{key} was {was!r}, is {now!r}" for key, was, now in pairs if was != now]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {way_out}") from error
    if changed:
        raise ValueError(f"{answers.path} was begun with other settings: {'; '.join(changed)}; {way_out}")
    return meta


def save_meta(out: Path, meta: Mapping[str, object]) -> None:
    """Write the provenance of `out`; at any moment the old or the new one is there, whole."""
    text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
    write_atomically(meta_path(out), lambda new: new.write_text(text, encoding="utf-8"))
