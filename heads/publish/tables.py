"""Tables of a model card: what was recorded, and what was measured, in numbers that can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.hub import is_hub_name

FIGURE = re.compile(
    r"(?:(?P<set>.+?)/)??(?:t(?P<temperature>[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)/)?(?P<chain>chain/)?"
    r"(?P<figure>tokens_per_step|speedup|accept_rate/depth[0-9]+)"
)
"""Names of what evaluation measures, as `train/evaluate.py` makes them: `[<set>/][t<temperature>/][chain/]<figure>`."""
ENDS = ("_low", "_high")
MISMATCHES = "mismatches"
MARKS = r"\|`<>[]"
"""Of Markdown and HTML, what makes more than text of text."""
TITLES = {"tokens_per_step": "tokens per step", "speedup": "speed-up"}
DEPTH = "accept_rate/depth"
DATA_FILES = (".json", ".jsonl", ".parquet")
INTERVALS = "In brackets: the 95 % interval over prompts. "
LEGEND = (
    "Speed-up is over plain decoding, both with Gorgon's `decode` on the "
    "machine that trained. Depth d: how many of the drafts at depth d were accepted, where the one before was. "
    "Temperature 0 is greedy."
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; none if it has no rows."""
    if not rows:
        return []
    lines = [header, ["---"] * len(header), *(map(_cell, row) for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def plain(text: str) -> str:
    """Return one line of text that is no Markdown and no HTML, whatever it was: others may have written it."""
    line = " ".join(text.split())
    return line.translate({ord(mark): f"\\{mark}" for mark in MARKS})


def code(text: str) -> str:
    """Return text as code in a line."""
    return f"`{' '.join(text.replace('`', ' ').split())}`"


def _cell(text: str) -> str:
    """Return a cell of a table; `code` stays code."""
    is_code = len(text) > 2 and text[0] == text[-1] == "`"
    return code(text[1:-1]).replace("|", r"\|") if is_code else plain(text)


def base_name(text: str) -> str:
    """Return the last part of a path, which is all of it that concerns others; anything else as it is."""
    parts = [part for part in re.split(r"[/\\]", text) if part]
    named = is_hub_name(text.partition(":")[0]) and Path(text).suffix not in DATA_FILES  # maybe `name:split`
    return text if named or len(parts) < 2 else parts[-1]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of nested objects too; what is null is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def settings(values: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of names and values, of paths their last part."""
    return [[code(name), _shown(value)] for name, value in flat(values)]


def paths(values: Mapping[str, Any]) -> list[str]:
    """Return the paths among the values, of which `settings` shows the last part."""
    found = (item for _, value in flat(values) for item in (value if isinstance(value, list) else [value]))
    return [item for item in found if isinstance(item, str) and base_name(item) != item]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    return base_name(str(value))


def measured_tables(measured: Mapping[str, Any]) -> list[str]:
    """Return lines that tell what was measured; none if nothing was."""
    ways: dict[tuple[str, float, str], dict[str, str]] = {}
    others = {}
    for name, value in measured.items():
        found = FIGURE.fullmatch(name)
        if found is not None and _is_number(value):
            way = (found["set"] or "", float(found["temperature"] or 0), "chain" if found["chain"] else "tree")
            ways.setdefault(way, {})[found["figure"]] = _with_interval(measured, name)
        elif name != MISMATCHES and not _is_end(name):
            others[name] = value
    lines = _ways_table(ways)
    if _is_number(measured.get(MISMATCHES)):
        lines += ["", f"Texts that differed from plain decoding's: {measured[MISMATCHES]:g}."]
    if others:
        lines += ["", *table(["also measured", "value"], settings(others))]
    return lines


def _ways_table(ways: Mapping[tuple[str, float, str], Mapping[str, str]]) -> list[str]:
    """Return a table of figures by prompt set, temperature, and whether a chain or a tree was drafted."""
    found = {figure for row in ways.values() for figure in row}
    depths = sorted(int(figure.removeprefix(DEPTH)) for figure in found if figure.startswith(DEPTH))
    figures = [*(figure for figure in TITLES if figure in found), *(f"{DEPTH}{depth}" for depth in depths)]
    several = any(name for name, _, _ in ways)
    rows = []
    for name, temperature, drafts in sorted(ways, key=lambda way: (way[0], way[1], way[2] == "chain")):
        row = ways[name, temperature, drafts]
        first = [name or "all"] if several else []
        rows.append([*first, drafts, f"{temperature:g}", *(row.get(figure, "") for figure in figures)])
    titles = [TITLES.get(figure, f"depth {figure.removeprefix(DEPTH)}") for figure in figures]
    lines = table([*(["prompts"] if several else []), "drafts", "temperature", *titles], rows)
    intervals = any("(" in cell for row in rows for cell in row)
    return [*lines, "", (INTERVALS if intervals else "") + LEGEND] if lines else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_end(name: str) -> bool:
    return any(name.endswith(end) and FIGURE.fullmatch(name.removesuffix(end)) for end in ENDS)


def _with_interval(measured: Mapping[str, Any], name: str) -> str:
    low, high = (measured.get(name + end) for end in ENDS)
    interval = f" ({low:.2f} to {high:.2f})" if _is_number(low) and _is_number(high) else ""
    return f"{measured[name]:.2f}{interval}"
