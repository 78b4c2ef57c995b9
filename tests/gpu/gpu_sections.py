"""Sections of the report of `everything.py`, from what its parts wrote."""

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OUTCOMES = {True: "pass", False: "FAIL", None: "not tested"}
COSTS = ("Cost of a target pass", "The fastest way", "Prediction and real decoding")
BENCH = ("All ", "Drafts", "Throughput")
"""Beginnings of the headings of decode.tune and decode.bench that are shown: the times of a step's parts are not, as a
GPU works behind them."""
SIZE = r"([\d.]+ [KMG]iB)"


class Found(NamedTuple):
    """What a part left."""

    name: str
    output: Path
    """What it printed."""
    keeps: tuple[Path, ...]


def table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return rows as a Markdown table; nothing for none."""
    if not rows:
        return []
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([str(row.get(column, "")) for column in columns] for row in rows)]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def exactness(parts: Sequence[Found]) -> list[str]:
    """Show every check of decode.prove, and all near ties and other differences."""
    rows: list[dict[str, object]] = []
    details = []
    for part in parts:
        if not part.keeps[0].is_file():
            continue
        found = json.loads(part.keeps[0].read_text())
        for check in found["checks"]:
            counts = check["counts"]
            row = {"part": part.name, "dtype": found["machine"]["dtype"], "drafts": found["drafts"].rpartition(", ")[2]}
            row |= {"check": check["name"], "outcome": OUTCOMES[check["passed"]], "found": check["summary"]}
            row["tokens per step"] = f"{counts['tokens_per_step']:.2f}" if "tokens_per_step" in counts else ""
            row["accepted"] = f"{counts['accepted']} of {counts['offered']}" if "offered" in counts else ""
            rows.append(row)
            if check["name"] != "law" or check["passed"] is False:
                details += [f"- {part.name}, {check['name']}: {line}" for line in check["details"]]
    return [*table(rows), *([""] if details else []), *details]


def tests(parts: Sequence[Found]) -> list[str]:
    """Show what pytest says last."""
    return [line for part in parts for line in part.output.read_text().splitlines()[-1:]]


def training(parts: Sequence[Found]) -> list[str]:
    """Show losses, and the memory that was predicted beside what was taken."""
    rows: list[dict[str, object]] = []
    for part in parts:
        text = part.output.read_text()
        places = dict(re.findall(rf"^plan: (.*memory): {SIZE} at most", text, re.MULTILINE))
        peaks = dict(re.findall(rf"([\w ]*memory) {SIZE}", "".join(re.findall(r"^peak:(.*)", text, re.MULTILINE))))
        for place, most in places.items():
            row: dict[str, object] = {"part": part.name, "place": place, "predicted": most}
            row["measured"] = {name.strip(): size for name, size in peaks.items()}.get(place, "")
            rows.append(row | (_losses(part.keeps[0]) if part.keeps and part.keeps[0].is_file() else {}))
    columns = {column: "" for row in rows for column in row}
    lines = [f"- {part.name}: {line}" for part in parts for line in _plan_lines(part)]
    return [*table([columns | row for row in rows]), "", *lines]


def _losses(metrics: Path) -> dict[str, object]:
    """Return the first and the last loss, the usual speed, and what the last evaluation says."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    found: dict[str, object] = {"steps": len(steps)}
    found["loss, first and last"] = f"{steps[0]['train/loss']:.3f}, {steps[-1]['train/loss']:.3f}"
    found["tokens/s, median step"] = f"{statistics.median(line['train/tokens_per_second'] for line in steps):,.0f}"
    evaluated = [line for line in lines if "eval/tokens_per_step" in line]
    if evaluated:
        found["tokens per step"] = f"{evaluated[-1]['eval/tokens_per_step']:.2f}"
        found["texts that differ"] = f"{evaluated[-1]['eval/mismatches']:.0f}"
    return found


def _plan_lines(part: Found) -> list[str]:
    text = part.output.read_text()
    return [line for line in text.splitlines() if re.match(r"plan: (.*memory: |.*tokens per second)|peak:", line)]


def throughput(parts: Sequence[Found]) -> list[str]:
    """Show the speed of training beside the target's alone, and the parts of a step."""
    rows: list[dict[str, object]] = []
    lines = []
    for part in parts:
        text = part.output.read_text()
        speeds = re.findall(r"^throughput: (.*?) +([\d,]+) tokens/s, ([\d.]+) of the target alone$", text, re.MULTILINE)
        for what, speed, share in speeds:
            rows.append({"head": _short(part), "what": what, "tokens/s": speed, "target alone = 1": share})
        lines += [f"- {line}" for line in re.findall(r"^throughput: (\d+ steps .*|a step .*)$", text, re.MULTILINE)]
    return [*table(rows), "", *lines]


def costs(parts: Sequence[Found]) -> list[str]:
    """Show what decode.tune says of passes and of trees."""
    shown = []
    for part in parts:
        for title, body in headings(part.output.read_text()).items():
            if title.startswith(COSTS):
                shown += [f"#### {_short(part)}: {title}", "", *(line for line in body if line), ""]
    return shown[:-1]


def bench(parts: Sequence[Found]) -> list[str]:
    """Show the tables of decode.bench, and every text that differs."""
    shown = []
    for part in parts:
        text = part.output.read_text()
        for title, body in headings(text).items():
            if title.startswith(BENCH):
                shown += [f"#### {_short(part)}: {title}", "", *(line for line in body if line.startswith("|")), ""]
        shown += [f"- {line}" for line in text.splitlines() if re.match(r"T=.*token \d+: ", line)]
    return shown


def _short(part: Found) -> str:
    """Return the part's name without what its section says."""
    return part.name.partition(" ")[2]


def headings(text: str) -> dict[str, list[str]]:
    """Return the lines under each heading of the second level, without those that are empty at the ends."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif found and (line or found[next(reversed(found))]):
            found[next(reversed(found))].append(line)
    return {title: [line for line in body if not line.startswith("wrote ")] for title, body in found.items()}
