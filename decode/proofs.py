"""The checks of `python -m decode.prove`: one function for each property, with what it counted.

Each decodes with drafts and compares with something that knows nothing of them; see `decode.prove`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from decode.checks import StateError
from decode.compare import first_difference
from decode.generation import generate
from decode.law import DECODED, LENGTH, POWER, TOP_K, Cell, Law, choose_law, detectable, p_value, pool
from decode.results import Generation, Stats
from decode.sampling import Sampling
from decode.target import Target

ROWS = 50
"""Samples in one batch."""
TEMPERATURE = 0.8
"""Of sampled texts, where none is given."""
GROSS = 0.3
"""Total-variation distance above which a report of the law warns that it proves little."""


@dataclass(frozen=True)
class Settings:
    """What to decode, and how; see the command's help."""

    accept: str = "match"
    temperature: float | None = None
    """None is 0.8 for texts and 1 for the law."""
    more: tuple[Sampling, ...] = ()
    """Further settings of sampled texts."""
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64
    batch: int | None = None
    """Rows in which texts are decoded, plain ones too; None: alone, and those with drafts also all in one batch."""
    samples: int = 1000
    alpha: float = 1e-6

    def __post_init__(self) -> None:
        """Reject what cannot be checked."""
        checks = {
            "temperature": (self.temperature is None or self.temperature > 0, "above 0 (greedy is checked anyway)"),
            "more": (not any(sampling.greedy for sampling in self.more), "sampled, at temperatures above 0"),
            "batch": (self.batch is None or self.batch >= 1, "at least 1"),
            "samples": (self.samples >= 1, "at least 1"),
            "alpha": (0 < self.alpha < 1, "between 0 and 1"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise ValueError(f"{name} must be {expected}, got {vars(self)[name]}")
        _ = self.sampling  # rejects the others

    @property
    def sampling(self) -> Sampling:
        """Of sampled texts, without a seed."""
        return Sampling(temperature=self.temperature or TEMPERATURE, top_p=self.top_p)


@dataclass
class Check:
    """One property and whether it holds."""

    name: str
    passed: bool | None
    """None if it does not apply or could not be tested."""
    summary: str
    counts: dict[str, Any] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Why a pass proves less than it seems to."""


Options = dict[str, Any]
"""What `generate` is told of the drafts: head and grow, draft_model or proposer, and accept; empty for none."""


def prove(
    target: Target,
    prompts: Sequence[list[int]],
    drafts: Options,
    settings: Settings,
    *,
    tuned: Options | None = None,
) -> Iterator[Check]:
    """Run all checks, yielding each when it is done.

    Args:
        target: The model.
        prompts: Token ids.
        drafts: Keyword arguments of `generate`.
        settings: What to decode.
        tuned: The same, for drafts that follow a plan of `decode.tune`: texts and state are checked with them, too.
    """
    sampled = [settings.sampling, *settings.more]
    checks: list[Callable[[], Check]] = [
        lambda: prove_texts("greedy text", target, prompts, drafts, Sampling(), settings),
        *(partial(prove_seeds, target, prompts, drafts, sampling, settings) for sampling in sampled),
        lambda: prove_state(target, prompts, drafts, settings),
        lambda: prove_law(target, prompts[0], drafts, settings),
    ]
    if tuned is not None:
        checks += [
            lambda: _as_tuned(prove_texts("greedy text", target, prompts, tuned, Sampling(), settings)),
            *(lambda s=s: _as_tuned(prove_seeds(target, prompts, tuned, s, settings)) for s in sampled),
            lambda: _as_tuned(prove_state(target, prompts, tuned, settings)),
        ]
    for run in checks:
        check = run()
        if check.passed and not check.counts["offered"]:
            check.passed = None
            steps = _number(check.counts["steps"], "step")
            check.summary = f"not tested: nothing was drafted in {steps} ({check.summary})"
        elif check.passed and not check.counts["accepted"]:
            check.warnings.append(
                f"no draft was accepted in {_number(check.counts['steps'], 'step')}, so this proves little; give "
                "prompts whose continuation the drafts can guess, or better drafts"
            )
        yield check


def _as_tuned(check: Check) -> Check:
    """Say that drafts followed the plan."""
    return replace(check, name=f"{check.name}, tuned")


def prove_texts(
    name: str, target: Target, prompts: Sequence[list[int]], drafts: Options, sampling: Sampling, settings: Settings
) -> Check:
    """Compare texts with drafts, alone and in one batch, with those of plain decoding alone."""
    seeds = [settings.seed + row for row in range(len(prompts))]
    own = [replace(sampling, seed=seed) for seed in seeds]
    places: dict[str, list[Generation]] = {}
    size = settings.batch or 1
    plain: list[Generation] = []
    drafted: list[Generation] = []
    for start in tqdm(range(0, len(prompts), size), desc=name, unit="batch"):
        rows, settled = prompts[start : start + size], replace(sampling, seed=seeds[start : start + size])
        plain += _decode(target, rows, settled, settings)
        drafted += _decode(target, rows, settled, settings, drafts)
    places["alone" if settings.batch is None else f"in batches of {size}"] = drafted
    if settings.batch is None:
        places["in the batch"] = _decode(target, prompts, replace(sampling, seed=seeds), settings, drafts)
    ties: list[str] = []
    failures: list[str] = []
    for place, results in places.items():
        for row, (expected, got) in enumerate(zip(plain, results, strict=True)):
            difference = first_difference(target, prompts[row], expected.token_ids, got.token_ids, own[row])
            if difference is not None:
                (ties if difference.near_tie else failures).append(f"prompt {row} {place}: {difference}")
    texts = len(places) * len(prompts)
    counts = {"texts": texts, "identical": texts - len(ties) - len(failures)}
    every = [result for results in places.values() for result in results]
    counts |= {"near_ties": len(ties), "failures": len(failures)} | _work(every)
    summary = (
        f"{counts['identical']} of {counts['texts']} texts identical, {_number(len(ties), 'near tie')}, "
        f"{len(failures)} other differences"
    )
    return Check(name, not failures, summary, counts, failures + ties)


def prove_seeds(
    target: Target, prompts: Sequence[list[int]], drafts: Options, sampling: Sampling, settings: Settings
) -> Check:
    """Compare sampled texts as `prove_texts` does, where the rule keeps the text of a seed."""
    if settings.accept != "match":
        reason = f"not applicable: {settings.accept} keeps the distribution, not the text of a seed"
        return Check("text of a seed", None, reason)
    check = prove_texts("text of a seed", target, prompts, drafts, sampling, settings)
    penalty = "" if sampling.repetition_penalty == 1 else f", repetition penalty {sampling.repetition_penalty:g}"
    check.summary += f", temperature {sampling.temperature:g}{penalty}"
    return check


def prove_state(target: Target, prompts: Sequence[list[int]], drafts: Options, settings: Settings) -> Check:
    """Decode the first two prompts with all state checked after every step."""
    first, errors, results = prompts[:2], [], []
    seeds = [settings.seed + row for row in range(len(first))]
    samplings = {"greedy": Sampling(), "sampled": replace(settings.sampling, seed=seeds)}
    for kind, sampling in tqdm(samplings.items(), desc="state", unit="batch"):
        try:
            results += _decode(target, first, sampling, settings, drafts, check=True)
        except StateError as error:
            errors.append(f"{kind}: {error}")
    counts = {"batches": len(samplings), "failures": len(errors)} | _work(results)
    summary = (
        f"{_number(len(first), 'prompt')}, greedy and sampled: all caches as a fresh start makes them, after every step"
    )
    if errors:
        summary = f"a cache or the drafter's state went wrong in {len(errors)} of {len(samplings)} batches"
    return Check("state", not errors, summary, counts, errors)


def prove_law(target: Target, prompt: Sequence[int], drafts: Options, settings: Settings) -> Check:
    """Compare the frequencies of sampled continuations with their exact probabilities."""
    samples, temperature = settings.samples, settings.temperature or 1.0
    law = choose_law(target, prompt, temperature, samples)
    settings = replace(settings, max_new_tokens=DECODED)
    results = []
    for number, start in enumerate(tqdm(range(0, samples, ROWS), desc="law", unit="batch")):
        sampling = Sampling(temperature=temperature, top_k=TOP_K, seed=settings.seed + number)
        rows = [law.context] * min(ROWS, samples - start)
        results += _decode(target, rows, sampling, settings, drafts, eos_ids=())
    counts, impossible = law.count([result.token_ids for result in results])
    probs = list(law.probs.values())
    cells = len(pool(probs, samples))
    found = p_value(list(counts.values()), probs, rounding=law.rounding)
    distance = detectable(samples, cells, settings.alpha, rounding=law.rounding)
    check = Check("law", found >= settings.alpha, f"p = {found:.3g} over {cells} cells")
    check.counts = {"samples": samples, "p_value": found, "cells": cells, "distance": distance}
    check.counts |= {"impossible": impossible.total(), "context": law.context}
    check.counts |= _work(results)
    check.summary += f", {samples} texts of {LENGTH} tokens, temperature {temperature:g}, top-k {TOP_K}"
    if impossible:
        check.passed, check.summary = False, f"{impossible.total()} of {samples} texts have probability 0"
        check.details = [f"text {list(text)} came {number} times" for text, number in impossible.most_common()]
    elif cells < 2:
        check.passed, check.summary = None, f"not tested: {samples} texts leave one cell, of probability 1"
        check.warnings = ["give more --samples, or another first prompt"]
    else:
        shows = f"a law off by {distance:.2g} (total variation) would have shown with probability {POWER}"
        check.details = [shows, *([] if check.passed else _worst_cells(counts, law, samples))]
        check.warnings = ["only gross errors would show; give more --samples"] * (distance > GROSS)
    return check


def _worst_cells(counts: dict[Cell, int], law: Law, samples: int) -> list[str]:
    """Return lines on the cells that are furthest off, in standard deviations."""
    expected = {cell: samples * probability for cell, probability in law.probs.items()}
    worst = sorted(counts, key=lambda cell: -abs(counts[cell] - expected[cell]) / expected[cell] ** 0.5)
    return [f"text {list(cell)} came {counts[cell]} times, expected {expected[cell]:.1f}" for cell in worst[:5]]


def _decode(
    target: Target,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    settings: Settings,
    drafts: Options | None = None,
    **options: Any,
) -> list[Generation]:
    options |= drafts or {}
    results = generate(target, prompts, sampling=sampling, max_new_tokens=settings.max_new_tokens, **options)
    assert isinstance(results, list)
    return results


def _work(results: Sequence[Generation]) -> dict[str, Any]:
    """Return what was decoded and how often drafts were accepted."""
    total = Stats.total([result.stats for result in results])
    return {
        "tokens": total.tokens,
        "steps": total.steps,
        "tokens_per_step": round(total.tokens_per_step, 3),
        "offered": sum(total.offered),
        "accepted": sum(total.accepted),
    }


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
