"""Check on your own model, machine and text that drafting does not change what the model says.

    python -m decode.prove TARGET --head DIR --prompts FILE

Four checks. Each decodes with the drafts and compares with something that knows nothing of them.

  greedy text     Every prompt alone, and all of them as one batch: the text must be plain decoding's, token for token.
                  With --batch ROWS in batches only, plain decoding too.
  text of a seed  The same at each --temperature, and with --repetition-penalty at the last; each prompt has a seed.
                  Only `match` keeps the text of a seed; `rejection` and `block` keep the distribution.
  state           The first two prompts again, greedy and sampled. After every step all cached keys and values must be
                  what a fresh prefill makes, and the drafter's next guess that of a fresh drafter. A drafter that goes
                  wrong does not show in the text, only in the speed; here it does.
  law             The last tokens of the first prompt, continued --samples times by three tokens (top-k 4). How often
                  each continuation came must agree with its exact probability, from plain forwards of the model. The
                  report says how large an error that many samples would show: to halve it, take four times as many.

A text may differ in one way: where the two best scores are closer than rounding (1e-4 in float32, 4 bf16 units in half
precision), a pass over several tokens may choose the other one. Such a near tie is looked up in a plain forward, shown
and counted, not failed. In float64 there is none.

--alpha is the probability that the whole command fails though nothing is wrong: only the law is left to chance. Seeds
are fixed, so the same command gives the same result. Do not try seeds until one passes.

Drafts have a fixed shape: the head's own tree, or a chain. With `match`, where decode.tune has left a plan for this
machine, texts and state are checked with drafts that follow it, too.

The exit status is 0 if checks pass and none fails, 1 if one fails or nothing was drafted, 2 if the input is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode.children import Draw
from decode.draft_model import DraftModel
from decode.dynamic import DynamicTree
from decode.generation import DRAFT_LENGTH, RULES, draft_chain, stream
from decode.grow import Chain, Grow, StaticTree
from decode.lookup import PromptLookup
from decode.machine import machine
from decode.measure import show, write_report
from decode.options import add_target_options, load_target
from decode.prompts import read_prompts, to_token_ids, token_limits
from decode.proofs import TEMPERATURE, Check, Options, Settings, prove
from decode.sampling import Sampling
from decode.target import Target
from decode.tuned import find_plan
from heads import Head, load_head
from heads.files import check_writable

SHOWN = 10
"""Lines of detail for each check."""
MARKS = {True: "PASS", False: "FAIL", None: "----"}


def find_drafts(
    target: Target, *, head: str | None, draft_model: str | None, lookup: int | None, accept: str
) -> tuple[Options, str]:
    """Return what `generate` is told of the drafts, and what a reader is.

    `rejection` and `block` are given drawn drafts: of ranked ones they would check only a part.

    Args:
        target: The target.
        head: Head folder; or
        draft_model: Folder or hub name; or
        lookup: Tokens that prompt lookup proposes.
        accept: Acceptance rule.
    """
    drafts: Options = {"accept": accept}
    if head is not None:
        loaded = load_head(head, target, keep_weights=False)
        grow = _grow(loaded, accept)
        kind = "chain" if grow.width == 1 else "tree"
        return drafts | {"head": loaded, "grow": grow}, f"{loaded.kind} head {head}, {kind} of {grow.max_nodes} nodes"
    if draft_model is not None:
        model = DraftModel.from_pretrained(draft_model, target)
        chain = draft_chain(RULES[accept], DRAFT_LENGTH)
        drafts |= {"draft_model": model, "grow": chain}
        return drafts, f"draft model {draft_model}, chain of {chain.max_nodes} nodes"
    assert lookup is not None
    return drafts | {"proposer": PromptLookup(length=lookup)}, f"prompt lookup of up to {lookup} tokens"


def find_tuned(target: Target, drafts: Options) -> Options | None:
    """Return what `generate` is told to follow the drafts' plan for this machine; None if it would not."""
    made = drafts.get("head", drafts.get("draft_model"))
    if made is None or drafts["accept"] != "match" or find_plan(made.tuned, target) is None:
        return None
    return {name: value for name, value in drafts.items() if name != "grow"}


def _grow(head: Head, accept: str) -> Grow:
    """Return the head's own tree, drawn for the rules that use the drafts' distribution; a chain for `block`."""
    draw: Draw = "none" if accept == "match" else "without_replacement"
    if isinstance(head.tree, Mapping):  # its nodes are chosen by their probability, so they cannot be drawn
        dynamic = DynamicTree.of(head.tree)
        return dynamic if accept == "match" else Chain(dynamic.depth, draw=draw)
    if head.tree is None or accept == "block":
        return Chain(head.drafter().max_depth, draw=draw)
    return StaticTree(tuple(tuple(path) for path in head.tree), draw=draw)


def head_lines(facts: dict[str, str]) -> list[str]:
    """Return what is proved on what."""
    return [*(f"{name:8} {fact}" for name, fact in facts.items()), ""]


def check_lines(check: Check) -> list[str]:
    """Return the lines of one check."""
    lines = [f"{MARKS[check.passed]}  {check.name:14}  {check.summary}"]
    if check.counts:
        counts = check.counts
        lines.append(
            f"{'':22}{counts['tokens']} tokens, {counts['tokens_per_step']:.2f} per step; "
            f"drafts accepted {counts['accepted']} times of {counts['offered']}"
        )
    lines += [f"{'':22}{line}" for line in check.details[:SHOWN]]
    if len(check.details) > SHOWN:
        lines.append(f"{'':22}and {len(check.details) - SHOWN} more; --out writes all")
    return lines + [f"{'':22}warning: {warning}" for warning in check.warnings]


