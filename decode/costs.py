"""What a target pass costs on this machine: seconds by rows, committed tokens and nodes of the trees.

Everything that speculation can gain depends on this curve: flat on a GPU up to some hundred nodes, a staircase or a
slope on a CPU.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from decode.target import Target
from decode.tree import TokenTree, tree_shape

NODES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
MORE_NODES = (96, 128, 192, 256)
"""For GPUs, where trees so large may cost little more than one node."""
ROWS = (1, 2, 4, 8, 16)
CONTEXT = 256
CONTEXTS = (CONTEXT, 1024)
"""Committed tokens before the trees."""
ROUNDS_OF_BATCHES = 5
"""Passes over several rows take long, and vary less."""
MOST = 256
"""Nodes of all rows together in the largest pass that is measured."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a pass, measured several times."""

    rows: int
    context: int
    nodes: int
    """Of each row's tree, root included."""
    seconds: float
    """Median."""
    low: float
    """First quartile."""
    high: float
    """Third quartile."""

    def __post_init__(self) -> None:
        """Reject what is no measurement."""
        sizes, times = (self.rows, self.context, self.nodes), (self.low, self.seconds, self.high)
        whole = all(isinstance(size, int) and size >= 1 for size in sizes)
        spans = all(isinstance(span, int | float) and 0 <= span <= sys.float_info.max for span in times)
        if not (whole and spans and self.seconds):
            raise ValueError(f"a cost has whole numbers of at least 1 and seconds above 0, got {self}")


class VerifyCosts:
    """Seconds of a pass over trees of N nodes in each of B rows, between the points that were measured."""

    def __init__(self, points: Sequence[Cost]) -> None:
        """Take what was measured.

        Raises:
            ValueError: If not one node in one row was, which is the unit of everything else, or a pass was twice.
        """
        if not any(point.rows == point.nodes == 1 for point in points):
            raise ValueError("costs need a point of one row and one node, which is plain decoding")
        if len({(point.rows, point.context, point.nodes) for point in points}) < len(points):
            raise ValueError("costs hold two points of the same rows, context and nodes; leave one out")
        self.points = tuple(sorted(points, key=lambda p: (p.rows, p.context, p.nodes)))

    @classmethod
    def read(cls, points: Sequence[Mapping[str, Any]]) -> VerifyCosts:
        """Return costs from their form in JSON.

        Raises:
            ValueError: If it is no such form.
        """
        try:
            return cls([Cost(**point) for point in points])
        except TypeError as error:
            raise ValueError(f"not a list of measured costs ({error})") from error

    def write(self) -> list[dict[str, Any]]:
        """Return the form for JSON."""
        return [asdict(point) for point in self.points]

    def contexts(self, rows: int) -> list[int]:
        """Return the contexts that were measured with this many rows."""
        return sorted({point.context for point in self.points if point.rows == rows})

    def curve(self, rows: int, context: int = CONTEXT) -> list[Cost]:
        """Return what was measured with this many rows, at the context nearest to `context`, by nodes."""
        nearest = min(self.contexts(rows), key=lambda found: abs(found - context))
        return [point for point in self.points if (point.rows, point.context) == (rows, nearest)]

    def seconds(self, rows: int, nodes: float, context: int = CONTEXT) -> float:
        """Return the seconds of a pass, on lines between the nearest numbers of rows and of nodes that were measured.

        Beyond the largest the last line goes on, if it rises.
        """
        measured = sorted({point.rows for point in self.points})
        values = [on_lines([(p.nodes, p.seconds) for p in self.curve(r, context)], nodes) for r in measured]
        return on_lines(list(zip(measured, values, strict=True)), rows)

    def relative(self, rows: int, nodes: float, context: int = CONTEXT) -> float:
        """Return the seconds of a pass over those of a plain step of as many rows."""
        return self.seconds(rows, nodes, context) / self.seconds(rows, 1, context)


def on_lines(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at x of the lines through points in ascending order.

    Before the first point it is that point's: nobody knows how cheap less work is. The last line goes on, but not down:
    more work is not done faster, only measured so.
    """
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), y1 if x > x1 else min(y0, y1))


def pass_sizes(most: int) -> list[int]:
    """Return the sizes to measure where trees have at most so many nodes."""
    return [size for size in (*NODES, *MORE_NODES) if size <= most]


@torch.inference_mode()
def measure_costs(
    target: Target,
    *,
    nodes: Sequence[int] = NODES,
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = (CONTEXT,),
    repeats: int = 11,
) -> VerifyCosts:
    """Measure passes of all sizes in turn, round after round, so that the machine's moods meet all of them.

    Args:
        target: The target.
        nodes: Tree sizes; 1 is added.
        rows: Batch sizes; those with several rows are measured at the first context.
        contexts: Committed tokens before the trees; what does not fit into the target's context is left out.
        repeats: Rounds; one more is thrown away to warm up.

    Raises:
        ValueError: If a number is below 1, or the largest tree does not fit into the target's context.
    """
    if min(*nodes, *rows, *contexts, repeats) < 1:
        raise ValueError(
            f"sizes and rounds are numbers of at least 1, got nodes {list(nodes)}, rows {list(rows)}, contexts "
            f"{list(contexts)} and {repeats} rounds"
        )
    sizes = sorted({1, *nodes})
    fitting = [context for context in dict.fromkeys(contexts) if context + sizes[-1] <= target.max_length]
    if not fitting:
        if sizes[-1] >= target.max_length:
            raise ValueError(
                f"a tree of {sizes[-1]} nodes is not below the target's context, {target.max_length}; measure smaller "
                "trees (decode.tune: --most-nodes)"
            )
        fitting = [target.max_length - sizes[-1]]
    points: list[Cost] = []
    for batch, context in itertools.product(sorted({1, *rows}), fitting):
        if batch > 1 and context != fitting[0]:
            continue
        wanted = [size for size in sizes if size in sizes[:2] or batch * size <= MOST]  # two at least: a slope
        rounds = repeats if batch == 1 else min(repeats, ROUNDS_OF_BATCHES)
        times = _measure(target, batch, context, wanted, rounds)
        points += [Cost(batch, context, size, *_spread(seconds)) for size, seconds in times.items()]
    return VerifyCosts(points)


def _measure(target: Target, rows: int, context: int, sizes: Sequence[int], repeats: int) -> dict[int, list[float]]:
    session = target.session(rows, context + max(sizes))
    session.prefill([[7]] * rows)
    # K/V of zeros take as long as any; rows of a batch differ in length
    session.cache.lengths = [max(1, context - row) for row in range(rows)]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    progress = tqdm(range(repeats + 1), desc=f"cost of passes, {rows} x {context} tokens", leave=False)
    for _ in progress:
        for size in sizes:
            tree = TokenTree(torch.full((size,), 7, device=target.device), tree_shape((-1, *([0] * (size - 1)))))
            start = time.perf_counter()
            session.score([tree] * rows).logits.argmax(-1).tolist()  # waits for the device
            times[size].append(time.perf_counter() - start)
    return {size: seconds[1:] for size, seconds in times.items()}


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return middle, low, high
