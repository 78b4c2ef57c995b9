"""The pictures of `decode.report`: each function draws into axes and returns the numbers it has drawn."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.chart import show_as_text
from decode.costs import VerifyCosts
from decode.methods import PLAIN
from decode.propose import to_grow
from decode.tune_tables import name_way
from decode.tuned import Plan

Numbers = dict[str, Any]
Bursts = Sequence[Sequence[tuple[float, int]]]
"""For each text, seconds and new tokens of every step."""
MARKS, LINES = "os^Dv<>PX*", ("-", "--", ":", "-.")


def _legend(axes: Axes, size: str = "small") -> None:
    """Name what was drawn, if anything was; `$` in names begins no formula."""
    if axes.get_legend_handles_labels()[0]:
        show_as_text(axes.legend(frameon=False, fontsize=size))


def name_lines(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Name below the whole figure what its panels show, and make room for it."""
    if not names:
        return
    columns = max(1, int(figure.get_figwidth() / (0.8 + 0.08 * max(map(len, names)))))  # inches of one column
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / columns))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    show_as_text(legend)


def draw_costs(figure: Figure, plan: Plan) -> Numbers:
    """Draw the cost of a pass against its nodes, by rows and context, and the chosen trees on it."""
    axes = figure.subplots()
    costs = VerifyCosts.read(plan.costs)
    numbers: Numbers = {}
    for rows in sorted({point.rows for point in costs.points}):
        for context in costs.contexts(rows):
            curve = costs.curve(rows, context)
            unit = curve[0].seconds
            name = f"{rows} x {context} tokens"
            numbers[name] = {point.nodes: point.seconds / unit for point in curve}
            axes.plot([p.nodes for p in curve], [p.seconds / unit for p in curve], marker=".", label=name)
            low, high = [p.low / unit for p in curve], [p.high / unit for p in curve]
            axes.fill_between([p.nodes for p in curve], low, high, alpha=0.15)
    _legend(axes)
    curves = len(axes.lines)
    numbers |= _mark_choices(axes, plan, costs)
    name_lines(figure, axes.lines[curves:], [str(mark.get_label()) for mark in axes.lines[curves:]])
    axes.set(
        xlabel="nodes of each row's tree", ylabel="time of a target pass (one node = 1)", xscale="log", yscale="log"
    )
    nodes = [nodes for nodes in (1, 2, 4, 8, 16, 32, 64) if nodes <= max(point.nodes for point in costs.points)]
    axes.set_xticks(nodes, list(map(str, nodes)))
    times = [time for time in (1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16) if time <= axes.get_ylim()[1]]
    axes.set_yticks(times, [f"{time:g}" for time in times])
    axes.minorticks_off()
    return numbers


def _mark_choices(axes: Axes, plan: Plan, costs: VerifyCosts) -> Numbers:
    """Mark the trees that were chosen for one row on its curve, each with its temperatures, and return their names."""
    names: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for choice in plan.choices:
        if choice.rows == 1 and choice.arm is not None:
            way = plan.arms[choice.arm].way
            sizes[name_way(way)] = to_grow(way).max_nodes
            names.setdefault(name_way(way), []).append(choice.temperature)
    for place, (name, temperatures) in enumerate(names.items()):
        label = f"T={', '.join(f'{temperature:g}' for temperature in temperatures)}: {name}"
        look: dict[str, Any] = {"mfc": "none", "mew": 1.5, "ms": 8 + 3 * place, "color": "black", "linestyle": "none"}
        nodes = sizes[name]
        axes.plot([nodes], [costs.relative(1, nodes)], marker=MARKS[place % len(MARKS)], label=label, **look)
    return {f"chosen at T={t:g}": name for name, temperatures in names.items() for t in temperatures}


