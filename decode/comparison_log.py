"""Raw results of a comparison: a line for each prompt and temperature, so that a killed run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from decode.counting import Counts
from decode.measure import Answer
from decode.results import Stats


class Key(NamedTuple):
    """What one line is about."""

    prompts: str
    """Prompt set."""
    number: int
    """Of the prompt in its set."""
    temperature: float


class ComparisonLog:
    """A JSONL file: a line of settings, then one for each key with every method's answer."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the file, or begin it.

        Args:
            path: Where it is or will be.
            settings: All that the answers depend on, as JSON has it.

        Raises:
            ValueError: If the file is of other settings, or no such file.
        """
        self._path = path
        self.answers: dict[Key, dict[str, Answer]] = {}
        """By method, for every key that was measured."""
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a kill or a full disk may have torn the last line
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
            return
        try:
            first, *others = map(json.loads, whole.splitlines())
            written = dict(first["settings"])
            self.answers = dict(map(_read, others))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # of JSON and UTF-8 too
            raise ValueError(f"{path} holds no comparison ({error!r}); give another --out, or delete it") from error
        changed = [name for name in {**written, **settings} if written.get(name) != settings.get(name)]
        if changed:
            lines = [f"{name} was {written.get(name)} and is {settings.get(name)}" for name in changed]
            raise ValueError(f"{path} was written by another command: {'; '.join(lines)}; give another --out")
        if whole != content:
            os.truncate(path, len(whole))

    def append(self, key: Key, answers: dict[str, Answer]) -> None:
        """Add one prompt's answers, at once."""
        self.answers[key] = answers
        line = json.dumps({**key._asdict(), "answers": {name: asdict(answer) for name, answer in answers.items()}})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _read(line: Mapping[str, Any]) -> tuple[Key, dict[str, Answer]]:
    answers = {}
    for name, fields in line["answers"].items():
        stats = None if fields["stats"] is None else Stats(**fields["stats"])
        counts = None if fields["counts"] is None else Counts(**fields["counts"])
        answers[name] = Answer(**(fields | {"stats": stats, "counts": counts}))
    return Key(line["prompts"], line["number"], line["temperature"]), answers
