"""`python -m decode.bench TARGET --head DIR … --prompts FILE …`: what drafting gains on this machine, against what.

Every batch of prompts is decoded by every method in turn, in an order that rotates, in one process and on one target
object, after a warm-up. Each text is compared with plain decoding's of the same temperature and seed, token for token.
Intervals are 95 % bootstrap intervals over batches.

Methods: plain decoding; prompt lookup that chooses its length by what passes cost here, and with --lookup N one that
always proposes N tokens; each head as a chain and as its own tree (a small one if it has none); chains from the draft
model; where decode.tune has left a plan for this machine, the tree that it chose and the one that adapts to the text.
At temperature 0 with 1 row also transformers' generate, as it ships and on packed or compiled layers, with its own
prompt lookup and with the draft model as its assistant. Numbers in names of chains and trees are nodes, root included.

DIR gets raw.jsonl (a line for each batch), comparison.json and a picture for each number of rows. A run that was
killed, or found the disk full, continues with the same command. The exit status is 1 if a text of ours differs without
a near tie, 2 for bad input and for files that cannot be written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from decode.adaptive import Adaptive
from decode.chart import save_chart
from decode.comparison import Comparison, theirs_run_at
from decode.comparison_log import ComparisonLog
from decode.comparison_table import Summary, summarise, tables
from decode.costs import CONTEXTS, NODES, measure_costs
from decode.draft_model import DraftModel
from decode.machine import machine
from decode.measure import Result, longest, read_sets, show, to_ids
from decode.methods import HF, LOOKUP, check_proposers, name_heads, our_ways, select, their_runs
from decode.options import add_target_options, check_distinct, load_target
from decode.propose import Drafting, Proposer
from decode.sampling import Sampling
from decode.target import Target
from heads import load_head
from heads.checkpoint import WEIGHTS, read_plans
from heads.files import check_writable
from heads.hub import find_head


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_options(p)
    p.add_argument("--head", nargs="+", default=[], metavar="DIR", help="head folders or hub names, all of this target")
    p.add_argument("--draft-model", metavar="DIR", help="small model with the target's tokenizer; drafts chains")
    p.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`"
    )
    p.add_argument("--num", type=int, default=20, help="first prompts of each file (default 20)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="default 0; several are compared")
    p.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1],
        help="prompts decoded together (default 1); or several; the last batch of a file may be smaller",
    )
    p.add_argument("--methods", nargs="+", help="only these besides plain, by the beginnings of their names")
    p.add_argument("--chain", type=int, default=4, help="tokens in the heads' chains (default 4)")
    p.add_argument("--lookup", type=int, metavar="N", help="also prompt lookup that always proposes N tokens")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, metavar="DIR", help="where results, table and pictures go (default: nowhere)")
    return p


def load(args: argparse.Namespace, folder: Path) -> tuple[Comparison, ComparisonLog]:
    """Load everything, and refuse what cannot be decoded before anything is."""
    for name in ("temperature", "rows"):
        check_distinct(name, vars(args)[name])
    if args.chain < 1:
        raise ValueError(f"--chain: a chain has at least 1 token, got {args.chain}")
    if min(args.rows) < 1:
        raise ValueError(f"--rows: a batch has at least 1 row, got {args.rows}")
    samplings = {t: Sampling(temperature=t, top_p=args.top_p, seed=args.seed) for t in args.temperature}
    files = read_sets(args.prompts, args.num)
    check_writable(folder / "raw.jsonl")
    target = load_target(args, keep_weights=True)  # transformers runs it as it ships, too
    sets = to_ids(target, files, args.max_new_tokens)
    draft_model = None if args.draft_model is None else _load_draft_model(args.draft_model, target)
    loaded = [load_head(name, target, keep_weights=False) for name in args.head]
    heads = dict(zip(name_heads(args.head, [head.kind for head in loaded]), loaded, strict=True))
    log = ComparisonLog(folder / "raw.jsonl")
    ways = our_ways(target, heads, draft_model=draft_model, lookup=args.lookup, chain=args.chain, costs=log.costs)
    greedy = any(theirs_run_at(temperature, rows) for temperature in samplings for rows in args.rows)
    theirs = list(their_runs(target, draft_model, args.max_new_tokens)) if greedy else []
    names = select([*ways, *theirs], args.methods)
    comparison = Comparison(
        target,
        {name: way for name, way in ways.items() if name in names},
        [name for name in theirs if name in names],
        draft_model,
        sets,
        samplings,
        args.rows,
        args.max_new_tokens,
    )
    settings = _settings(args, comparison, _check(comparison))
    nodes = [size for size in NODES if size < min(64, target.max_length)]  # it proposes 32 tokens at most
    costs = (
        None if LOOKUP not in names else lambda: measure_costs(target, nodes=nodes, rows=args.rows, contexts=CONTEXTS)
    )
    log.open(settings, costs)
    return comparison, log


def _load_draft_model(folder: str, target: Target) -> DraftModel:
    model = Target.from_pretrained(folder, dtype=target.dtype, device=target.device, keep_weights=True)
    return DraftModel(model, target, tuned=read_plans(folder))


def _check(comparison: Comparison) -> dict[str, list[str]]:
    """Refuse what cannot be decoded, and return by method how it drafts at each temperature and number of rows."""
    found: dict[str, list[str]] = {name: [] for name in [*comparison.ways, *comparison.theirs]}
    prompt = longest(comparison.sets)
    for temperature, sampling in comparison.samplings.items():
        for rows in comparison.rows:
            # but for the lookup whose costs are in the log: it fits any text
            proposers = {name: way(temperature, rows) for name, way in comparison.ways.items() if name != LOOKUP}
            check_proposers(comparison.target, proposers, prompt, sampling, comparison.max_new_tokens)
            for name, proposer in proposers.items():
                found[name].append(_describe(proposer))
    return found


def _describe(proposer: Proposer | None) -> str:
    if isinstance(proposer, Adaptive):
        return f"adaptive, {len(proposer.arms)} trees, {_digest(repr(proposer.arms).encode())}"
    return repr(proposer.grow if isinstance(proposer, Drafting) else proposer)


def _settings(args: argparse.Namespace, comparison: Comparison, methods: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return all that the answers depend on."""
    draft_model = comparison.draft_model
    return {
        "methods": methods,
        "heads": [_digest((find_head(folder, WEIGHTS) / WEIGHTS).read_bytes()) for folder in args.head],
        "target": comparison.target.fingerprint,
        "draft_model": None if draft_model is None else draft_model.model.fingerprint,
        "prompts": _digest(json.dumps(comparison.sets).encode()),
        "temperature": args.temperature,
        "rows": args.rows,
        "top_p": args.top_p,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "machine": machine(comparison.target),
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        print(
            "error: one command measures everything now: python -m decode.bench TARGET --head DIR … --prompts FILE … "
            "--temperature 0 1 --out DIR (a target folder called compare is ./compare)",
            file=sys.stderr,
        )
        return 2
    args = parser().parse_args(argv)
    command = " ".join(["python -m decode.bench", *argv])
    with ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(TemporaryDirectory()))
        try:
            return _run(args, folder, command)
        except KeyboardInterrupt:
            way_out = "the same command continues" if args.out else "nothing is kept; with --out DIR it could continue"
            print(f"stopped; {way_out}", file=sys.stderr)
            return 130


