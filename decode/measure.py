"""Prompts decoded by several methods in turn, and what came of it: the ground of `decode.bench` and its comparison."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from decode.compare import first_difference
from decode.counting import Counts
from decode.methods import Run
from decode.prompts import Prompt, read_prompts, to_token_ids, token_limits
from decode.results import Stats
from decode.sampling import Sampling
from decode.target import Target

ALL = "all"
"""Name of all prompt sets together."""


@dataclass(frozen=True)
class Answer:
    """One prompt decoded by one method."""

    seconds: float
    tokens: int
    stats: Stats | None = None
    """None for transformers' decoding."""
    difference: str | None = None
    """Where the text parts from plain decoding's and by how much; None if it does not."""
    near_tie: bool = False
    """Whether rounding excuses the difference."""
    counts: Counts | None = None
    """What the proposer did, if that was counted."""


@dataclass
class Result:
    """One method on one prompt set."""

    method: str
    prompts: str
    answers: list[Answer] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all prompts."""
        return sum(answer.seconds for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def stats(self) -> list[Stats]:
        """One for each prompt; none for transformers' decoding."""
        return [answer.stats for answer in self.answers if answer.stats is not None]

    @property
    def differences(self) -> list[str]:
        """Texts that are not plain decoding's, with the place and the gap."""
        numbered = enumerate(self.answers)
        return [f"{self.prompts}[{number}] {answer.difference}" for number, answer in numbered if answer.difference]

    @property
    def unexcused(self) -> int:
        """How many of them are not near ties."""
        return sum(answer.difference is not None and not answer.near_tie for answer in self.answers)


def measure(
    target: Target, runs: Mapping[str, Run], ids: list[int], sampling: Sampling, *, turn: int
) -> dict[str, Answer]:
    """Decode one prompt with every method, one after the other, and compare the texts with plain decoding's.

    Args:
        target: The target.
        runs: From `decode.methods`; "plain" must be there.
        ids: The prompt.
        sampling: Settings with a seed, for judging differences.
        turn: Which method comes first; count it up from prompt to prompt.
    """
    names = list(runs)
    first = turn % len(names)
    texts, stats, seconds = {}, {}, {}
    for name in names[first:] + names[:first]:
        start = time.perf_counter()
        texts[name], stats[name] = runs[name](ids)
        seconds[name] = time.perf_counter() - start
    answers = {}
    for name in names:
        found = first_difference(target, ids, texts["plain"], texts[name], sampling)
        line, near_tie = (None, False) if found is None else (str(found), found.near_tie)
        answers[name] = Answer(seconds[name], len(texts[name]), stats[name], line, near_tie)
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


def machine(target: Target) -> dict[str, str]:
    """Return what the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), cpu
        )
    return {
        "device": torch.cuda.get_device_name(target.device)
        if target.device.type == "cuda"
        else f"{cpu}, {torch.get_num_threads()} threads",
        "dtype": str(target.dtype).removeprefix("torch."),
        "packed": str(bool(target.packed)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