def verdict_lines(checks: Sequence[Check], alpha: float) -> list[str]:
    """Return what all checks together say."""
    failed = list(dict.fromkeys(check.name for check in checks if check.passed is False))
    passed = list(dict.fromkeys(check.name for check in checks if check.passed))
    line = f"PASS: {', '.join(passed)}. No sign that drafting changes what this model says."
    if not passed:
        line = "NOTHING PROVED: nothing was drafted; give prompts whose continuation the drafts can guess."
    if failed:
        line = f"FAIL: {', '.join(failed)}. Drafting changes what this model says, or its state goes wrong: a bug."
    elif any(check.warnings for check in checks):
        line += " Mind the warnings."
    chance = f"A correct program fails with probability {alpha:g}: only the law is left to chance."
    if any(check.name == "law" and check.passed is None for check in checks):
        chance = "The law of sampled texts was not tested."
    return ["", line, chance]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_options(p)
    drafts = p.add_mutually_exclusive_group(required=True)
    drafts.add_argument("--head", metavar="DIR", help="head folder; its own tree is used")
    drafts.add_argument("--draft-model", metavar="DIR", help="folder or hub name of a draft model")
    drafts.add_argument("--lookup", type=int, metavar="N", help="draft up to N tokens by prompt lookup")
    p.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`"
    )
    p.add_argument("--num", type=int, default=8, help="first prompts of each file (default 8)")
    p.add_argument("--max-new-tokens", type=int, default=64, help="of each text (default 64)")
    p.add_argument(
        "--accept",
        choices=["match", "rejection", "block"],
        default="match",
        help="acceptance rule (default match); a head's or draft model's drafts are drawn for the other two, and "
        "`block` takes a chain",
    )
    p.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        metavar="T",
        help="above 0; default: 0.8 for texts, 1 for the law, which takes the first of several",
    )
    p.add_argument("--repetition-penalty", type=float, metavar="R", help="sample texts with this penalty too")
    p.add_argument("--top-p", type=float, default=1.0, help="of sampled texts")
    p.add_argument("--batch", type=int, metavar="ROWS", help="decode texts in batches only, to save time")
    p.add_argument("--samples", type=int, default=1000, help="texts drawn for the law (default 1000)")
    p.add_argument("--alpha", type=float, default=1e-6, help="false-positive rate of the command (default 1e-6)")
    p.add_argument("--seed", type=int, default=0, help="of the first prompt; the others count up (default 0)")
    p.add_argument("--out", type=Path, help="write everything as JSON")
    return p


def _load(args: argparse.Namespace) -> tuple[Target, list[list[int]], Options, Settings, str]:
    """Load everything, and refuse what cannot be decoded before anything is."""
    if args.num < 1:
        raise ValueError(f"num must be at least 1, got {args.num}")
    if args.temperature and min(args.temperature) <= 0:
        raise ValueError(f"temperature must be above 0 (greedy is checked anyway), got {min(args.temperature):g}")
    if args.out is not None:
        check_writable(args.out)
    first, *others = args.temperature or [None]
    more = [Sampling(temperature=temperature, top_p=args.top_p) for temperature in others]
    if args.repetition_penalty is not None:
        last = (args.temperature or [TEMPERATURE])[-1]
        more.append(Sampling(temperature=last, top_p=args.top_p, repetition_penalty=args.repetition_penalty))
    settings = Settings(
        accept=args.accept,
        temperature=first,
        more=tuple(more),
        top_p=args.top_p,
        batch=args.batch,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        samples=args.samples,
        alpha=args.alpha,
    )
    prompts = [prompt for name in args.prompts for prompt in read_prompts(name, limit=args.num)]
    target = load_target(args)
    ids = [to_token_ids(target, prompt, raw=False) for prompt in prompts]
    token_limits(target, ids, args.max_new_tokens)
    drafts, name = find_drafts(
        target, head=args.head, draft_model=args.draft_model, lookup=args.lookup, accept=args.accept
    )
    stream(target, ids, max_new_tokens=args.max_new_tokens, **drafts)  # the call checks; nothing is decoded
    return target, ids, drafts, settings, name


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a check fails."""
    args = parser().parse_args(argv)
    try:
        target, prompts, drafts, settings, name = _load(args)
        tuned = find_tuned(target, drafts)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    place = machine(target)
    facts = {
        "target": f"{args.target}, {place['dtype']}, on {place['device']}",
        "drafts": name,
        "rule": args.accept,
        "prompts": f"{len(prompts)} of {', '.join(args.prompts)}; up to {args.max_new_tokens} new tokens each",
    }
    shown = show(*head_lines(facts))
    checks = []
    try:
        for check in prove(target, prompts, drafts, settings, tuned=tuned):
            checks.append(check)
            shown = show(*check_lines(check)) and shown
    except KeyboardInterrupt:
        print("stopped: what is not above was not checked", file=sys.stderr)
        return 130
    passed = any(check.passed for check in checks) and all(check.passed is not False for check in checks)
    shown = show(*verdict_lines(checks, settings.alpha)) and shown
    if args.out is not None:
        command = " ".join(["python -m decode.prove", *(argv or sys.argv[1:])])
        written: dict[str, Any] = {"command": command, "machine": place, **facts, "settings": asdict(settings)}
        written |= {"checks": [asdict(check) for check in checks], "passed": passed}
        if not write_report(args.out, written):
            return 2
    return 2 if not shown else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