def _run(args: argparse.Namespace, folder: Path, command: str) -> int:
    try:
        comparison, log = load(args, folder)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        results = comparison.run(log)
    except OSError as error:
        return _cannot_write(folder, error, args)
    rows, place = summarise(results), machine(comparison.target)
    lines = [tables(rows), "", *_differences(results), place]
    status = 1 if any(result.unexcused for result in results if not result.method.startswith(HF)) else 0
    try:  # before tables are shown, which can fail too
        if args.out:
            _write(folder, rows, results, {"command": command, "machine": place})
            lines.append(f"wrote comparison.json and {', '.join(_pictures(rows).values())} to {folder}")
    except OSError as error:
        status = _cannot_write(folder, error, args)
    return status if show(*lines) else 2


def _cannot_write(folder: Path, error: OSError, args: argparse.Namespace) -> int:
    way_out = "the same command continues" if args.out else "make room, or give --out DIR"
    print(f"error: cannot write to {folder} ({error}); {way_out}", file=sys.stderr)
    return 2


def _differences(results: Sequence[Result]) -> list[str]:
    return [
        f"T={result.temperature:g}, rows {result.rows}, {result.method}: {line}"
        for result in results
        for line in result.differences
    ]


def _write(folder: Path, rows: Sequence[Summary], results: Sequence[Result], facts: Mapping[str, Any]) -> None:
    report = {**facts, "rows": [asdict(row) for row in rows], "raw": [asdict(result) for result in results]}
    (folder / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")
    for number, name in _pictures(rows).items():
        save_chart([row for row in rows if row.rows == number], folder / name)


def _pictures(rows: Sequence[Summary]) -> dict[int, str]:
    """Return the name of the picture for each number of rows."""
    numbers = dict.fromkeys(row.rows for row in rows)
    return {number: "comparison.png" if number == 1 else f"comparison-rows-{number}.png" for number in numbers}


if __name__ == "__main__":
    sys.exit(main())
