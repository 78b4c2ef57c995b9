"""Whether decoding is as fast as `decode.tune` predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode.intervals import speedup_interval
from decode.measure import Answer, measure
from decode.methods import our_runs
from decode.propose import Drafts, Proposer
from decode.results import Stats
from decode.sampling import Sampling
from decode.target import Target
from decode.tuned import Plan


def check(
    target: Target, drafts: Drafts, prompts: Sequence[list[int]], plan: Plan, *, max_new_tokens: int, seed: int
) -> Plan:
    """Decode prompts, plainly and as planned in turn, and return the plan with what came of it.

    Args:
        target: The target.
        drafts: A head or a draft model.
        prompts: Token ids.
        plan: From `decode.tune`.
        max_new_tokens: Of each answer.
        seed: Of the first.
    """
    found = {
        name: {**facts, "checked": _check(target, drafts, prompts, plan, float(name), max_new_tokens, seed)}
        for name, facts in plan.made["by_temperature"].items()
    }
    return replace(plan, made={**plan.made, "by_temperature": found})


def _check(
    target: Target,
    drafts: Drafts,
    prompts: Sequence[list[int]],
    plan: Plan,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Return the speed-up of the prompts beside what the plan says of them."""
    proposers: dict[str, Proposer | None] = {
        "plain": None,
        "fixed": plan.fixed(drafts, temperature, 1),
        "adaptive": plan.adaptive(drafts, temperature),
    }
    answers = []
    for turn, ids in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=seed + turn)
        runs = our_runs(target, proposers, sampling, max_new_tokens)
        if not turn:
            for run in runs.values():
                run(ids)
        answers.append(measure(target, runs, ids, sampling, turn=turn))
    columns = {name: _columns([answer[name] for answer in answers]) for name in proposers}
    stats = Stats.total([answer["fixed"].stats for answer in answers if answer["fixed"].stats is not None])
    arm = plan.choice(temperature, 1).arm
    cost = 1.0 if arm is None else Plan.arm(plan.arms[arm], temperature).cost(1)
    return {
        "prompts": len(prompts),
        "predicted": stats.tokens_per_step / cost,
        "fixed": speedup_interval(*columns["fixed"], *columns["plain"])._asdict(),
        "adaptive": speedup_interval(*columns["adaptive"], *columns["plain"])._asdict(),
        "differences": sum(bool(answer[name].differences) for answer in answers for name in proposers),
        "unexcused": sum(answer[name].unexcused for answer in answers for name in proposers),
    }


def _columns(answers: Sequence[Answer]) -> tuple[list[int], list[float]]:
    """Return tokens and seconds of each answer behind its prefill."""
    stats = [answer.stats for answer in answers if answer.stats is not None]
    return [s.tokens - 1 for s in stats], [s.seconds - s.parts["prefill"] for s in stats]
