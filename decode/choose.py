"""Which tree is fastest on a machine: ways of drafting, measured on known texts, and their predicted speed.

A step takes the time of drafting, of a target pass over its nodes and of the loop's own books; what it gives is
counted exactly by `decode.replay`. The target's own cost comes from `decode.costs`. The search climbs: from a usual
dynamic tree along one setting at a time, for as long as the predicted speed rises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from decode.adaptive import conditional
from decode.costs import VerifyCosts, on_lines
from decode.formulas import expected_tokens_by_depth
from decode.grow import Chain
from decode.propose import Drafting, Drafts, to_grow
from decode.ranks import Ranked, best_tree
from decode.replay import Known, Replayed, replay
from decode.sampling import Sampling
from decode.target import Target
from heads.growing import growing_tree

Way = Sequence[Sequence[int]] | Mapping[str, float]
"""A tree to draft: paths of child ranks, or settings of a dynamic tree, as folders hold them."""

STATIC_SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 24, 32)
LADDERS: dict[str, tuple[float, ...]] = {
    "size": (2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64),
    "depth": (1, 2, 3, 4, 5, 6, 8),
    "confidence": (0.0, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4),
    "width": (1, 2, 3, 4, 6, 8, 10),
}
"""Values of a dynamic tree's settings that the search tries, in the order in which it tries the settings."""
CHAINS = 5
SHORT = 3
"""Texts that are replayed one by one, to time drafting for a single row."""


@dataclass(frozen=True)
class Measured:
    """A way of drafting on the calibration texts of one temperature."""

    way: Way
    replayed: Replayed
    draft_seconds: Mapping[int, float]
    """Of a step, by rows of the batch."""
    other_seconds: Mapping[int, float]
    """The loop's own of a step, by rows of the batch."""

    @property
    def tokens_per_step(self) -> float:
        """Of one row."""
        return self.replayed.stats.tokens_per_step

    @property
    def reach(self) -> tuple[float, ...]:
        """Share of steps that accept at least 1, 2, … drafts."""
        stats = self.replayed.stats
        return tuple(accepted / stats.steps for accepted in stats.accepted) if stats.steps else ()

    def nodes(self, rows: int) -> list[int]:
        """Return the nodes of each row that passes over batches of so many rows would have: those of the largest."""
        groups = [sizes[i : i + rows] for sizes in self.replayed.sizes for i in range(0, len(sizes), rows)]
        return [max(group) for group in groups]

    def step_seconds(self, costs: VerifyCosts, rows: int) -> float:
        """Return the predicted time of a step."""
        passes = Counter(self.nodes(rows) or [1])
        verify = sum(number * costs.seconds(rows, nodes) for nodes, number in passes.items()) / passes.total()
        return on_lines(sorted(self.draft_seconds.items()), rows) + verify + self._other(rows)

    def plain_seconds(self, costs: VerifyCosts, rows: int) -> float:
        """Return the predicted time of a plain step."""
        return costs.seconds(rows, 1) + self._other(rows)

    def _other(self, rows: int) -> float:
        return on_lines(sorted(self.other_seconds.items()), rows)

    def speedup(self, costs: VerifyCosts, rows: int) -> float:
        """Return the predicted time of plain decoding over that with these drafts, of batches of so many texts.

        A batch ends with its slowest text: where texts differ in how well they are drafted, steps in which few rows are
        left cost nearly as much as full ones, and eat up some of the gain.
        """
        texts = self.replayed.by_text
        starts = range(0, max(1, len(texts) - rows + 1), rows)
        batches = [[texts[(start + row) % len(texts)] for row in range(rows)] for start in starts] if texts else []
        plain = sum(_until_all_end([t.tokens - 1 for t in b], lambda n: self.plain_seconds(costs, n)) for b in batches)
        drafted = sum(_until_all_end([t.steps for t in b], lambda n: self.step_seconds(costs, n)) for b in batches)
        return plain / drafted if drafted else 1.0

    def cost(self, costs: VerifyCosts, rows: int) -> float:
        """Return the tokens per step that drafts must give to be worth their time."""
        return self.tokens_per_step / self.speedup(costs, rows)


def _until_all_end(lengths: Sequence[int], seconds: Callable[[int], float]) -> float:
    """Return the time of a batch whose rows take so many steps each; a step of n rows takes `seconds(n)`."""
    ends = sorted(lengths)
    steps = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    return sum(number * seconds(len(ends) - ended) for ended, number in enumerate(steps) if number)


