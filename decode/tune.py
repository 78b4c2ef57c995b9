"""`python -m decode.tune TARGET --head HEAD --prompts FILE`: what drafting costs and gains here, and how to draft.

Measures what passes over N nodes cost on this machine, at several context lengths and batch sizes; lets the target
answer the prompts at each temperature; counts how its own tokens rank in the drafter's guesses; looks for the fastest
tree, chain, or nothing for every temperature and batch size; checks some of it by decoding. The plan is written to the
folder of the head or the draft model, for this device and precision, where `generate` finds it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decode.choose import CHAINS, Search, ladder
from decode.costs import CONTEXT, ROWS, VerifyCosts, measure_costs, pass_sizes
from decode.draft_model import DraftModel
from decode.formulas import break_even
from decode.grow import Chain
from decode.intervals import Interval, ratio_interval
from decode.machine import machine
from decode.measure import show
from decode.methods import check_proposers
from decode.options import add_target_options, check_distinct, load_target
from decode.prompts import read_prompts, to_token_ids, token_limits
from decode.propose import Drafting, Drafts
from decode.ranks import acceptance, rank_texts
from decode.replay import write_texts
from decode.sampling import Sampling
from decode.support import UnsupportedTargetError
from decode.target import Target
from decode.tune_check import check
from decode.tune_tables import checked_table, tables
from decode.tuned import Choice, Plan, TunedArm, plan_key, write_plan
from heads import load_head
from heads.checkpoint import TUNED
from heads.hub import is_hub_name


@dataclass(frozen=True)
class Settings:
    """What is tuned for."""

    temperatures: Sequence[float]
    rows: Sequence[int]
    max_new_tokens: int
    most_nodes: int
    contexts: Sequence[int]
    seed: int
    checked: int
    """Prompts that are decoded to compare with the prediction."""


def tune(target: Target, drafts: Drafts, prompts: Sequence[list[int]], settings: Settings) -> Plan:
    """Measure everything and choose; see the module.

    Args:
        target: The target.
        drafts: A head or a draft model.
        prompts: Token ids of the calibration prompts.
        settings: What to tune for.

    Raises:
        ValueError: If all answers end at once, or the trees do not fit into the target's context.
    """
    nodes = pass_sizes(settings.most_nodes)
    costs = measure_costs(target, nodes=nodes, rows=settings.rows, contexts=settings.contexts)
    searches: dict[float, Search] = {}
    made: dict[str, Any] = {"target": target.fingerprint, "machine": machine(target), "by_temperature": {}}
    for temperature in settings.temperatures:
        sampling = Sampling(temperature=temperature, seed=settings.seed)
        texts = write_texts(
            target,
            prompts,
            sampling=sampling,
            max_new_tokens=settings.max_new_tokens,
            feature_layers=drafts.feature_layers,
        )
        if not texts:
            raise ValueError(
                f"at temperature {temperature:g} every answer has one token only, for the target ends it or has no "
                "more context: there is nothing to tune for; give other prompts"
            )
        ranked = rank_texts(drafts, texts, sampling=sampling)
        search = Search(target, drafts, texts, sampling, costs)
        search.run(ranked, most_nodes=settings.most_nodes)
        searches[temperature] = search
        rate = _chain_rate(search)
        made["by_temperature"][f"{temperature:g}"] = {
            "acceptance": acceptance(ranked),
            "accept_rate": rate._asdict(),
            "chains": _chains(search, costs),
            "texts": len(texts),
        }
    return _plan(searches, costs, settings, made)


def _chain_rate(search: Search) -> Interval:
    """Return the acceptance rate of chains, as if it were the same at all depths, with its interval over texts."""
    chains = [m for m in search.found.values() if not isinstance(m.way, Mapping) and all(set(p) == {0} for p in m.way)]
    stats = max(chains, key=lambda measured: len(measured.way)).replayed.by_text
    return ratio_interval([sum(s.accepted) for s in stats], [sum(s.offered) for s in stats])


def _chains(search: Search, costs: VerifyCosts) -> dict[str, float | None]:
    """Return for each length of chain the acceptance rate from which it pays for one row; None for none."""
    rates = {}
    for length in range(1, CHAINS + 1):
        found = search.found.get(json.dumps([list(path) for path in Chain(length).paths]))
        if found is not None:
            overhead = found.step_seconds(costs, 1) / found.plain_seconds(costs, 1) - costs.relative(1, length + 1)
            rates[str(length)] = break_even(
                length, draft_cost=0.0, verify_cost=lambda nodes: costs.relative(1, nodes), overhead=max(0.0, overhead)
            )
    return rates


def _plan(searches: Mapping[float, Search], costs: VerifyCosts, settings: Settings, made: Mapping[str, Any]) -> Plan:
    ways = ladder(searches, costs, settings.rows)
    by_way = [{temperature: search.measure(way) for temperature, search in searches.items()} for way in ways]
    arms = [
        TunedArm(
            way,
            {
                f"{temperature:g}": {str(rows): found.cost(costs, rows) for rows in settings.rows}
                for temperature, found in measured.items()
            },
            {f"{temperature:g}": list(found.reach) for temperature, found in measured.items()},
        )
        for way, measured in zip(ways, by_way, strict=True)
    ]
    choices = []
    for temperature in searches:
        for rows in settings.rows:
            speedups = [measured[temperature].speedup(costs, rows) for measured in by_way]
            best = max(range(len(ways)), key=speedups.__getitem__)
            found = by_way[best][temperature]
            pays = speedups[best] > 1
            choices.append(
                Choice(
                    temperature,
                    rows,
                    best if pays else None,
                    found.tokens_per_step if pays else 1.0,
                    max(1.0, speedups[best]),
                    found.cost(costs, rows),
                )
            )
    return Plan(arms, choices, costs.write(), made=made)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_options(p)
    drafts = p.add_mutually_exclusive_group(required=True)
    drafts.add_argument("--head", metavar="DIR", help="head folder; the plan is written into it")
    drafts.add_argument("--draft-model", metavar="DIR", help="folder of a small model with the target's tokenizer")
    p.add_argument("--prompts", required=True, help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`")
    p.add_argument("--num", type=int, default=16, help="first prompts of the file (default 16)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="of each answer (default 64)")
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="to tune for (default 0 1)")
    p.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help=f"batch sizes (default {_words(ROWS)})")
    p.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[CONTEXT, 64, 1024],
        help="tokens before the tree to measure passes at; the choice is made for those nearest 256",
    )
    p.add_argument(
        "--most-nodes",
        type=int,
        default=64,
        help="largest tree to try, root included, and pass to measure, up to 256 (default 64)",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--check", type=int, default=4, metavar="N", help="decode N prompts to check the prediction")
    p.add_argument("--dry-run", action="store_true", help="show the plan, but do not write it")
    return p


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a text differs from plain decoding's without a near tie."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(parser().parse_args(argv), argv)
    except KeyboardInterrupt:
        print("stopped; a plan is kept from when it was said to be written", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    try:
        target, drafts, prompts, settings = _load(args)
        plan = tune(target, drafts, prompts, settings)
    except (ValueError, OSError, UnsupportedTargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    plan = replace(plan, made={"command": " ".join(["python -m decode.tune", *argv]), **plan.made})
    key = plan_key(target)
    if not _keep(args, key, plan, tables(plan)):
        return 2
    if not settings.checked:
        return 0
    some = [prompts[i * len(prompts) // settings.checked] for i in range(settings.checked)]
    plan = check(target, drafts, some, plan, max_new_tokens=settings.max_new_tokens, seed=settings.seed)
    if not _keep(args, key, plan, "", checked_table(plan)):
        return 2
    return 1 if any(found["checked"]["unexcused"] for found in plan.made["by_temperature"].values()) else 0


def _keep(args: argparse.Namespace, key: str, plan: Plan, *lines: str) -> bool:
    """Write the plan, then show what it says: what was measured for minutes is kept before anything can go wrong.

    Where it cannot be written it is printed.
    """
    folder = Path(args.head or args.draft_model)
    if args.dry_run:
        return show(*lines)
    try:
        write_plan(folder, key, plan)
    except (OSError, ValueError) as error:
        show(*lines)
        print(f"error: cannot write the plan ({error}); it follows, for {folder / TUNED}", file=sys.stderr)
        show(json.dumps({key: asdict(plan)}))
        return False
    said = f"wrote the plan for {key} to {folder / TUNED}, where `generate` and `python -m decode` find it"
    return show(*lines, "", said)


def _load(args: argparse.Namespace) -> tuple[Target, Drafts, list[list[int]], Settings]:
    """Load everything and refuse what cannot be measured, before anything is."""
    for name, least in (("most_nodes", 2), ("max_new_tokens", 2), ("check", 0)):
        if vars(args)[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {vars(args)[name]}")
    for name in ("rows", "context"):
        if min(vars(args)[name]) < 1:
            raise ValueError(f"--{name} takes numbers of at least 1, got {vars(args)[name]}")
    name = args.head or args.draft_model
    elsewhere = is_hub_name(name) if args.head else not Path(name).is_dir()  # a mistyped head folder is called so below
    if elsewhere and not args.dry_run:
        raise ValueError(
            f"{name} is no folder, so no plan can be kept in it; download it (hf download {name} --local-dir FOLDER) "
            "and give the folder, or add --dry-run"
        )
    for temperature in args.temperature:
        Sampling(temperature=temperature)
    check_distinct("temperature", sorted(set(args.temperature)))
    texts = read_prompts(args.prompts, limit=args.num)
    target = load_target(args)
    drafts: Drafts
    if args.head is not None:
        drafts = load_head(args.head, target, keep_weights=False)
    else:
        drafts = DraftModel.from_pretrained(args.draft_model, target)
    prompts = [to_token_ids(target, prompt, raw=False) for prompt in texts]
    token_limits(target, prompts, args.max_new_tokens)
    longest, sampling = max(prompts, key=len), Sampling()
    check_proposers(target, {"drafts": Drafting.of(drafts)}, longest, sampling, args.max_new_tokens)
    settings = Settings(
        temperatures=sorted(set(args.temperature)),
        rows=sorted({1, *args.rows}),
        max_new_tokens=args.max_new_tokens,
        most_nodes=args.most_nodes,
        contexts=args.context,
        seed=args.seed,
        checked=min(args.check, len(prompts)),
    )
    return target, drafts, prompts, settings


if __name__ == "__main__":
    sys.exit(main())
