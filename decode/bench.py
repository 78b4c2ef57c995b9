"""`python -m decode.bench TARGET --head HEAD --prompts FILE …`: what drafting gains on this machine, against what.

Every prompt is decoded by every method in turn, in an order that rotates from prompt to prompt, in one process, on one
target object. Methods: our plain decoding; transformers' `generate` on the same packed weights and as transformers
ships it; prompt lookup; the head as a chain and as its tree; chains from a draft model. Each text is compared with
plain decoding's, token for token.

`python -m decode.bench compare HEAD HEAD … --prompts FILE … --out DIR` compares several heads, greedy and sampled, with
confidence intervals and a picture; `python -m decode.bench compare --help` says how.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from decode.comparison import main as compare_heads
from decode.measure import ALL, Result, longest, machine, markdown, measure, read_sets, to_ids, write_report
from decode.methods import HF, HF_PACKED, Run, methods, select
from decode.results import Stats
from decode.sampling import Sampling
from decode.target import Target
from heads.files import check_writable


def compare(target: Target, runs: dict[str, Run], sets: dict[str, list[list[int]]], sampling: Sampling) -> list[Result]:
    """Run every method on every prompt, interleaved, after one warm-up of each.

    Args:
        target: The target.
        runs: From `methods`; "plain" must be there.
        sets: Prompt ids by prompt set.
        sampling: Settings with a seed, for judging differences.
    """
    warm_up = next(iter(sets.values()))[0]
    for run in runs.values():
        run(warm_up)
    results: list[Result] = []
    for set_name, prompts in sets.items():
        by_name = {name: Result(name, set_name) for name in runs}
        for number, ids in enumerate(tqdm(prompts, desc=set_name, unit="prompt")):
            for name, answer in measure(target, runs, ids, sampling, turn=number).items():
                by_name[name].answers.append(answer)
        results += by_name.values()
    return results


def summarise(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return one row per method and prompt set, and per method over all sets."""
    rows = []
    sets = list(dict.fromkeys(result.prompts for result in results))
    names = [*sets, ALL] if len(sets) > 1 else sets
    for method in dict.fromkeys(result.method for result in results):
        for name in names:
            mine = [r for r in results if r.method == method and name in (r.prompts, ALL)]
            row: dict[str, object] = {"method": method, "prompts": name}
            row["tokens_per_step"] = round(Stats.total([s for r in mine for s in r.stats]).tokens_per_step, 3)
            for base in ("plain", HF_PACKED, HF):
                theirs = [r for r in results if r.method == base and name in (r.prompts, ALL)]
                if theirs:
                    row[f"speed-up over {base}"] = round(_rate(mine) / _rate(theirs), 3)
            different, total = sum(len(r.differences) for r in mine), sum(len(r.answers) for r in mine)
            row["identical"] = f"{total - different}/{total}"
            row["near_ties"] = sum(len(r.differences) - r.unexcused for r in mine)
            row["unexcused"] = sum(r.unexcused for r in mine)
            rows.append(row)
    return rows


def _rate(results: Sequence[Result]) -> float:
    """Tokens per second over all prompts."""
    return sum(r.tokens for r in results) / sum(r.seconds for r in results)


def profile(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return for each of our methods the share of its time in each part of the loop."""
    shares = {}
    for method in dict.fromkeys(r.method for r in results if r.stats):
        total = Stats.total([s for r in results if r.method == method for s in r.stats])
        parts = {**total.parts, "other": total.seconds - sum(total.parts.values())}
        shares[method] = {part: round(seconds / total.seconds, 4) for part, seconds in parts.items()}
    return shares


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("target", help="model folder or hub name")
    p.add_argument("--head", nargs="+", default=[], help="head folders; copies may carry other trees")
    p.add_argument("--draft-model", metavar="DIR", help="small model with the target's tokenizer; drafts chains")
    p.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`"
    )
    p.add_argument("--num", type=int, default=20, help="first prompts of each file (default 20)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lookup", type=int, default=6, help="tokens proposed by prompt lookup (default 6)")
    p.add_argument("--methods", nargs="+", help="only these besides plain, by the beginnings of their names")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device")
    p.add_argument("--out", type=Path, help="write everything as JSON")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a text differs from plain decoding's without a near tie."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:  # a target of this name is ./compare
        return compare_heads(argv[1:])
    args = parser().parse_args(argv)
    try:
        if args.out is not None:
            check_writable(args.out)
        files = read_sets(args.prompts, args.num)
        sampling = Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
        target = Target.from_pretrained(args.target, dtype=args.dtype, device=args.device)
        sets = to_ids(target, files, args.max_new_tokens)
        runs = methods(
            target,
            args.head,
            draft_model=args.draft_model,
            sampling=sampling,
            max_new_tokens=args.max_new_tokens,
            lookup=args.lookup,
            longest=longest(sets),
        )
        runs = select(runs, args.methods)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = compare(target, runs, sets, sampling)
    rows = summarise(results)
    report: dict[str, Any] = {
        "command": " ".join(["python -m decode.bench", *argv]),
        "machine": machine(target),
        "rows": rows,
        "profile": profile(results),
        "differences": [line for result in results for line in result.differences],
        "raw": [asdict(result) for result in results],
    }
    print(markdown(rows))
    print("\nshare of time:", json.dumps(report["profile"], indent=1), sep="\n")
    print("", *report["differences"], report["machine"], sep="\n")
    if args.out is not None and not write_report(args.out, report):
        return 2
    return 1 if any(result.unexcused for result in results if result.method not in (HF, HF_PACKED)) else 0


if __name__ == "__main__":
    sys.exit(main())