def draw_speedups(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> Numbers:
    """Draw the speed-up of every method but plain decoding against the temperature, with intervals.

    Lines of one number of rows share a colour, those of one method the marks.

    Args:
        axes: Where.
        rows: Figures of one prompt set.
    """
    drawn = [row for row in rows if row["method"] != PLAIN]
    methods, batches = (list(dict.fromkeys(row[name] for row in drawn)) for name in ("method", "rows"))
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    numbers: Numbers = {}
    for place, (method, batch) in enumerate(itertools.product(methods, batches)):
        mine = [row for row in drawn if (row["method"], row["rows"]) == (method, batch)]
        if not mine:
            continue
        mine.sort(key=lambda row: row["temperature"])
        values, lows, highs = zip(*(row["speedup"] for row in mine), strict=True)
        below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
        above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
        name = method if len(batches) == 1 else f"{method}, {batch} {'row' if batch == 1 else 'rows'}"
        temperatures = [row["temperature"] for row in mine]
        style = methods.index(method)
        axes.errorbar(
            temperatures,
            values,
            yerr=[below, above],
            label=name,
            color=colours[(place if len(batches) == 1 else batches.index(batch)) % len(colours)],
            marker=MARKS[style % len(MARKS)],
            linestyle=LINES[(style + style // len(MARKS)) % len(LINES)],  # with the mark, another for 40 methods
            elinewidth=0.8,
        )
        numbers[name] = {f"{t:g}": value for t, value in zip(temperatures, values, strict=True)}
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("temperature")
    return numbers


def draw_acceptance(axes: Axes, rates: Mapping[str, Sequence[float]]) -> Numbers:
    """Draw how often drafts are accepted at each depth, given that those above were.

    Args:
        axes: Where.
        rates: By method, from depth 1 on.
    """
    for name, values in rates.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    deepest = max(map(len, rates.values()), default=1)
    axes.set(xlabel="depth", ylabel="accepted, given the one above", ylim=(0, 1), xticks=range(1, deepest + 1))
    _legend(axes)
    return {name: list(values) for name, values in rates.items()}


def draw_throughput(axes: Axes, rates: Mapping[str, Mapping[int, float]]) -> Numbers:
    """Draw tokens per second against the rows of a batch, over those of plain decoding with the fewest rows.

    Args:
        axes: Where.
        rates: Tokens per second by method and rows; "plain" must be there.
    """
    fewest = min(rates["plain"])
    unit = rates["plain"][fewest]
    numbers = {name: {rows: rate / unit for rows, rate in sorted(by_rows.items())} for name, by_rows in rates.items()}
    for name, by_rows in numbers.items():
        colour = "black" if name == "plain" else None
        axes.plot(list(by_rows), list(by_rows.values()), marker="o", label=name, color=colour)
    rows = sorted(rates["plain"])
    unit_name = "one row" if fewest == 1 else f"{fewest} rows"
    axes.set(xlabel="rows of the batch", ylabel=f"tokens per second (plain, {unit_name} = 1)", xscale="log")
    axes.set_xticks(rows, list(map(str, rows)))
    axes.minorticks_off()
    _legend(axes)
    return numbers


def draw_gaps(gaps_axes: Axes, bursts_axes: Axes, bursts: Mapping[str, Bursts]) -> Numbers:
    """Draw the time between tokens as a client sees it, and how many come at once.

    Tokens of one step arrive together: speculation shows itself by gaps of no time beside gaps of a whole step.

    Args:
        gaps_axes: Where the gaps go.
        bursts_axes: Where the sizes of bursts go.
        bursts: By method.
    """
    numbers: Numbers = {}
    gaps = {name: [gap for text in texts for gap in token_gaps(text)] for name, texts in bursts.items()}
    longest = max((_quantile(found, 0.99) for found in gaps.values() if found), default=1.0)
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    width = 0.8 / max(1, len(bursts))
    for number, (name, found) in enumerate(gaps.items()):
        if not found:
            continue
        shown = [1e3 * min(gap, longest) for gap in found]
        shares = [1 / len(shown)] * len(shown)
        look: dict[str, Any] = {"label": name, "color": colours[number % 10]}
        gaps_axes.hist(shown, bins=60, range=(0.0, 1e3 * longest), weights=shares, histtype="step", **look)
        sizes = Counter(size for text in bursts[name] for _, size in text)
        total = sum(sizes.values())
        places = [size + (number - (len(bursts) - 1) / 2) * width for size in sorted(sizes)]
        heights = [sizes[size] / total for size in sorted(sizes)]
        bursts_axes.bar(places, heights, width, **look)
        numbers[name] = {
            "no gap": sum(gap == 0 for gap in found) / len(found),
            "mean ms": 1e3 * statistics.fmean(found),
            **{f"p{share} ms": 1e3 * _quantile(found, share / 100) for share in (50, 95, 99)},
            "bursts": {size: sizes[size] / total for size in sorted(sizes)},
        }
    gaps_axes.set(xlabel="ms since the token before", ylabel="share of tokens", yscale="log")
    bursts_axes.set(xlabel="tokens that arrive at once", ylabel="share of steps")
    _legend(gaps_axes)
    return numbers


def token_gaps(text: Sequence[tuple[float, int]]) -> list[float]:
    """Return the seconds between each token and the one before, of a text's steps (seconds, tokens)."""
    gaps: list[float] = []
    before: float | None = None
    for seconds, tokens in text:
        if tokens:
            gaps += ([] if before is None else [seconds - before]) + [0.0] * (tokens - 1)
            before = seconds
    return gaps


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
