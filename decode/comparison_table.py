"""What `decode.bench compare` measured: figures with confidence intervals, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode.counting import Counts
from decode.intervals import Interval, ratio_interval, speedup_interval
from decode.measure import ALL, Answer, Result, markdown
from decode.results import Stats

DEPTHS = 4
"""Depths whose acceptance is shown."""


@dataclass(frozen=True)
class Summary:
    """One method at one temperature on one prompt set, or on all."""

    method: str
    temperature: float
    prompts: str
    num_prompts: int
    tokens_per_step: Interval
    speedup: Interval
    """Over plain decoding of the same prompts at the same temperature."""
    accept_rates: list[float]
    """For each depth, the share of offers accepted, given that the parent was."""
    nodes_per_step: float
    """Of the proposed trees, roots included; 1 for plain decoding."""
    draft_cost: float
    """Time of drafting in a step, over a plain step. The prompt's is left out of both."""
    pass_cost: float
    """The same for one pass of the drafter; a lookup is one."""
    differences: int
    """Texts that are not plain decoding's."""
    unexcused: int
    """How many of them are not near ties."""

    @property
    def identical(self) -> int:
        """Texts that are plain decoding's."""
        return self.num_prompts - self.differences


def summarise(results: Mapping[float, Sequence[Result]]) -> list[Summary]:
    """Return the figures of every method by temperature and prompt set, the last of several being all of them.

    Args:
        results: By temperature; those of one set have the same prompts in the same order.
    """
    rows = []
    for temperature, found in results.items():
        sets = list(dict.fromkeys(result.prompts for result in found))
        for name in [*sets, ALL] if len(sets) > 1 else sets:
            plain = _answers(found, "plain", name)
            for method in dict.fromkeys(result.method for result in found):
                rows.append(_summary(method, temperature, name, _answers(found, method, name), plain))
    return rows


def _answers(results: Sequence[Result], method: str, prompts: str) -> list[Answer]:
    mine = [r for r in results if r.method == method and prompts in (r.prompts, ALL)]
    return [answer for result in mine for answer in result.answers]


def _summary(
    method: str, temperature: float, prompts: str, answers: Sequence[Answer], plain: Sequence[Answer]
) -> Summary:
    stats = [answer.stats or Stats() for answer in answers]
    total, base = Stats.total(stats), Stats.total([answer.stats or Stats() for answer in plain])
    counts = [answer.counts or Counts() for answer in answers]
    trees, passes = sum(c.trees for c in counts), sum(c.passes for c in counts)
    drafting = total.parts.get("propose", 0.0) - sum(c.prompt_seconds for c in counts) if trees else 0.0
    plain_step = _share(base.seconds - base.parts.get("prefill", 0.0), base.steps)
    return Summary(
        method=method,
        temperature=temperature,
        prompts=prompts,
        num_prompts=len(answers),
        tokens_per_step=ratio_interval([s.tokens - s.rows for s in stats], [s.steps for s in stats]),
        speedup=speedup_interval(*_columns(answers), *_columns(plain)),
        accept_rates=total.accept_rates,
        nodes_per_step=_share(sum(c.nodes for c in counts), trees) if trees else 1.0,
        draft_cost=_share(_share(drafting, trees), plain_step),
        pass_cost=_share(_share(drafting, passes), plain_step),
        differences=sum(answer.difference is not None for answer in answers),
        unexcused=sum(answer.difference is not None and not answer.near_tie for answer in answers),
    )


def _columns(answers: Sequence[Answer]) -> tuple[list[int], list[float]]:
    return [answer.tokens for answer in answers], [answer.seconds for answer in answers]


def _share(part: float, whole: float) -> float:
    """Return part / whole; 0 of nothing (no step was taken: every text ended at once)."""
    return part / whole if whole else 0.0


def tables(rows: Sequence[Summary]) -> str:
    """Return the overall table, then those by prompt set and of the drafts, as Markdown."""
    sets = list(dict.fromkeys(row.prompts for row in rows))
    overall = [row for row in rows if row.prompts == sets[-1]]
    parts = [f"## All {overall[0].num_prompts} prompts, with 95 % intervals", _overall(overall)]
    if len(sets) > 1:
        by_set = sorted((row for row in rows if row.prompts != ALL), key=lambda row: sets.index(row.prompts))
        parts += ["## Tokens per step by prompt set", _by_set(by_set, lambda row: row.tokens_per_step)]
        parts += ["## Speed-up over plain decoding by prompt set", _by_set(by_set, lambda row: row.speedup)]
    parts += ["## Drafts: their cost (a plain step is 1), and the share accepted at each depth that was reached"]
    return "\n\n".join([*parts, _drafts(overall)])


def _overall(rows: Sequence[Summary]) -> str:
    table = []
    for method, mine in _by_method(rows).items():
        cells: dict[str, object] = {"method": method}
        for row in mine:
            cells[f"tokens per step, {_at(row)}"] = _with_interval(row.tokens_per_step)
        for row in mine:
            cells[f"speed-up, {_at(row)}"] = _with_interval(row.speedup)
        near_ties = sum(row.differences - row.unexcused for row in mine)
        total = f"{sum(row.identical for row in mine)} of {sum(row.num_prompts for row in mine)}"
        cells["texts identical"] = f"{total}, {near_ties} near ties" if near_ties else total
        table.append(cells)
    return markdown(table)


def _by_set(rows: Sequence[Summary], figure: Callable[[Summary], Interval]) -> str:
    return markdown(
        [
            {"method": method} | {f"{row.prompts}, {_at(row)}": _with_interval(figure(row)) for row in mine}
            for method, mine in _by_method(rows).items()
        ]
    )


def _drafts(rows: Sequence[Summary]) -> str:
    table = []
    for row in (row for mine in _by_method(rows).values() for row in mine if row.method != "plain"):
        cells = {"method": row.method, "T": f"{row.temperature:g}", "nodes per step": f"{row.nodes_per_step:.1f}"}
        cells |= {"cost per step": f"{row.draft_cost:.2f}", "cost per pass": f"{row.pass_cost:.2f}"}
        for depth in range(DEPTHS):
            reached = depth < len(row.accept_rates)
            cells[f"depth {depth + 1}"] = f"{row.accept_rates[depth]:.2f}" if reached else ""
        table.append(cells)
    return markdown(table)


def _by_method(rows: Sequence[Summary]) -> dict[str, list[Summary]]:
    methods = dict.fromkeys(row.method for row in rows)
    return {method: [row for row in rows if row.method == method] for method in methods}


def _at(row: Summary) -> str:
    return f"T={row.temperature:g}"


def _with_interval(figure: Interval) -> str:
    return f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
