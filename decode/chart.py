"""The picture of `decode.bench compare`: bars with intervals by method, grouped by prompt set, for each temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from decode.comparison_table import Summary
from decode.intervals import Interval

FIGURES: dict[str, Callable[[Summary], Interval]] = {
    "tokens per step": lambda row: row.tokens_per_step,
    "speed-up over plain decoding": lambda row: row.speedup,
}
GROUP = 0.8
"""Share of the room between two groups that bars take."""


def draw(rows: Sequence[Summary]) -> Figure:
    """Return the picture: one row of panels for each of `FIGURES`, one column for each temperature.

    Args:
        rows: From `comparison_table.summarise`. Plain decoding, which the others are measured by, is the line at 1.
    """
    drawn = [row for row in rows if row.method != "plain"]
    temperatures = list(dict.fromkeys(row.temperature for row in drawn))
    sets, methods = dict.fromkeys(row.prompts for row in drawn), dict.fromkeys(row.method for row in drawn)
    width = 1.5 + 0.16 * len(methods) * len(sets) + 0.3 * len(sets)
    figure = Figure(figsize=(max(4.0, width) * len(temperatures), 7.0), dpi=120, layout="constrained")
    panels = figure.subplots(len(FIGURES), len(temperatures), squeeze=False, sharey="row", sharex=True)
    for axes, (name, interval) in zip(panels, FIGURES.items(), strict=True):
        axes[0].set_ylabel(name)
        for panel, temperature in zip(axes, temperatures, strict=True):
            _bars(panel, [row for row in drawn if row.temperature == temperature], interval)
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        panel.set_title(f"temperature {temperature:g}")
    bars = [bar for bar in panels[0][0].containers if isinstance(bar, BarContainer)]
    # given, not looked for: matplotlib would leave out names with a leading `_`
    handles, names = [bar.patches[0] for bar in bars], [str(bar.get_label()) for bar in bars]
    legend = figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(bars)), frameon=False)
    show_as_text(legend)
    return figure


def show_as_text(legend: Legend) -> None:
    """Keep matplotlib from reading `$` in names as formulas, which need not be valid ones."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _bars(panel: Axes, rows: Sequence[Summary], interval: Callable[[Summary], Interval]) -> None:
    sets, methods = list(dict.fromkeys(row.prompts for row in rows)), list(dict.fromkeys(row.method for row in rows))
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    first = len(methods) % 2  # colours come in pairs, and so do, at the end, the methods: a head's chain and its tree
    width = GROUP / len(methods)
    for number, method in enumerate(methods):
        mine = [interval(row) for row in rows if row.method == method]
        places = [group + (number - (len(methods) - 1) / 2) * width for group in range(len(sets))]
        # a resampled interval of a few prompts may leave out the figure itself
        errors = [[max(0.0, f.value - f.low) for f in mine], [max(0.0, f.high - f.value) for f in mine]]
        heights = [f.value for f in mine]
        colour = colours[(first + number) % len(colours)]
        panel.bar(places, heights, width, yerr=errors, color=colour, label=method, error_kw={"elinewidth": 0.8})
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(sets)), sets, parse_math=False)
    panel.spines[["top", "right"]].set_visible(False)


def save_chart(rows: Sequence[Summary], path: Path) -> None:
    """Write the picture as a PNG."""
    draw(rows).savefig(path)
