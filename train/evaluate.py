"""Evaluation by real decoding: held-out prompts, greedy, plain and with the head, one at a time and interleaved.

Plain decoding is timed again in every evaluation, next to the others, because a machine's speed drifts; its tokens are
remembered from the first, and every output is compared with them. A difference is a fault (or, in low precision, a near
tie) and is counted, never hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from decode import Chain, Drafting, Generation, StaticTree, Stats, Target, generate
from heads.base import Head
from train.config import EvalConfig


@dataclass(frozen=True)
class Decoded:
    """One prompt decoded in one way."""

    method: str
    stats: Stats
    same: bool
    """Whether the tokens are those of plain decoding."""


class Evaluation:
    """Decodes `prompts`, token ids, with a head in training; each process takes its share of them."""

    def __init__(
        self,
        accelerator: Accelerator,
        target: Target,
        head: Head,
        prompts: Sequence[list[int]],
        config: EvalConfig,
    ) -> None:
        self._accelerator = accelerator
        self._target = target
        self._prompts = prompts[accelerator.process_index :: accelerator.num_processes]
        self._max_new_tokens = config.max_new_tokens
        self._plain: dict[int, list[int]] = {}
        depth = min(head.drafter().max_depth, len(config.tree))
        self._methods = {
            "plain": None,
            "chain": Drafting(head, Chain(depth)),
            "tree": Drafting(head, StaticTree(tree_paths(config.tree[:depth]))),
        }

    def __call__(self, give_up: Callable[[], bool]) -> Mapping[str, float] | None:
        """Return what `summarise` makes of all prompts, or None if `give_up` said so in any process."""
        names = list(self._methods)
        decoded: list[Decoded] = []
        hide = not self._accelerator.is_main_process
        for number, prompt in enumerate(tqdm(self._prompts, desc="evaluate", leave=False, disable=hide)):
            if number == 0:
                for name in names:  # the first calls allocate
                    self._decode(name, prompt, 2)
            first = number % len(names)  # no way of decoding always comes first
            outputs = {name: self._decode(name, prompt, self._max_new_tokens) for name in names[first:] + names[:first]}
            plain = self._plain.setdefault(number, outputs["plain"].token_ids)
            decoded += [Decoded(name, output.stats, output.token_ids == plain) for name, output in outputs.items()]
            if give_up():
                break
        given_up = torch.tensor(float(give_up()), device=self._accelerator.device)
        if self._accelerator.reduce(given_up, "sum").item() > 0:
            return None
        return summarise(gather_object(decoded))

    def _decode(self, name: str, prompt: list[int], max_new_tokens: int) -> Generation:
        output = generate(self._target, prompt, proposer=self._methods[name], max_new_tokens=max_new_tokens)
        assert isinstance(output, Generation)  # one prompt, one result
        return output


def tree_paths(branching: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the paths of a tree with `branching[d]` children at depth d: (2, 1) -> (0,), (1,), (0, 0), (1, 0)."""
    depths = range(1, len(branching) + 1)
    return tuple(path for depth in depths for path in product(*map(range, branching[:depth])))


def summarise(decoded: Sequence[Decoded]) -> dict[str, float]:
    """Return the figures of an evaluation.

    Without a prefix they are the tree's, `chain/...` the chain's: tokens_per_step and the half-width of its 95 %
    confidence interval over prompts, speedup (plain decoding's seconds over this one's) and accept_rate/depth<d>
    (given that the parent was accepted). `mismatches` counts outputs that differ from plain decoding's, those of later
    plain runs included.
    """
    figures: dict[str, float] = {}
    plain = Stats.total([entry.stats for entry in decoded if entry.method == "plain"])
    for method, prefix in (("tree", ""), ("chain", "chain/")):
        rows = [entry.stats for entry in decoded if entry.method == method]
        # the first token of a row comes from the prefill, not from a step
        rate, margin = ratio([row.tokens - 1 for row in rows], [row.steps for row in rows])
        total = Stats.total(rows)
        figures[f"{prefix}tokens_per_step"] = rate
        figures[f"{prefix}tokens_per_step_margin"] = margin
        figures[f"{prefix}speedup"] = plain.seconds / total.seconds
        for depth, accept_rate in enumerate(total.accept_rates, start=1):
            figures[f"{prefix}accept_rate/depth{depth}"] = accept_rate
    figures["mismatches"] = float(sum(not entry.same for entry in decoded))
    return figures


def ratio(numerators: Sequence[int], denominators: Sequence[int]) -> tuple[float, float]:
    """Return sum(numerators) / sum(denominators) and the half-width of its 95 % interval over independent pairs.

    The interval is the usual linearised one (Cochran 1977, Sampling Techniques, section 6.4), 0 for a single pair.
    Without a single step (every answer ends at once) the ratio is 0.
    """
    if sum(denominators) == 0:
        return 0.0, 0.0
    value = sum(numerators) / sum(denominators)
    n = len(numerators)
    if n < 2:
        return value, 0.0
    squares = sum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return value, 1.96 * math.sqrt(squares * n / (n - 1)) / sum(denominators)
