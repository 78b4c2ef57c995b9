"""`python -m decode TARGET PROMPT`: generate from the shell, with live output.

Without a prompt, standard input is the prompt. The text goes to standard output, the statistics to standard error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Literal

from decode.adaptive_lookup import AdaptiveLookup
from decode.costs import CONTEXTS, measure_costs
from decode.generation import DRAFT_LENGTH, RULES, draft_chain, stream
from decode.grow import Grow, StaticTree
from decode.lookup import PromptLookup
from decode.options import (
    TREE_OPTIONS,
    add_target_options,
    add_tree_options,
    dynamic_tree,
    load_target,
    tree_settings,
)
from decode.propose import Drafting, Proposer
from decode.sampling import Sampling
from decode.support import UnsupportedTargetError
from decode.target import Target
from heads import Head, load_head

LOOKUP_NODES = (1, 2, 4, 8, 16, 32)
"""Sizes of the passes that `--lookup` measures."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode",
        description="Generate text; drafts change the speed, not the text (unless you choose --accept typical).",
    )
    add_target_options(p)
    p.add_argument("prompt", nargs="?", help="the prompt; standard input if left out")
    drafts = p.add_mutually_exclusive_group()
    drafts.add_argument("--head", help="folder of a trained head, or its name on the hub")
    drafts.add_argument(
        "--draft-model", metavar="DIR", help="small model with the target's tokenizer, folder or hub name"
    )
    drafts.add_argument(
        "--lookup",
        nargs="?",
        const="auto",
        type=_lookup_length,
        metavar="N",
        help="draft up to N tokens by prompt lookup; without N (or auto) as many as pay, which is measured first",
    )
    p.add_argument(
        "--fixed",
        action="store_true",
        help="draft in every step as decode.tune found best, without changing with the text",
    )
    p.add_argument("--draft-length", type=int, metavar="N", help=f"tokens the draft model proposes ({DRAFT_LENGTH})")
    p.add_argument("--draft-temperature", type=float, metavar="T", help="of the draft model; default: the target's")
    p.add_argument(
        "--accept",
        choices=list(RULES),
        default="match",
        help="match (default; the text of a seed is the same with any drafts), rejection, block: exact; "
        "typical: NOT exact, changes what the model says",
    )
    p.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="limit (default 256)")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--top-k", type=int, metavar="K", help="sample from the K best tokens only")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="… from the best with probability P together")
    p.add_argument("--min-p", type=float, default=0.0, metavar="P", help="… from those at least P times the best")
    p.add_argument("--typical-p", type=float, default=1.0, metavar="P", help="… from the P most typical in surprise")
    p.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="divide scores of tokens seen, prompt too"
    )
    p.add_argument("--presence-penalty", type=float, default=0.0, metavar="C", help="lower scores of tokens written")
    p.add_argument("--frequency-penalty", type=float, default=0.0, metavar="C", help="… once for each time")
    p.add_argument("--seed", type=int, help="drawn and shown if left out")
    p.add_argument("--raw", action="store_true", help="no chat template around the prompt")
    add_tree_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, UnsupportedTargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _grow(args: argparse.Namespace, head: Head | None) -> Grow | None:
    """Return the tree that is asked for, or None for the drafts' own."""
    chain = _chain(args)
    settings = tree_settings(args)
    if not settings:
        return chain
    if head is not None:
        return dynamic_tree(settings, Drafting.of(head).grow)
    if args.draft_model is None:
        options = ", ".join(f"--tree-{name}" for name in TREE_OPTIONS)
        raise ValueError(f"{options} are for a --head or a --draft-model")
    rule = RULES[args.accept]
    if args.draft_temperature is not None and not rule.shares_noise:
        raise ValueError(
            f"--draft-temperature has no effect on a dynamic tree with --accept {args.accept}, which does not share "
            "the target's noise; leave it out"
        )
    own = draft_chain(rule, DRAFT_LENGTH) if chain is None else chain
    return replace(dynamic_tree(settings, own), temperature=args.draft_temperature)


def _chain(args: argparse.Namespace) -> StaticTree | None:
    """Return the chain that a draft model is asked for, or None for the default."""
    if args.draft_length is None and args.draft_temperature is None:
        return None
    if args.draft_model is None:
        raise ValueError("--draft-length and --draft-temperature are for a --draft-model")
    length = DRAFT_LENGTH if args.draft_length is None else args.draft_length
    rule = RULES[args.accept]
    chain = draft_chain(rule, length, temperature=args.draft_temperature)
    if args.draft_temperature is not None and (
        args.temperature == 0 or not (rule.shares_noise or chain.draw != "none")
    ):
        raise ValueError(
            f"--draft-temperature has no effect on the best tokens, which --temperature {args.temperature:g} "
            f"--accept {args.accept} drafts; leave it out"
        )
    return chain


def _lookup_length(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor auto; write the prompt before --lookup, or --lookup auto"
        ) from None


def _lookup(length: int | Literal["auto"] | None, target: Target) -> Proposer | None:
    if length is None:
        return None
    if length == "auto":
        return AdaptiveLookup(measure_costs(target, nodes=LOOKUP_NODES, contexts=CONTEXTS, repeats=5))
    return PromptLookup(length=length)


def _run(args: argparse.Namespace) -> int:
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        typical_p=args.typical_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
    )
    if args.fixed and args.head is None and args.draft_model is None:
        raise ValueError("--fixed is for a --head or a --draft-model")
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    target = load_target(args)
    head = None if args.head is None else load_head(args.head, target, keep_weights=False)
    pieces = stream(
        target,
        prompt,
        head=head,
        draft_model=args.draft_model,
        grow=_grow(args, head),
        proposer=_lookup(args.lookup, target),
        sampling=sampling,
        accept=args.accept,
        max_new_tokens=args.max_new_tokens,
        adapt=not args.fixed,
        stop=args.stop,
        raw=args.raw,
    )
    for piece in pieces:
        print(piece.text, end="", flush=True)
        if piece.result is not None:
            stats = piece.result.stats
            rates = " ".join(f"{rate:.2f}" for rate in stats.accept_rates) or "none"
            seed = "" if sampling.greedy else f"; seed {piece.result.seed}"
            exact = "" if RULES[args.accept].exact or sampling.greedy else f"; {args.accept} acceptance, NOT exact"
            print(flush=True)
            print(
                f"[{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} per step, "
                f"{stats.tokens / stats.seconds:.1f} per second; accepted by depth: {rates}; "
                f"ended by {piece.result.finish_reason}{seed}{exact}]",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
