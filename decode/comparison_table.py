"""What `decode.bench` measured: figures with confidence intervals, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode.counting import Counts
from decode.intervals import Interval, ratio_interval, speedup_interval
from decode.measure import ALL, Answer, Result, markdown
from decode.methods import PLAIN
from decode.results import Stats

DEPTHS = 4
"""Depths whose acceptance is shown."""


@dataclass(frozen=True)
class Summary:
    """One method at one temperature and number of rows on one prompt set, or on all."""

    method: str
    temperature: float
    rows: int
    """Of a full batch."""
    prompts: str
    num_prompts: int
    tokens_per_step: Interval | None
    """None for transformers' decoding, which does not count its steps."""
    speedup: Interval
    """Over plain decoding of the same batches at the same temperature."""
    median_speedup: float
    """Median of the speed-ups of single batches."""
    tokens_per_second: float
    """Of all rows together, end to end."""
    accept_rates: list[float]
    """For each depth, the share of offers accepted, given that the parent was."""
    nodes_per_step: float
    """Of a row's proposed trees, roots included; 1 for plain decoding."""
    draft_cost: float
    """Time of drafting in a step, over a plain step. The prompt's is left out of both."""
    pass_cost: float
    """The same for one pass of the drafter; a lookup is one."""
    time_shares: dict[str, float]
    """Of the parts of the loop; empty for transformers' decoding."""
    differences: int
    """Texts that are not plain decoding's."""
    unexcused: int
    """How many of them are not near ties."""

    @property
    def identical(self) -> int:
        """Texts that are plain decoding's."""
        return self.num_prompts - self.differences


def summarise(results: Sequence[Result]) -> list[Summary]:
    """Return the figures of every method by temperature, rows and prompt set, the last of several being all of them.

    Args:
        results: Those of one set, temperature and number of rows have the same batches in the same order.
    """
    rows = []
    for temperature, number in dict.fromkeys((result.temperature, result.rows) for result in results):
        found = [result for result in results if (result.temperature, result.rows) == (temperature, number)]
        sets = list(dict.fromkeys(result.prompts for result in found))
        for name in [*sets, ALL] if len(sets) > 1 else sets:
            here = [result for result in found if name in (result.prompts, ALL)]
            for method in dict.fromkeys(result.method for result in here):
                rows.append(_summary(here, method, name))
    return rows


def _summary(results: Sequence[Result], method: str, prompts: str) -> Summary:
    answers, plain = _answers(results, method), _answers(results, PLAIN)
    stats = [answer.stats for answer in answers if answer.stats is not None]
    total = Stats.total(stats)
    counts = [answer.counts or Counts() for answer in answers]
    trees, passes = sum(c.trees for c in counts), sum(c.passes for c in counts)
    drafting = total.parts.get("propose", 0.0) - sum(c.prompt_seconds for c in counts) if trees else 0.0
    plain_step = _step_seconds(plain)
    return Summary(
        method=method,
        temperature=results[0].temperature,
        rows=results[0].rows,
        prompts=prompts,
        num_prompts=sum(answer.rows for answer in answers),
        tokens_per_step=ratio_interval([s.tokens - s.rows for s in stats], [s.steps for s in stats]) if stats else None,
        speedup=speedup_interval(*_columns(answers), *_columns(plain)),
        median_speedup=statistics.median(_rate([a]) / _rate([p]) for a, p in zip(answers, plain, strict=True)),
        tokens_per_second=_rate(answers),
        accept_rates=total.accept_rates,
        nodes_per_step=_share(sum(c.nodes for c in counts), trees) if trees else 1.0,
        draft_cost=_share(_share(drafting, sum(answer.steps for answer in answers)), plain_step),
        pass_cost=_share(_share(drafting, passes), plain_step),
        time_shares=_time_shares(total),
        differences=sum(len(answer.differences) for answer in answers),
        unexcused=sum(answer.unexcused for answer in answers),
    )


def _answers(results: Sequence[Result], method: str) -> list[Answer]:
    return [answer for result in results if result.method == method for answer in result.answers]


def _columns(answers: Sequence[Answer]) -> tuple[list[int], list[float]]:
    return [answer.tokens for answer in answers], [answer.seconds for answer in answers]


def _rate(answers: Sequence[Answer]) -> float:
    """Return tokens per second."""
    return sum(answer.tokens for answer in answers) / sum(answer.seconds for answer in answers)


def _step_seconds(answers: Sequence[Answer]) -> float:
    """Return the time of a step; that of the prefill is left out."""
    stats = Stats.total([answer.stats for answer in answers if answer.stats is not None])
    return _share(stats.seconds - stats.parts.get("prefill", 0.0), sum(answer.steps for answer in answers))


def _time_shares(total: Stats) -> dict[str, float]:
    parts = {**total.parts, "other": total.seconds - sum(total.parts.values())} if total.seconds else {}
    return {part: seconds / total.seconds for part, seconds in parts.items()}


def _share(part: float, whole: float) -> float:
    """Return part / whole; 0 of nothing (no step was taken: every text ended at once)."""
    return part / whole if whole else 0.0


