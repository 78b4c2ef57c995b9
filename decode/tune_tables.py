"""What `decode.tune` found, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode.costs import VerifyCosts
from decode.measure import markdown
from decode.propose import to_grow
from decode.tuned import Choice, Plan


def tables(plan: Plan) -> str:
    """Return all that a plan holds, as Markdown."""
    costs = VerifyCosts.read(plan.costs)
    parts = ["## Cost of a target pass (one node = 1)", _costs(costs)]
    parts += ["## Guesses: share of the target's tokens by rank, given that those above were among the best 4"]
    parts += [_acceptance(plan), _rates(plan)]
    parts += ["## The fastest way, as predicted", _choices(plan)]
    return "\n\n".join(parts)


def _costs(costs: VerifyCosts) -> str:
    table = []
    for rows in sorted({point.rows for point in costs.points}):
        for context in costs.contexts(rows):
            curve = costs.curve(rows, context)
            row: dict[str, object] = {"rows": rows, "context": context, "one node": f"{1e3 * curve[0].seconds:.1f} ms"}
            row["spread"] = f"{(curve[0].high - curve[0].low) / curve[0].seconds:.0%}"
            row |= {f"{point.nodes}": f"{point.seconds / curve[0].seconds:.2f}" for point in curve[1:]}
            table.append(row)
    widest = max(table, key=len)
    return markdown([{column: row.get(column, "") for column in widest} for row in table])


def _acceptance(plan: Plan) -> str:
    table = []
    for temperature, found in plan.made["by_temperature"].items():
        for depth, shares in enumerate(found["acceptance"], start=1):
            row: dict[str, object] = {"T": temperature, "depth": depth}
            table.append(row | {f"rank {rank}": f"{share:.2f}" for rank, share in enumerate(shares, start=1)})
    return markdown(table)


def _rates(plan: Plan) -> str:
    lines = []
    for temperature, found in plan.made["by_temperature"].items():
        rate = found["accept_rate"]
        lines.append(
            f"T={temperature}: a chain's drafts are accepted at a rate of {rate['value']:.2f} "
            f"[{rate['low']:.2f}, {rate['high']:.2f}] ({found['texts']} texts); chains of {_pays(found['chains'])}"
        )
    return "\n".join(lines)


def _pays(chains: Mapping[str, float | None]) -> str:
    """Say from which rate each length of chain pays."""
    return ", ".join(f"{n} never pay" if r is None else f"{n} pay from {r:.2f} on" for n, r in chains.items())


def _choices(plan: Plan) -> str:
    table: list[Mapping[str, object]] = []
    for choice in plan.choices:
        table.append(
            {
                "T": f"{choice.temperature:g}",
                "rows": choice.rows,
                "draft": _name(plan, choice),
                "tokens per step": f"{choice.tokens_per_step:.2f}",
                "needed to pay": f"{choice.needed:.2f}",
                "speed-up": f"{choice.speedup:.2f}",
            }
        )
    return markdown(table)


def _name(plan: Plan, choice: Choice) -> str:
    if choice.arm is None:
        return "nothing"
    return name_way(plan.arms[choice.arm].way)


def name_way(way: Sequence[Sequence[int]] | Mapping[str, float]) -> str:
    """Say which tree is drafted, with as many nodes as it can have."""
    if isinstance(way, Mapping):
        unsure = f", confidence {way['confidence']:g}" if way.get("confidence") else ""
        return f"dynamic tree of {to_grow(way).max_nodes}, depth {way['depth']:g}, width {way['width']:g}{unsure}"
    chain = all(set(path) == {0} for path in way)
    return f"chain of {len(way)}" if chain else f"static tree of {len(way) + 1}"


def checked_table(plan: Plan) -> str:
    """Return the predictions beside what decoding gave, as Markdown."""
    table: list[Mapping[str, object]] = []
    for temperature, found in plan.made["by_temperature"].items():
        checked = found["checked"]
        table.append(
            {"T": temperature, "prompts": checked["prompts"], "predicted": f"{checked['predicted']:.2f}"}
            | {name: _interval(checked[name]) for name in ("fixed", "adaptive")}
            | {"texts that differ": f"{checked['differences']}, {checked['unexcused']} without a near tie"}
        )
    return "## Prediction and real decoding, one row: speed-up behind the prefill\n\n" + markdown(table)


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
