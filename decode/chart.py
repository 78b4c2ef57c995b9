"""The picture of `decode.bench`: bars with intervals by method, grouped by prompt set, for each temperature."""

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
from decode.methods import PLAIN

FIGURES: dict[str, Callable[[Summary], Interval | None]] = {
    "tokens per step": lambda row: row.tokens_per_step,
    "speed-up over plain decoding": lambda row: row.speedup,
}
GROUP = 0.8
"""Share of the room between two groups that bars take."""


def draw(rows: Sequence[Summary]) -> Figure:
    """Return the picture: one row of panels for each of `FIGURES`, one column for each temperature.

    Args:
        rows: From `comparison_table.summarise`, all with one number of rows in a batch. Plain decoding, which the
            others are measured by, is the line at 1.
    """
    drawn = [row for row in rows if row.method != PLAIN]
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    sets, methods = dict.fromkeys(row.prompts for row in rows), list(dict.fromkeys(row.method for row in drawn))
    width = 1.5 + 0.16 * len(methods) * len(sets) + 0.3 * len(sets)
    figure = Figure(figsize=(max(4.0, width) * len(temperatures), 7.0), dpi=120, layout="constrained")
    panels = figure.subplots(len(FIGURES), len(temperatures), squeeze=False, sharey="row", sharex=True)
    for axes, (name, interval) in zip(panels, FIGURES.items(), strict=True):
        axes[0].set_ylabel(name)
        for panel, temperature in zip(axes, temperatures, strict=True):
            _bars(panel, [row for row in drawn if row.temperature == temperature], list(sets), methods, interval)
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        panel.set_title(f"temperature {temperature:g}")
    bars = {bar.get_label(): bar for panel in panels.flat for bar in panel.containers if isinstance(bar, BarContainer)}
    # given, not looked for: matplotlib would leave out names with a leading `_`
    names = [name for name in methods if name in bars]
    handles = [bars[name].patches[0] for name in names]
    widest = 0.8 + 0.09 * max(map(len, names), default=0)  # inches of one column
    columns = max(1, min(4, len(names), int(figure.get_figwidth() / widest)))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
    show_as_text(legend)
    return figure


def show_as_text(legend: Legend) -> None:
    """Keep matplotlib from reading `$` in names as formulas, which need not be valid ones."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _bars(
    panel: Axes,
    rows: Sequence[Summary],
    sets: Sequence[str],
    methods: Sequence[str],
    interval: Callable[[Summary], Interval | None],
) -> None:
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    width = GROUP / max(1, len(methods))
    for number, method in enumerate(methods):
        found = [(sets.index(row.prompts), interval(row)) for row in rows if row.method == method]
        mine = [(group, figure) for group, figure in found if figure is not None]
        if not mine:
            continue
        places = [group + (number - (len(methods) - 1) / 2) * width for group, _ in mine]
        # a resampled interval of a few prompts may leave out the figure itself
        errors = [[max(0.0, f.value - f.low) for _, f in mine], [max(0.0, f.high - f.value) for _, f in mine]]
        heights = [f.value for _, f in mine]
        colour = colours[number % len(colours)]
        panel.bar(places, heights, width, yerr=errors, color=colour, label=method, error_kw={"elinewidth": 0.8})
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(sets)), sets, parse_math=False)
    panel.spines[["top", "right"]].set_visible(False)


def save_chart(rows: Sequence[Summary], path: Path) -> None:
    """Write the picture as a PNG."""
    draw(rows).savefig(path)