def tables(rows: Sequence[Summary]) -> str:
    """Return as Markdown, for each number of rows, the overall table, those by prompt set and that of the drafts.

    Then the speed-up by rows and temperature, and the throughput, if there are several numbers of rows, and where the
    time goes with 1 row.
    """
    numbers = list(dict.fromkeys(row.rows for row in rows))
    last = rows[-1].prompts
    parts = []
    for number in numbers:
        parts += _tables([row for row in rows if row.rows == number], "" if numbers == [1] else f", rows: {number}")
    overall = [row for row in rows if row.prompts == last]
    if len(numbers) > 1 and any(row.method != PLAIN for row in rows):
        parts += ["## Speed-up by rows and temperature", _sweep(rows)]
    if len(numbers) > 1:
        title = f"## Throughput by rows of the batch; plain decoding with {min(numbers)} is 1"
        parts += [title, _throughput(overall)]
    if 1 in numbers:
        parts += ["## Share of the time", _times([row for row in overall if row.rows == 1])]
    return "\n\n".join(parts)


def _tables(rows: Sequence[Summary], where: str) -> list[str]:
    sets = list(dict.fromkeys(row.prompts for row in rows))
    overall = [row for row in rows if row.prompts == sets[-1]]
    parts = [f"## All {overall[0].num_prompts} prompts, with 95 % intervals{where}", _overall(overall)]
    if len(sets) > 1:
        by_set = sorted((row for row in rows if row.prompts != ALL), key=lambda row: sets.index(row.prompts))
        parts += [f"## Tokens per step by prompt set{where}", _by_set(by_set, lambda row: row.tokens_per_step)]
        parts += [f"## Speed-up over plain decoding by prompt set{where}", _by_set(by_set, lambda row: row.speedup)]
    title = "## Drafts: their cost (a plain step is 1), and the share accepted at each depth that was reached"
    drafts = _drafts(overall)
    return [*parts, title + where, drafts] if drafts else parts


def _overall(rows: Sequence[Summary]) -> str:
    table = []
    for method, mine in _by_method(rows).items():
        cells: dict[str, object] = {"method": method}
        for row in mine:
            cells[f"tokens per step, {_at(row)}"] = _with_interval(row.tokens_per_step)
        for row in mine:
            cells[f"speed-up, {_at(row)}"] = _with_interval(row.speedup)
        for row in mine:
            cells[f"median, {_at(row)}"] = f"{row.median_speedup:.2f}"
        near_ties = sum(row.differences - row.unexcused for row in mine)
        total = f"{sum(row.identical for row in mine)} of {sum(row.num_prompts for row in mine)}"
        cells["texts identical"] = f"{total}, {near_ties} near ties" if near_ties else total
        table.append(cells)
    return markdown(table)


def _by_set(rows: Sequence[Summary], figure: Callable[[Summary], Interval | None]) -> str:
    return markdown(
        [
            {"method": method} | {f"{row.prompts}, {_at(row)}": _with_interval(figure(row)) for row in mine}
            for method, mine in _by_method(rows).items()
            if any(figure(row) is not None for row in mine)
        ]
    )


def _drafts(rows: Sequence[Summary]) -> str:
    """Return a table of what was drafted; empty if no method drafts."""
    table = []
    for row in (row for mine in _by_method(rows).values() for row in mine):
        if row.method == PLAIN or row.tokens_per_step is None:
            continue
        cells = {"method": row.method, "T": f"{row.temperature:g}", "nodes per step": f"{row.nodes_per_step:.1f}"}
        cells |= {"cost per step": f"{row.draft_cost:.2f}", "cost per pass": f"{row.pass_cost:.2f}"}
        for depth in range(DEPTHS):
            reached = depth < len(row.accept_rates)
            cells[f"depth {depth + 1}"] = f"{row.accept_rates[depth]:.2f}" if reached else ""
        table.append(cells)
    return markdown(table) if table else ""


def _sweep(rows: Sequence[Summary]) -> str:
    """Return a table with a line for each method, number of rows and prompt set, and a column for each temperature."""
    lines: dict[tuple[str, int, str], dict[str, object]] = {}
    for method, mine in _by_method(rows).items():
        for row in mine:
            start = {"method": method, "rows": row.rows, "prompts": row.prompts, **dict.fromkeys(map(_at, rows), "")}
            lines.setdefault((method, row.rows, row.prompts), start)[_at(row)] = _with_interval(row.speedup)
    return markdown([line for (method, *_), line in lines.items() if method != PLAIN])


def _throughput(rows: Sequence[Summary]) -> str:
    first = min(row.rows for row in rows)
    plain = {row.temperature: row.tokens_per_second for row in rows if row.method == PLAIN and row.rows == first}
    return markdown(
        [
            {"method": method}
            | {f"rows {row.rows}, {_at(row)}": f"{row.tokens_per_second / plain[row.temperature]:.2f}" for row in mine}
            for method, mine in _by_method(rows).items()
        ]
    )


def _times(rows: Sequence[Summary]) -> str:
    counted = [row for row in rows if row.time_shares]
    parts = dict.fromkeys(part for row in counted for part in row.time_shares)
    return markdown(
        [
            {"method": row.method, "T": f"{row.temperature:g}"}
            | {part: f"{row.time_shares.get(part, 0.0):.2f}" for part in parts}
            for mine in _by_method(counted).values()
            for row in mine
        ]
    )


def _by_method(rows: Sequence[Summary]) -> Mapping[str, list[Summary]]:
    methods = dict.fromkeys(row.method for row in rows)
    return {method: [row for row in rows if row.method == method] for method in methods}


def _at(row: Summary) -> str:
    return f"T={row.temperature:g}"


def _with_interval(figure: Interval | None) -> str:
    return "" if figure is None else f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
