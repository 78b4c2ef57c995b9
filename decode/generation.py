"""`generate` and `stream`: from what a user says to rows, a proposer and a rule, and back to results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from decode.accept import RULES, AcceptRule
from decode.grow import Grow
from decode.loop import Decoding, Row
from decode.prompts import Prompt, split_batch, to_token_ids, token_limits
from decode.propose import Drafting, Proposer
from decode.results import Delta, Generation, Stats
from decode.sampling import Sampler, Sampling
from decode.stopping import Stopper
from decode.target import Target
from heads import Head, load_head


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    head: Head | str | Path | None = None,
    grow: Grow | None = None,
    proposer: Proposer | None = None,
    sampling: Sampling | None = None,
    accept: str | AcceptRule = "match",
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    raw: bool = False,
) -> Generation | list[Generation]:
    """Decode prompts, with drafts from a head or another proposer, or plainly. The output distribution is the target's.

    Args:
        target: The model.
        prompts: Text, chat messages or token ids, or a list of these (one batch).
        head: A head or its folder; its own tree is used unless `grow` is given.
        grow: How the head's guesses become a tree.
        proposer: Any other proposer, instead of a head.
        sampling: How tokens are chosen; greedy by default.
        accept: "match" (the text of a seed is the same with any proposer and with none), "rejection" (the same law),
            or a rule.
        max_new_tokens: Limit for each prompt; the target's context is a limit too.
        stop: Strings that end a text; they are not part of it.
        eos_ids: Tokens that end a text, instead of the target's own; empty for none.
        raw: Take text prompts as they are, without the chat template.

    Returns:
        One result, or a list in the order of the batch.

    Raises:
        ValueError: If an argument cannot be honoured; nothing was decoded then.
    """
    items, single = split_batch(prompts)
    rows = _rows(target, items, sampling, max_new_tokens, stop, eos_ids, raw=raw)
    proposer = _proposer(target, head, grow, proposer)
    deltas = Decoding(target, rows, proposer, _rule(accept), live=False).run()
    results = {delta.row: delta.result for delta in deltas if delta.result is not None}
    return results[0] if single else [results[row] for row in range(len(results))]


def stream(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    *,
    head: Head | str | Path | None = None,
    grow: Grow | None = None,
    proposer: Proposer | None = None,
    sampling: Sampling | None = None,
    accept: str | AcceptRule = "match",
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    raw: bool = False,
) -> Iterator[Delta]:
    """Decode like `generate`, yielding text as it becomes final; the call itself checks all arguments."""
    items, _ = split_batch(prompts)
    rows = _rows(target, items, sampling, max_new_tokens, stop, eos_ids, raw=raw)
    proposer = _proposer(target, head, grow, proposer)
    return Decoding(target, rows, proposer, _rule(accept), live=True).run()


def _rows(
    target: Target,
    prompts: Sequence[Prompt],
    sampling: Sampling | None,
    max_new_tokens: int,
    stop: str | Sequence[str],
    eos_ids: Sequence[int] | None,
    *,
    raw: bool,
) -> list[Row]:
    token_ids = [to_token_ids(target, prompt, raw=raw) for prompt in prompts]
    limits = token_limits(target, token_ids, max_new_tokens)
    settings = (sampling or Sampling()).with_seed(len(prompts))
    strings = [stop] if isinstance(stop, str) else stop
    eos = target.eos_ids if eos_ids is None else frozenset(eos_ids)
    return [
        Row(i, Sampler(settings, i, ids), Stopper(target.tokenizer, eos, strings, limit), Stats(), ids)
        for i, (ids, limit) in enumerate(zip(token_ids, limits, strict=True))
    ]


def _proposer(
    target: Target, head: Head | str | Path | None, grow: Grow | None, proposer: Proposer | None
) -> Proposer | None:
    if head is None:
        if grow is not None:
            raise ValueError("grow shapes the drafts of a head, but no head was given")
        return proposer
    if proposer is not None:
        raise ValueError("give a head or a proposer, not both")
    loaded = head if isinstance(head, Head) else load_head(head, target)
    return Drafting.of(loaded) if grow is None else Drafting(loaded, grow)


def _rule(accept: str | AcceptRule) -> AcceptRule:
    if not isinstance(accept, str):
        return accept
    if accept not in RULES:
        raise ValueError(f"accept must be one of {sorted(RULES)} or a rule, got {accept!r}")
    return RULES[accept]
