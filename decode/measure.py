"""Prompts decoded by several methods in turn, and what came of it: the ground of `decode.bench`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decode.compare import first_difference
from decode.counting import Counts
from decode.methods import Prompts, Run, as_batch
from decode.prompts import Prompt, read_prompts, to_token_ids, token_limits
from decode.results import Stats
from decode.sampling import Sampling
from decode.target import Target

ALL = "all"
"""Name of all prompt sets together."""


@dataclass(frozen=True)
class RowDifference:
    """Where the text of one row parts from plain decoding's."""

    row: int
    """Of the batch."""
    text: str
    """The place, the tokens and the gap."""
    near_tie: bool
    """Whether rounding excuses it."""


@dataclass(frozen=True)
class Answer:
    """A prompt, or a batch of them, decoded by one method."""

    seconds: float
    tokens: int
    """New ones of all rows."""
    by_row: list[Stats] = field(default_factory=list)
    """None for transformers' decoding."""
    differences: list[RowDifference] = field(default_factory=list)
    """From the texts of plain decoding."""
    counts: Counts | None = None
    """What the proposer did, if that was counted."""
    rows: int = 1

    @property
    def stats(self) -> Stats | None:
        """Counts of all rows together and times of the batch; None for transformers' decoding."""
        if not self.by_row:
            return None
        last = max(self.by_row, key=lambda stats: stats.seconds)
        return replace(Stats.total(self.by_row), seconds=last.seconds, parts=last.parts)

    @property
    def steps(self) -> int:
        """Passes of the target over the batch, the prefill not counted."""
        return max((stats.steps for stats in self.by_row), default=0)

    @property
    def unexcused(self) -> int:
        """How many texts differ without a near tie."""
        return sum(not difference.near_tie for difference in self.differences)

    @property
    def difference(self) -> str | None:
        """The first difference; None if there is none."""
        return self.differences[0].text if self.differences else None


@dataclass(frozen=True)
class Result:
    """One method on one prompt set at one temperature, with so many rows in a batch."""

    method: str
    prompts: str
    temperature: float
    rows: int
    answers: list[Answer]
    """One for each batch."""

    @property
    def differences(self) -> list[str]:
        """Texts that are not plain decoding's, with the place and the gap."""
        return [
            f"{self.prompts}[{number * self.rows + difference.row}] {difference.text}"
            for number, answer in enumerate(self.answers)
            for difference in answer.differences
        ]

    @property
    def unexcused(self) -> int:
        """How many of them are not near ties."""
        return sum(answer.unexcused for answer in self.answers)


def measure(
    target: Target, runs: Mapping[str, Run], prompts: Prompts, sampling: Sampling, *, turn: int
) -> dict[str, Answer]:
    """Decode a prompt or a batch with every method, one after the other, and compare texts with plain decoding's.

    Args:
        target: The target.
        runs: From `decode.methods`; "plain" must be there.
        prompts: Token ids of one prompt, or of several.
        sampling: Settings with a seed, for judging differences.
        turn: Which method comes first; count it up from batch to batch.
    """
    names = list(runs)
    first = turn % len(names)
    batch = as_batch(prompts)
    texts, stats, seconds = {}, {}, {}
    for name in names[first:] + names[:first]:
        with runs[name].setting():
            start = time.perf_counter()
            texts[name], stats[name] = runs[name].decode(batch)
            seconds[name] = time.perf_counter() - start
    answers = {}
    for name in names:
        differences = []
        for row, ids in enumerate(batch):
            found = first_difference(target, ids, texts["plain"][row], texts[name][row], sampling, row=row)
            if found is not None:
                differences.append(RowDifference(row, str(found), found.near_tie))
        tokens = sum(map(len, texts[name]))
        answers[name] = Answer(seconds[name], tokens, stats[name], differences, rows=len(batch))
    return answers


def read_sets(names: Sequence[str], limit: int) -> dict[str, list[Prompt]]:
    """Return the first prompts of each file by the file's name.

    Raises:
        ValueError: If a file is broken, or two have one name.
        OSError: If there is none.
    """
    sets = {Path(name).stem: read_prompts(name, limit=limit) for name in names}
    if len(sets) < len(names) or (len(sets) > 1 and ALL in sets):
        raise ValueError(f"prompt files must differ in name, and none may be called {ALL!r}, got {', '.join(names)}")
    return sets


def to_ids(target: Target, sets: Mapping[str, Sequence[Prompt]], max_new_tokens: int) -> dict[str, list[list[int]]]:
    """Return the prompts' token ids by prompt set.

    Raises:
        ValueError: If one cannot be decoded.
    """
    found = {name: [to_token_ids(target, prompt, raw=False) for prompt in prompts] for name, prompts in sets.items()}
    for prompts in found.values():
        token_limits(target, prompts, max_new_tokens)
    return found


def longest(sets: Mapping[str, Sequence[list[int]]]) -> list[int]:
    """Return the longest prompt of all sets."""
    return max((ids for prompts in sets.values() for ids in prompts), key=len)


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table whose columns are aligned."""
    columns = list(rows[0])
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    return "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]])


def show(*lines: object) -> bool:
    """Print lines and return True; where standard output takes none, say so: it is no reason to lose what is done."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        print(f"error: cannot write to standard output ({error})", file=sys.stderr)
        return False
    return True


def write_report(path: Path, report: Mapping[str, Any]) -> bool:
    """Write what a command measured, as JSON, and return True; where that fails, print it: measuring took long."""
    text = json.dumps(report, indent=1) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        print(text, end="")
        print(f"error: cannot write {path} ({error}); the report went to standard output", file=sys.stderr)
        return False
    return True
