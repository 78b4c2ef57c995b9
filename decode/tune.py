"""`python -m decode.tune TARGET --head HEAD --prompts FILE`: choose the tree that is fastest on this machine and text.

The target answers the prompts; the ranks of its own tokens in the head's guesses give the best tree of every size
(`decode.ranks`), the measured time of verifying N nodes gives each tree's speed, and the fastest is written to the
head's folder, where `generate` finds it. For heads whose guesses depend on the depth only, as Medusa's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from decode.generation import generate
from decode.grow import Chain, Paths
from decode.prompts import read_prompts, to_token_ids, token_limits
from decode.propose import Drafting
from decode.ranks import Ranked, best_tree, rank_text, simulated_tokens_per_step
from decode.results import Generation
from decode.target import Target
from decode.tree import TokenTree, tree_shape
from heads import Head, load_head, read_notes, write_notes
from heads.checkpoint import CONFIG


@torch.inference_mode()
def verify_costs(target: Target, sizes: Iterable[int], *, context: int = 256, repeats: int = 15) -> dict[int, float]:
    """Return the median seconds of one target pass over trees of these sizes, measured round-robin on this machine.

    Args:
        target: The target.
        sizes: Numbers of nodes.
        context: Committed tokens before the tree.
        repeats: Rounds; one more is thrown away to warm up.
    """
    sizes = sorted(set(sizes))
    context = min(context, target.max_length - max(sizes))
    session = target.session(1, context + max(sizes))
    session.prefill([[7] * context])
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats + 1):
        for size in sizes:
            shape = tree_shape((-1, *([0] * (size - 1))))
            tree = TokenTree(torch.full((size,), 7, device=target.device), shape)
            start = time.perf_counter()
            session.score([tree]).logits[0, -1].argmax().item()
            times[size].append(time.perf_counter() - start)
    return {size: statistics.median(seconds[1:]) for size, seconds in times.items()}


@dataclass(frozen=True)
class Choice:
    """A tree and what it should do on this machine."""

    paths: Paths
    size: int
    tokens_per_step: float
    speedup: float
    """Predicted time of plain decoding over predicted time with the tree."""


def choose_tree(texts: Sequence[Ranked], costs: dict[int, float], *, draft_seconds: float) -> list[Choice]:
    """Return the best tree of each measured size, fastest first.

    Args:
        texts: From `rank_text`.
        costs: From `verify_costs`; size 1 must be among them.
        draft_seconds: Time outside the target's pass in a drafting step.
    """
    choices = []
    for size, seconds in costs.items():
        if size == 1:
            continue
        paths = best_tree(texts, size)
        tokens = simulated_tokens_per_step(texts, paths)
        choices.append(Choice(paths, size, tokens, tokens * costs[1] / (seconds + draft_seconds)))
    return sorted(choices, key=lambda choice: -choice.speedup)


@dataclass(frozen=True)
class Calibration:
    """What a head does on a set of prompts."""

    texts: list[Ranked]
    step_seconds: float
    """Median seconds of a drafting step, the target's pass over `step_nodes` nodes included."""
    step_nodes: int


def calibrate(target: Target, head: Head, prompts: Sequence[list[int]], *, max_new_tokens: int) -> Calibration:
    """Decode prompts greedily with a chain and rank the answers in the head's guesses.

    Args:
        target: The target.
        head: The head.
        prompts: Prompt ids.
        max_new_tokens: Length of the answers.
    """
    drafting = Drafting(head, Chain(head.drafter().max_depth))
    texts, steps = [], []
    for ids in tqdm(prompts, desc="calibrate", unit="prompt"):
        out = generate(target, ids, proposer=drafting, max_new_tokens=max_new_tokens)
        assert isinstance(out, Generation)
        text = [*ids, *out.token_ids]
        hidden = target.encode(torch.tensor([text]), [len(text)])[0]
        texts.append(rank_text(head, text, hidden, len(ids)))
        if out.stats.steps:
            steps.append((out.stats.seconds - out.stats.parts["prefill"]) / out.stats.steps)
    return Calibration(texts, statistics.median(steps) if steps else 0.0, drafting.max_nodes)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("target", help="model folder or hub name")
    p.add_argument("--head", required=True, help="head folder; the tree is written into it")
    p.add_argument("--prompts", required=True, help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`")
    p.add_argument("--num", type=int, default=32, help="first prompts of the file (default 32)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64])
    p.add_argument("--size", type=int, help="take the best tree of this many nodes instead of the fastest")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        prompts = read_prompts(args.prompts, limit=args.num)
        sizes = sorted({*args.sizes} if args.size is None else {*args.sizes, args.size})
        if sizes[0] < 2:
            raise ValueError("tree sizes must be at least 2 (the root and a draft); change --size or --sizes")
        target = Target.from_pretrained(args.target, dtype=args.dtype, device=args.device)
        head = load_head(args.head, target)
        if not head.depth_only:
            raise ValueError(
                "tune measures trees for heads whose guesses depend on the depth only, as Medusa's, but those of a "
                f"{head.kind} head depend on the tokens drafted before them too; try trees with `python -m decode "
                f"{args.target} --head {args.head} --tree-depth … --tree-width … --tree-size …` and write the settings "
                'of the fastest into its config.json, such as "tree": {"depth": 4, "width": 4, "size": 10}'
            )
        ids = [to_token_ids(target, prompt, raw=False) for prompt in prompts]
        token_limits(target, ids, args.max_new_tokens)
        if sizes[-1] >= target.max_length:
            raise ValueError(f"a tree of {sizes[-1]} nodes is not below the target's context, {target.max_length}")
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    calibration = calibrate(target, head, ids, max_new_tokens=args.max_new_tokens)
    costs = verify_costs(target, [1, *sizes, calibration.step_nodes])
    # a difference of whole steps, not a sum of parts: on a GPU the parts overlap
    draft_seconds = max(0.0, calibration.step_seconds - costs[calibration.step_nodes])
    choices = choose_tree(calibration.texts, costs, draft_seconds=draft_seconds)
    print(
        "| nodes | verify cost (1 node = 1) | tokens per step | predicted speed-up |",
        "| --- | --- | --- | --- |",
        sep="\n",
    )
    for choice in sorted(choices, key=lambda c: c.size):
        cost = costs[choice.size] / costs[1]
        print(f"| {choice.size} | {cost:.2f} | {choice.tokens_per_step:.2f} | {choice.speedup:.2f} |")
    print(f"drafting and bookkeeping cost {draft_seconds / costs[1]:.2f} of a plain step")
    best = next(choice for choice in choices if args.size in (None, choice.size))
    folder = Path(args.head)
    try:
        write_notes(folder, replace(read_notes(folder), tree=best.paths))
    except OSError as error:
        found = json.dumps(best.paths)
        print(f'error: {error}; put this into {folder / CONFIG} yourself: "tree": {found}', file=sys.stderr)
        return 2
    print(f"wrote the tree of {len(best.paths) + 1} nodes to {folder}")
    if best.speedup <= 1:
        print("drafting does not pay on this machine and text: no tree is predicted to beat plain decoding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
