"""Raw results of a comparison: a line for each batch of prompts and temperature, so that a killed run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from decode.costs import VerifyCosts
from decode.counting import Counts
from decode.measure import Answer, RowDifference
from decode.results import Stats


class Key(NamedTuple):
    """What one line is about."""

    prompts: str
    """Prompt set."""
    number: int
    """Of the batch in its set."""
    temperature: float
    rows: int
    """Of a full batch."""


class ComparisonLog:
    """A JSONL file: a line of settings, then one for each key with every method's answer."""

    def __init__(self, path: Path) -> None:
        """Take the file's path; `open` begins it."""
        self._path = path
        self._costs: VerifyCosts | None = None
        self.answers: dict[Key, dict[str, Answer]] = {}
        """By method, for every key that was measured."""

    def open(self, settings: Mapping[str, Any], measure_costs: Callable[[], VerifyCosts] | None = None) -> None:
        """Read the file, or begin it.

        Args:
            settings: All that the answers depend on, as JSON has it.
            measure_costs: Measures what passes cost, if a method asks for it; called if the file begins here: methods
                that go on must be what they were.

        Raises:
            ValueError: If the file is of other settings, or no such file.
        """
        path = self._path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a kill or a full disk may have torn the last line
        if not whole:
            self._costs = None if measure_costs is None else measure_costs()
            written = None if self._costs is None else self._costs.write()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings, "costs": written}) + "\n", encoding="utf-8")
            return
        try:
            first, *others = map(json.loads, whole.splitlines())
            found = dict(first["settings"])
            self._costs = None if first["costs"] is None else VerifyCosts.read(first["costs"])
            self.answers = dict(map(_read, others))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # of JSON and UTF-8 too
            raise ValueError(f"{path} holds no comparison ({error!r}); give another --out, or delete it") from error
        changed = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
        if changed:
            lines = [f"{name} was {found.get(name)} and is {settings.get(name)}" for name in changed]
            raise ValueError(f"{path} was written by another command: {'; '.join(lines)}; give another --out")
        if whole != content:
            os.truncate(path, len(whole))

    def costs(self) -> VerifyCosts:
        """Return what passes cost when the file was begun."""
        assert self._costs is not None
        return self._costs

    def append(self, key: Key, answers: dict[str, Answer]) -> None:
        """Add the answers of one batch, at once."""
        self.answers[key] = answers
        line = json.dumps({**key._asdict(), "answers": {name: asdict(answer) for name, answer in answers.items()}})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _read(line: Mapping[str, Any]) -> tuple[Key, dict[str, Answer]]:
    answers = {}
    for name, fields in line["answers"].items():
        stats = [Stats(**row | {"bursts": [tuple(burst) for burst in row["bursts"]]}) for row in fields["by_row"]]
        differences = [RowDifference(**difference) for difference in fields["differences"]]
        counts = None if fields["counts"] is None else Counts(**fields["counts"])
        answers[name] = Answer(**(fields | {"by_row": stats, "differences": differences, "counts": counts}))
    return Key(line["prompts"], line["number"], line["temperature"], line["rows"]), answers
