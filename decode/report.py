"""`python -m decode.report DIR [--head HEAD …]`: pictures of what `decode.bench` and `decode.tune` measured.

DIR is the --out of `decode.bench`. It gets speedup.png (speed-up against temperature, by prompt set and rows),
acceptance.png (drafts accepted at each depth), gaps.png (the time between tokens that a client sees, and how many come
at once), throughput.png (tokens per second against rows, where several were measured), for each head that was tuned
costs-NAME.png (what a target pass costs, and the chosen trees on it), and report.json with the numbers in them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.measure import ALL, show
from decode.report_figures import (
    Numbers,
    draw_acceptance,
    draw_costs,
    draw_gaps,
    draw_speedups,
    draw_throughput,
    name_lines,
)
from decode.tuned import FORMAT, Plan
from heads.checkpoint import TUNED, read_plans
from heads.files import check_writable

RESULTS = "comparison.json"
Summaries = Sequence[Mapping[str, Any]]


def speedups(rows: Summaries) -> tuple[Figure, Numbers]:
    """Draw the speed-up of every method and number of rows against the temperature, a panel for each prompt set."""
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    figure = _figure(1, len(sets), width=4.0, height=4.0)
    panels = figure.subplots(1, len(sets), squeeze=False, sharey=True)[0]
    numbers: Numbers = {}
    for axes, name in zip(panels, sets, strict=True):
        axes.set_title(name, parse_math=False)
        numbers[name] = draw_speedups(axes, [row for row in rows if row["prompts"] == name])
    panels[0].set_ylabel("speed-up over plain decoding")
    name_lines(figure, *panels[0].get_legend_handles_labels())
    return figure, numbers


def _title(temperature: float, rows: int) -> str:
    return f"T={temperature:g}, {rows} {'row' if rows == 1 else 'rows'}"


def acceptance(rows: Summaries) -> tuple[Figure, Numbers]:
    """Draw acceptance per depth, a panel for each temperature, with the fewest rows and for all prompts."""

    def draw(axes: Axes, here: Summaries) -> Numbers:
        return draw_acceptance(axes, {row["method"]: row["accept_rates"] for row in here})

    return _by_temperature(_drafting(rows), draw)


def throughput(rows: Summaries) -> tuple[Figure, Numbers]:
    """Draw tokens per second against the rows of a batch, a panel for each temperature."""

    def draw(axes: Axes, here: Summaries) -> Numbers:
        rates: dict[str, dict[int, float]] = {}
        for row in here:
            rates.setdefault(row["method"], {})[row["rows"]] = row["tokens_per_second"]
        return draw_throughput(axes, rates)

    return _by_temperature([row for row in _overall(rows) if not row["method"].startswith("transformers")], draw)


def _by_temperature(rows: Summaries, draw: Callable[[Axes, Summaries], Numbers]) -> tuple[Figure, Numbers]:
    """Draw a panel for each temperature."""
    temperatures = sorted({row["temperature"] for row in rows})
    figure = _figure(1, len(temperatures), width=5.0, height=4.0)
    numbers: Numbers = {}
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        axes.set_title(f"T={temperature:g}")
        numbers[f"T={temperature:g}"] = draw(axes, [row for row in rows if row["temperature"] == temperature])
        axes.label_outer()  # one name of the axis is enough
    return figure, numbers


def gaps(raw: Sequence[Mapping[str, Any]]) -> tuple[Figure, Numbers]:
    """Draw the gaps between tokens and the sizes of bursts, of the first temperature and number of rows."""
    first = raw[0]["temperature"], raw[0]["rows"]
    bursts: dict[str, list[list[tuple[float, int]]]] = {}
    for result in raw:
        if (result["temperature"], result["rows"]) == first:
            texts = [row["bursts"] for answer in result["answers"] for row in answer["by_row"]]
            bursts.setdefault(result["method"], []).extend(texts)
    figure = _figure(1, 2, width=5.5, height=4.0)
    figure.suptitle(_title(*first), fontsize="medium")
    left, right = figure.subplots(1, 2)
    return figure, draw_gaps(left, right, {name: texts for name, texts in bursts.items() if texts})


def costs(plan: Plan) -> tuple[Figure, Numbers]:
    """Draw what a target pass costs, and the chosen trees."""
    figure = _figure(1, 1, width=7.0, height=4.5)
    return figure, draw_costs(figure, plan)


def _overall(rows: Summaries) -> list[Mapping[str, Any]]:
    """Return the figures over all prompt sets."""
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    return [row for row in rows if row["prompts"] == (ALL if ALL in sets else sets[-1])]


def _drafting(rows: Summaries) -> list[Mapping[str, Any]]:
    """Return the figures over all prompt sets, with the fewest rows, of methods that draft."""
    fewest = min(row["rows"] for row in rows)
    return [row for row in _overall(rows) if row["rows"] == fewest and row["accept_rates"]]


def _figure(lines: int, columns: int, *, width: float, height: float) -> Figure:
    return Figure(figsize=(width * columns, height * lines), dpi=120, layout="constrained")


def write_report(folder: Path, heads: Sequence[Path]) -> list[str]:
    """Draw everything there is, and return the names of the files.

    Args:
        folder: Where `decode.bench` wrote its results, and where the pictures go.
        heads: Folders of heads or draft models that were tuned.

    Raises:
        ValueError: If there are no results, or a head was not tuned.
        OSError: If a file cannot be written.
    """
    results = _read(folder / RESULTS)
    rows, raw = results["rows"], results["raw"]
    drawn: dict[str, Callable[[], tuple[Figure, Numbers]]] = {"speedup": lambda: speedups(rows)}
    if _drafting(rows):
        drawn["acceptance"] = lambda: acceptance(rows)
    drawn["gaps"] = lambda: gaps(raw)
    if len({row["rows"] for row in rows}) > 1:
        drawn["throughput"] = lambda: throughput(rows)
    names: Counter[str] = Counter()
    for head in heads:
        name = "-".join(["costs", *head.resolve().parts[1:][-2:]])
        for device, plan in _plans(head).items():
            names[name] += 1
            drawn[name if names[name] == 1 else f"{name}-{names[name]}"] = _titled(plan, device)
    numbers: Numbers = {"command": results.get("command"), "machine": results.get("machine")}
    check_writable(folder / "report.json")
    for name, draw in drawn.items():
        figure, numbers[name] = draw()
        figure.savefig(folder / f"{name}.png")
    (folder / "report.json").write_text(json.dumps(numbers, indent=1) + "\n")
    return [f"{name}.png" for name in drawn] + ["report.json"]


def _titled(plan: Plan, device: str) -> Callable[[], tuple[Figure, Numbers]]:
    def draw() -> tuple[Figure, Numbers]:
        figure, numbers = costs(plan)
        figure.suptitle(device, fontsize="medium")
        return figure, numbers

    return draw


def _plans(head: Path) -> dict[str, Plan]:
    """Return a head's plans in the present format."""
    try:
        plans = {key: Plan.read(plan) for key, plan in read_plans(head).items() if plan.get("format") == FORMAT}
    except ValueError as error:
        raise ValueError(f"{head}: {error}") from error
    if not plans:
        raise ValueError(
            f"{head} holds no {TUNED} of this version; run `python -m decode.tune TARGET --head {head} …` first"
        )
    return plans


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        rows, raw = found["rows"], found["raw"]
        needed = {"method", "temperature", "rows", "prompts", "speedup", "accept_rates", "tokens_per_second"}
        if not rows or not raw or not all(needed <= set(row) for row in rows):
            raise KeyError(*sorted(needed))
        if not all("bursts" in text for result in raw for answer in result["answers"] for text in answer["by_row"]):
            raise KeyError("bursts")
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there; give the folder that `python -m decode.bench … --out DIR` wrote"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of decode.bench ({error!r}); run the command again") from error
    return dict(found)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, metavar="DIR", help="what `decode.bench --out` wrote; the pictures go there")
    p.add_argument("--head", type=Path, nargs="+", default=[], help="tuned heads (or draft models), for their costs")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        names = write_report(args.folder, args.head)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if show(f"wrote {', '.join(names)} to {args.folder}") else 2


if __name__ == "__main__":
    sys.exit(main())
