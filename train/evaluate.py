"""Evaluation by real decoding: held-out prompts, greedy and sampled, plain and drafted, one at a time, interleaved.

Plain decoding is timed again in every evaluation, next to the others, because a machine's speed drifts; its tokens are
remembered from the first, and every output is compared with those of its temperature: a prompt has the same seed in
every evaluation. A difference is a fault (or, in low precision, a near tie) and is counted, never hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from decode import Chain, Drafting, Generation, Sampling, StaticTree, Stats, Target, generate
from decode.intervals import ratio_interval, speedup_interval
from heads.base import Head
from heads.packing import pack_linears
from train.config import ConfigError, EvalConfig
from train.samples import Sample, make_sample

Method = Literal["plain", "tree", "chain"]
Way = tuple[Method, float]
"""A method and a temperature."""
PREFIXES: Mapping[Method, str] = {"tree": "", "chain": "chain/"}
SHOWN = 4
"""Prompts of each set whose texts are kept as samples, the first."""


@dataclass(frozen=True)
class Decoded:
    """One prompt decoded in one way."""

    prompt: int
    """Its number, counted over all sets."""
    prompt_set: str
    method: Method
    temperature: float
    stats: Stats
    same: bool
    """Whether the tokens are those of plain decoding at this temperature."""
    sample: Sample | None = None


class Evaluation:
    """Decodes the prompts of `sets`, token ids, with a head in training.

    Each process takes its share of them; but all decode all, in lock-step, where the target is spread over them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        target: Target,
        head: Head,
        sets: Mapping[str, Sequence[list[int]]],
        config: EvalConfig,
    ) -> None:
        self._accelerator = accelerator
        self._target, self._head = target, head
        prompts = enumerate((name, prompt) for name, prompts in sets.items() for prompt in prompts)
        share = slice(None) if target.sharded else slice(accelerator.process_index, None, accelerator.num_processes)
        self._prompts = list(prompts)[share]
        places = (place for prompts_of_set in sets.values() for place in range(len(prompts_of_set)))
        self._shown = {number for number, place in enumerate(places) if place < SHOWN}
        self.samples: Sequence[Sample] = ()
        """Greedy texts with the tree, of the last evaluation and of all processes, in the order of the prompts."""
        self._max_new_tokens = config.max_new_tokens
        self._plain: dict[tuple[int, float], list[int]] = {}
        tree = draft_tree(head, config.tree)
        self._proposers = {"plain": None, "tree": tree, "chain": Drafting(head, Chain(tree.grow.depth))}
        # sampled chains would cost as much again and tell little that greedy ones do not
        self._ways: list[Way] = [
            (method, temperature)
            for temperature in config.temperatures
            for method in (("plain", "chain", "tree") if temperature == 0 else ("plain", "tree"))
        ]

    def __call__(self, give_up: Callable[[], bool]) -> Mapping[str, float] | None:
        """Return what `summarise` makes of all prompts, or None if `give_up` said so in any process."""
        packed = pack_linears(self._head.drafting_model)  # as a head that is loaded from its folder
        try:
            return self._evaluate(give_up)
        finally:
            packed.disable()

    def _evaluate(self, give_up: Callable[[], bool]) -> Mapping[str, float] | None:
        decoded: list[Decoded] = []
        hide = not self._accelerator.is_main_process
        progress = tqdm(self._prompts, desc="evaluate", leave=False, disable=hide)
        for turn, (number, (name, prompt)) in enumerate(progress):
            if turn == 0:
                for way in self._ways:  # the first calls allocate
                    self._decode(way, number, prompt, 2)
            first = turn % len(self._ways)  # no way of decoding always comes first
            ways = self._ways[first:] + self._ways[:first]
            outputs = {way: self._decode(way, number, prompt, self._max_new_tokens) for way in ways}
            for (method, temperature), output in outputs.items():
                plain = self._plain.setdefault((number, temperature), outputs["plain", temperature].token_ids)
                same = output.token_ids == plain
                shown = number in self._shown and (method, temperature) == ("tree", 0)
                sample = make_sample(self._target, name, output) if shown else None
                decoded.append(Decoded(number, name, method, temperature, output.stats, same, sample))
            if self._anyone(give_up()) if self._target.sharded else give_up():
                break
        if self._anyone(give_up()):
            return None
        # where all have decoded all, the first says it for the others
        gathered = gather_object([] if self._target.sharded and hide else decoded)
        in_order = sorted(gathered, key=lambda entry: entry.prompt)
        self.samples = [entry.sample for entry in in_order if entry.sample is not None]
        return summarise(gathered)

    def _anyone(self, said: bool) -> bool:
        """Return whether any process said so."""
        flag = torch.tensor(float(said), device=self._accelerator.device)
        return bool(self._accelerator.reduce(flag, "sum").item() > 0)

    def _decode(self, way: Way, number: int, prompt: list[int], max_new_tokens: int) -> Generation:
        method, temperature = way
        output = generate(
            self._target,
            prompt,
            proposer=self._proposers[method],
            sampling=Sampling(temperature=temperature, seed=number),
            max_new_tokens=max_new_tokens,
        )
        assert isinstance(output, Generation)  # one prompt, one result
        return output


