"""`curves.png` of a run, drawn from its `metrics.jsonl`, so that a continued run shows everything.

matplotlib's objects are used without pyplot, which would keep figures in a global state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.chart import show_as_text
from heads.files import write_atomically

Line = Mapping[str, float]
POOLED = re.compile(r"eval/(t\d[^/]*/)?(chain/)?tokens_per_step")
OF_A_SET = re.compile(r"eval/([^/]+)/tokens_per_step")


def draw_curves(metrics: Path, picture: Path) -> None:
    """Draw the lines of `metrics` into the PNG `picture`, replacing one that is there.

    Raises:
        OSError: If the one cannot be read or the other not be written.
    """
    figure = make_figure([json.loads(line) for line in metrics.read_text().splitlines()])
    write_atomically(picture, lambda temporary: figure.savefig(temporary, format="png", dpi=100))


def make_figure(lines: Sequence[Line]) -> Figure:
    """Return loss, learning rate, tokens per step (also by prompt set, if there are several) and acceptance."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    overall = [name for name in names if POOLED.fullmatch(name)]
    sets = [name for name in names if OF_A_SET.fullmatch(name) and name not in overall]
    depths = sorted(
        (name for name in names if re.fullmatch(r"eval/accept_rate/depth\d+", name)), key=lambda name: (len(name), name)
    )
    panels: list[tuple[str, Sequence[str]]] = [
        ("training loss", ["train/loss"]),
        ("learning rate", ["train/lr"]),
        ("tokens per step", overall),
        ("tokens per step by prompt set, tree, greedy", sets),
        ("acceptance given the parent's, tree, greedy", depths),
        ("drift from the original target, nats a token", ["drift/kl"]),
    ]
    shown = [(title, series) for title, series in panels if any(name in names for name in series)]
    rows = math.ceil(len(shown) / 2)
    figure = Figure(figsize=(11, 3.5 * max(rows, 1)), layout="constrained")
    for place, (title, series) in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, 2, place)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("optimiser step")
        axes.grid(alpha=0.3)
        for name in series:
            _plot(axes, lines, name)
        if len(series) > 1:
            # given, not looked for: matplotlib would leave out prompt sets with a leading `_`
            show_as_text(axes.legend(axes.lines, list(map(label, series)), fontsize="small"))
    return figure


def _plot(axes: Axes, lines: Sequence[Line], name: str) -> None:
    """Plot one metric over the steps: with its interval if it has one, and with a running mean if it is a loss."""
    points = [line for line in lines if name in line]
    steps = [line["step"] for line in points]
    values = [line[name] for line in points]
    if name == "train/loss":
        axes.plot(steps, values, alpha=0.3)
        axes.plot(steps, running_mean(values, 1 + len(values) // 50), color="C0")
        return
    axes.plot(steps, values, label=label(name), marker="." if name.startswith("eval/") else "")
    low, high = ([line.get(name + end, line[name]) for line in points] for end in ("_low", "_high"))
    axes.fill_between(steps, low, high, alpha=0.15)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return for each value the mean of the last `width`, of fewer at the start."""
    return [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]


def label(name: str) -> str:
    """Return what people call a metric of the evaluation."""
    pooled = POOLED.fullmatch(name)
    if pooled is None:
        of_a_set = OF_A_SET.fullmatch(name)
        return name.rpartition("/")[2].replace("depth", "depth ") if of_a_set is None else of_a_set[1]
    temperature, chain = pooled.groups()
    return f"{'chain' if chain else 'tree'}, {'greedy' if temperature is None else f'T = {temperature[1:-1]}'}"
