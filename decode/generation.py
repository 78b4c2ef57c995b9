"""`generate` and `stream`: from what a user says to rows, a proposer and a rule, and back to results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from decode.accept import AcceptRule, Block, Match, Rejection
from decode.adaptive import Adaptive
from decode.draft_model import DraftModel
from decode.grow import Chain, Grow, StaticTree
from decode.loop import Decoding, Row
from decode.prompts import Prompt, split_batch, to_token_ids, token_limits
from decode.propose import Drafting, Proposer
from decode.results import Delta, Generation, Stats
from decode.sampling import Sampling, batch_samplers
from decode.stopping import Stopper
from decode.target import Target
from decode.tuned import find_plan
from decode.typical import Typical
from heads import Head, load_head

RULES: dict[str, AcceptRule] = {
    "match": Match(),
    "rejection": Rejection(),
    "block": Block(),
    "typical": Typical(),
}
DRAFT_LENGTH = len(DraftModel.tree)
"""Tokens that a draft model proposes by default."""


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    head: Head | str | Path | None = None,
    draft_model: DraftModel | Target | str | Path | None = None,
    grow: Grow | None = None,
    proposer: Proposer | None = None,
    sampling: Sampling | None = None,
    accept: str | AcceptRule = "match",
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    raw: bool = False,
    logprobs: bool = False,
    adapt: bool = True,
    check: bool = False,
) -> Generation | list[Generation]:
    """Decode prompts, with drafts from a head, a draft model or another proposer, or plainly.

    The output distribution is the target's, unless `accept` is "typical".

    Args:
        target: The model.
        prompts: Text, chat messages or token ids, or a list of these (one batch).
        head: A head or its folder; drafts as `decode.tune` found best for this device and precision, or else in the
            head's own tree, unless `grow` is given.
        draft_model: A small model with the target's tokenizer, or its folder; as it was tuned, or else in a chain,
            unless `grow` is given.
        grow: How guesses become a tree.
        proposer: Any other proposer, instead of a head or a draft model.
        sampling: How tokens are chosen; greedy by default.
        accept: "match" (the text of a seed is the same with any proposer and with none); "rejection" or "block" (the
            same distribution); "typical" (NOT exact: another distribution, more tokens per step); or a rule.
        max_new_tokens: Limit for each prompt; the target's context is a limit too.
        stop: Strings that end a text; they are not part of it.
        eos_ids: Tokens that end a text, instead of the target's own; empty for none.
        raw: Take text prompts as they are, without the chat template.
        logprobs: Return the log-probability of each new token.
        adapt: Let drafts that were tuned change with the text, down to none where they do not pay
            (`decode.adaptive`); else every step drafts what was best on the calibration texts. Plans are for "match".
        check: Debug: after every step compare all caches with fresh ones. Slow.

    Returns:
        One result, or a list in the order of the batch.

    Raises:
        ValueError: If an argument cannot be honoured; nothing was decoded then.
        StateError: With `check`, if a cache is not what its text makes it.
    """
    items, single = split_batch(prompts)
    rows = _rows(target, items, sampling, max_new_tokens, stop, eos_ids, raw=raw, logprobs=logprobs)
    rule = _rule(accept, rows)
    proposer = _proposer(target, head, draft_model, grow, proposer, rule, rows, adapt=adapt)
    deltas = Decoding(target, rows, proposer, rule, live=False, check=check).run()
    results = {delta.row: delta.result for delta in deltas if delta.result is not None}
    return results[0] if single else [results[row] for row in range(len(results))]


def stream(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    head: Head | str | Path | None = None,
    draft_model: DraftModel | Target | str | Path | None = None,
    grow: Grow | None = None,
    proposer: Proposer | None = None,
    sampling: Sampling | None = None,
    accept: str | AcceptRule = "match",
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    raw: bool = False,
    logprobs: bool = False,
    adapt: bool = True,
    check: bool = False,
) -> Iterator[Delta]:
    """Decode like `generate`, yielding text as it becomes final; the call itself checks all arguments."""
    items, _ = split_batch(prompts)
    rows = _rows(target, items, sampling, max_new_tokens, stop, eos_ids, raw=raw, logprobs=logprobs)
    rule = _rule(accept, rows)
    proposer = _proposer(target, head, draft_model, grow, proposer, rule, rows, adapt=adapt)
    return Decoding(target, rows, proposer, rule, live=True, check=check).run()


def _rows(
    target: Target,
    prompts: Sequence[Prompt],
    sampling: Sampling | None,
    max_new_tokens: int,
    stop: str | Sequence[str],
    eos_ids: Sequence[int] | None,
    *,
    raw: bool,
    logprobs: bool,
) -> list[Row]:
    token_ids = [to_token_ids(target, prompt, raw=raw) for prompt in prompts]
    limits = token_limits(target, token_ids, max_new_tokens)
    strings = [stop] if isinstance(stop, str) else stop
    eos = target.eos_ids if eos_ids is None else frozenset(eos_ids)
    samplers = batch_samplers(sampling or Sampling(), token_ids, eos)
    return [
        Row(
            index=i,
            sampler=sampler,
            stopper=Stopper(target.tokenizer, eos, strings, limit),
            stats=Stats(),
            prompt_ids=ids,
            logprobs=[] if logprobs else None,
        )
        for i, (sampler, ids, limit) in enumerate(zip(samplers, token_ids, limits, strict=True))
    ]


def _rule(accept: str | AcceptRule, rows: Sequence[Row]) -> AcceptRule:
    rule = RULES.get(accept) if isinstance(accept, str) else accept
    if rule is None or isinstance(rule, type) or not callable(rule):
        raise ValueError(f"accept must be one of {sorted(RULES)} or a rule, got {accept!r}")
    if rows[0].sampler.sampling.processors and not rule.in_order:
        raise ValueError(
            f"{type(rule).__name__} asks logits processors about drafts that it then drops, which would spoil one with "
            "a state; use accept='match' or 'rejection' with processors"
        )
    return rule


def _proposer(
    target: Target,
    head: Head | str | Path | None,
    draft_model: DraftModel | Target | str | Path | None,
    grow: Grow | None,
    proposer: Proposer | None,
    rule: AcceptRule,
    rows: Sequence[Row],
    *,
    adapt: bool,
) -> Proposer | None:
    if sum(source is not None for source in (head, draft_model, proposer)) > 1:
        raise ValueError("give one of head, draft_model and proposer, not several")
    if isinstance(head, DraftModel):
        raise ValueError("head is a draft model; pass it as draft_model")
    if head is not None:
        loaded = head if isinstance(head, Head) else load_head(head, target, keep_weights=False)
        made = _drafting(target, loaded, grow, None, rule, rows, adapt=adapt)
    elif draft_model is not None:
        model = draft_model
        if isinstance(model, Target):
            model = DraftModel(model, target)
        elif not isinstance(model, DraftModel):
            model = DraftModel.from_pretrained(model, target)
        made = _drafting(target, model, grow, draft_chain(rule, DRAFT_LENGTH), rule, rows, adapt=adapt)
    elif grow is not None:
        raise ValueError("grow shapes the drafts of a head or a draft model, but neither was given")
    else:
        made = proposer
    if isinstance(made, Drafting | Adaptive):
        _check_drafting(target, made, rule, max(len(row.prompt_ids) + row.stopper.limit for row in rows))
    return made


def _drafting(
    target: Target,
    drafts: Head | DraftModel,
    grow: Grow | None,
    untuned: Grow | None,
    rule: AcceptRule,
    rows: Sequence[Row],
    *,
    adapt: bool,
) -> Proposer | None:
    """Return the drafts in the tree that is asked for, else as they were tuned, else in their usual tree."""
    if grow is None and rule.shares_noise:  # what was tuned ranks its drafts; other rules want them drawn
        plan = find_plan(drafts.tuned, target)
        if plan is not None:
            temperature = rows[0].sampler.sampling.temperature
            return plan.adaptive(drafts, temperature) if adapt else plan.fixed(drafts, temperature, len(rows))
    grow = untuned if grow is None else grow
    return Drafting.of(drafts) if grow is None else Drafting(drafts, grow)


def draft_chain(rule: AcceptRule, length: int, *, temperature: float | None = None) -> StaticTree:
    """Return the chain that suits a rule: drawn for those that use the drafts' distribution, ranked for the others."""
    drawn = isinstance(rule, Rejection | Block)
    return Chain(length, draw="without_replacement" if drawn else "none", temperature=temperature)


def _check_drafting(target: Target, drafting: Drafting | Adaptive, rule: AcceptRule, length: int) -> None:
    grows = [drafting.grow] if isinstance(drafting, Drafting) else [arm.grow for arm in drafting.arms]
    width = max(grow.width for grow in grows)
    if isinstance(rule, Block) and width > 1:
        raise ValueError(
            f"block verification is for chains, but the drafts are a tree in which a node has {width} "
            "children; give grow=Chain(length) (--tree-width 1 on the command line), or use accept='rejection'"
        )
    if isinstance(drafting.head, DraftModel) and drafting.head.target is not target:
        raise ValueError(
            f"the draft model was paired with another Target object (of {drafting.head.target.name}), not with this "
            f"one (of {target.name}); make DraftModel(model, target) with the target that decodes"
        )
    if isinstance(drafting.head, DraftModel) and length > drafting.head.model.max_length:
        raise ValueError(
            f"prompt and new tokens may reach {length} tokens, but the draft model was made for "
            f"{drafting.head.model.max_length}; lower max_new_tokens, shorten the prompt, or decode without it"
        )