class Search:
    """Looks for the fastest way of drafting at one temperature, and remembers all that it measured."""

    def __init__(
        self, target: Target, drafts: Drafts, texts: Sequence[Known], sampling: Sampling, costs: VerifyCosts
    ) -> None:
        self._target, self._drafts = target, drafts
        self._texts, self._sampling, self._costs = texts, sampling, costs
        self._rows = min(16, len(texts))
        self.found: dict[str, Measured] = {}
        """By the way's form in JSON."""

    def measure(self, way: Way) -> Measured:
        """Measure a way of drafting; once."""
        key = json.dumps(way)
        if key not in self.found:
            drafting = Drafting(self._drafts, to_grow(way))
            together = replay(self._target, self._texts, drafting, sampling=self._sampling, rows=self._rows)
            timed = {self._rows: together}
            if self._rows > 1:
                some = self._texts[:SHORT]
                timed[1] = replay(self._target, some, drafting, sampling=self._sampling, rows=1, max_new_tokens=32)
            drafts = {rows: replayed.draft_seconds for rows, replayed in timed.items()}
            others = {rows: replayed.other_seconds for rows, replayed in timed.items()}
            self.found[key] = Measured(way, together, drafts, others)
        return self.found[key]

    def run(self, ranked: Sequence[Ranked], *, most_nodes: int) -> None:
        """Measure chains and the best static trees, and climb from the usual dynamic tree by its speed for one row.

        Args:
            ranked: How the texts rank in the drafter's guesses.
            most_nodes: Largest tree.
        """
        drafter = self._drafts.drafter()
        columns = drafter.vocab_size if drafter.vocabulary is None else len(drafter.vocabulary)
        depth = min(drafter.max_depth, 8)
        limits = {"size": most_nodes, "depth": depth, "width": columns, "confidence": 1.0}
        sizes = [size for size in STATIC_SIZES if size <= most_nodes]
        trees = {best_tree(ranked, size) for size in sizes} - {()}
        chains = {Chain(length).paths for length in range(1, min(depth, most_nodes - 1, CHAINS) + 1)}
        with tqdm(desc=f"ways of drafting, T={self._sampling.temperature:g}", leave=False) as progress:
            for paths in sorted(trees | chains, key=len):
                self.measure([list(path) for path in paths])
                progress.update()
            start = {**growing_tree(depth, columns), "confidence": 0.0}
            start["size"] = min(start["size"], most_nodes)
            self._climb(start, limits, progress)

    def _climb(self, way: dict[str, float], limits: Mapping[str, float], progress: tqdm[Any]) -> None:
        best = self.measure(way)
        for _ in range(2):
            before = best
            for name, ladder in LADDERS.items():
                assert isinstance(best.way, Mapping)
                values = sorted({value for value in ladder if value <= limits[name]} | {best.way[name]})
                for step in (1, -1):
                    best = self._along(best, name, values, step, progress)
            if best is before:
                break

    def _along(self, best: Measured, name: str, values: Sequence[float], step: int, progress: tqdm[Any]) -> Measured:
        """Change one setting step by step for as long as that helps."""
        assert isinstance(best.way, Mapping)
        place = values.index(best.way[name]) + step
        while 0 <= place < len(values):
            assert isinstance(best.way, Mapping)
            tried = self.measure({**best.way, name: values[place]})
            progress.update()
            if tried.speedup(self._costs, 1) <= best.speedup(self._costs, 1):
                break
            best, place = tried, place + step
        return best

    def best(self, rows: int) -> Measured:
        """Return the fastest way that was measured, for batches of so many rows."""
        return max(self.found.values(), key=lambda measured: measured.speedup(self._costs, rows))


def ladder(searches: Mapping[float, Search], costs: VerifyCosts, rows: Sequence[int]) -> list[Way]:
    """Return the ways that are fastest for some acceptance: what a controller may want to change to.

    Args:
        searches: By temperature.
        costs: Of target passes.
        rows: Batch sizes.
    """
    wanted: dict[str, Way] = {}
    for search in searches.values():
        for batch in rows:
            needed = [(measured, measured.cost(costs, batch)) for measured in search.found.values()]
            for factor in (1.0, 0.75, 0.5, 1.25):
                best, _ = max(needed, key=lambda pair: _scaled(pair[0], factor) / pair[1])
                wanted.setdefault(json.dumps(best.way), best.way)
    return list(wanted.values())


def _scaled(measured: Measured, factor: float) -> float:
    """Return the tokens per step if every depth accepted `factor` times as often."""
    return expected_tokens_by_depth([min(1.0, factor * rate) for rate in conditional(measured.reach)])