def draft_tree(head: Head, branching: Sequence[int]) -> Drafting:
    """Return `head` with its own tree, or with that of `branching` as deep as it can draft if it has none.

    Raises:
        ConfigError: If nodes have more children than there are tokens to draft.
    """
    try:
        if head.tree is not None:
            return Drafting.of(head)
        depth = min(head.drafter().max_depth, len(branching))
        return Drafting(head, StaticTree(tree_paths(branching[:depth])))
    except ValueError as error:
        ways_out = "raise head.draft_vocab_size or leave it out" + (", or lower eval.tree" if head.tree is None else "")
        raise ConfigError(f"{error}; {ways_out}") from error


def tree_paths(branching: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the paths of a tree with `branching[d]` children at depth d: (2, 1) -> (0,), (1,), (0, 0), (1, 0)."""
    depths = range(1, len(branching) + 1)
    return tuple(path for depth in depths for path in product(*map(range, branching[:depth])))


def summarise(decoded: Sequence[Decoded]) -> dict[str, float]:
    """Return the figures of an evaluation, `[<set>/][t<temperature>/][chain/]<figure>[_low | _high]`.

    Without a set they are those of all prompts (the sets have their own if there are several), without a temperature
    those of greedy decoding, and without `chain/` the tree's. The figures are `tokens_per_step`; `speedup`, the tokens
    per second over plain decoding's at the same temperature; and `accept_rate/depth<d>`, given that the parent was
    accepted. `_low` and `_high` are the ends of the 95 % interval over prompts. `mismatches` alone is one for all: how
    many outputs differ from plain decoding's, those of later plain runs included.
    """
    decoded = sorted(decoded, key=lambda entry: entry.prompt)  # in the order of one process, however many there were
    sets = list(dict.fromkeys(entry.prompt_set for entry in decoded))
    ways: list[Way] = list(dict.fromkeys((entry.method, entry.temperature) for entry in decoded))
    figures: dict[str, float] = {}
    for name in ["", *sets] if len(sets) > 1 else [""]:
        rows: dict[Way, list[Stats]] = {way: [] for way in ways}
        for entry in decoded:
            if name in ("", entry.prompt_set):
                rows[entry.method, entry.temperature].append(entry.stats)
        for method, temperature in ways:
            if method != "plain":
                prefix = (f"{name}/" if name else "") + (f"t{temperature:g}/" if temperature else "") + PREFIXES[method]
                measured = _measure(rows[method, temperature], rows["plain", temperature])
                figures |= {prefix + key: value for key, value in measured.items()}
    figures["mismatches"] = float(sum(not entry.same for entry in decoded))
    return figures


def _measure(rows: Sequence[Stats], plain: Sequence[Stats]) -> dict[str, float]:
    """Return the figures of one way of decoding; the two sequences are of the same prompts."""
    # the first token of a row comes from the prefill, not from a step
    intervals = {"tokens_per_step": ratio_interval([row.tokens - 1 for row in rows], [row.steps for row in rows])}
    intervals["speedup"] = speedup_interval(
        [row.tokens for row in rows],
        [row.seconds for row in rows],
        [row.tokens for row in plain],
        [row.seconds for row in plain],
    )
    for depth in range(max(len(row.offered) for row in rows)):
        accepted = [_at(row.accepted, depth) for row in rows]
        intervals[f"accept_rate/depth{depth + 1}"] = ratio_interval(accepted, [_at(row.offered, depth) for row in rows])
    ends = ("", "_low", "_high")
    return {f"{name}{end}": part for name, whole in intervals.items() for end, part in zip(ends, whole, strict=True)}


def _at(counts: Sequence[int], depth: int) -> int:
    return counts[depth] if depth < len(counts) else 0  # no step of this prompt came that far
