"""Ways of decoding prompts that can be compared: ours with any drafts, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from decode.adaptive_lookup import AdaptiveLookup
from decode.costs import VerifyCosts
from decode.draft_model import DraftModel
from decode.dynamic import DynamicTree
from decode.generation import generate, stream
from decode.grow import Chain
from decode.lookup import PromptLookup
from decode.propose import Drafting, Proposer
from decode.results import Stats
from decode.sampling import Sampling
from decode.target import Target
from decode.tuned import find_plan
from heads import Head
from heads.growing import growing_tree
from heads.transfer import to_device

PLAIN, LOOKUP, HF = "plain", "prompt lookup", "transformers"
DRAFT_LENGTHS = (2, 3, 4)
"""Chains that a draft model is measured with."""
HF_LOOKUP = 10
"""Tokens that transformers' prompt lookup proposes."""

Prompts = list[int] | Sequence[list[int]]
"""Token ids of one prompt, or of a batch."""
Way = Callable[[float, int], Proposer | None]
"""From temperature and rows of the batch to what drafts; None for plain decoding."""


@dataclass(frozen=True)
class Run:
    """A method that is ready to decode."""

    decode: Callable[[Sequence[list[int]]], tuple[list[list[int]], list[Stats]]]
    """From a batch to each row's new tokens and counts; there are no counts for transformers' decoding."""
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around it; what it costs is not decoding."""

    def __call__(self, prompts: Prompts) -> list[list[int]]:
        """Return the new tokens of each row."""
        with self.setting():
            return self.decode(as_batch(prompts))[0]


def as_batch(prompts: Prompts) -> list[list[int]]:
    """Return one prompt as a batch of one, and a batch as it is."""
    if isinstance(prompts[0], int):
        return [cast("list[int]", list(prompts))]
    return cast("list[list[int]]", list(prompts))


def our_runs(
    target: Target, proposers: Mapping[str, Proposer | None], sampling: Sampling, max_new_tokens: int
) -> dict[str, Run]:
    """Return a run for each proposer."""

    def ours(proposer: Proposer | None) -> Run:
        def decode(batch: Sequence[list[int]]) -> tuple[list[list[int]], list[Stats]]:
            out = generate(target, list(batch), proposer=proposer, sampling=sampling, max_new_tokens=max_new_tokens)
            assert isinstance(out, list)
            return [row.token_ids for row in out], [row.stats for row in out]

        return Run(decode)

    return {name: ours(proposer) for name, proposer in proposers.items()}


def their_runs(target: Target, draft_model: DraftModel | None, max_new_tokens: int) -> dict[str, Run]:
    """Return transformers' `generate`, greedy and for one row: as it ships, and on packed or compiled layers.

    With drafts: its prompt lookup, and its assisted decoding if there is a draft model.
    """
    kinds: dict[str, dict[str, Any]] = {HF: {}, f"{HF} {LOOKUP}": {"prompt_lookup_num_tokens": HF_LOOKUP}}
    runs = {}
    for name, options in kinds.items():
        run = _theirs(target, max_new_tokens, options)
        runs[name] = Run(run, lambda: _as_shipped(target))
        if target.packed:
            runs[f"{name} ({'packed weights' if target.packed.has_products else 'compiled layers'})"] = Run(run)
    if draft_model is not None:
        model = draft_model.model
        options = {"assistant_model": model.model}
        if model.vocab_size != target.vocab_size:  # one is padded, and transformers takes that for other tokens
            options |= {"tokenizer": target.tokenizer, "assistant_tokenizer": model.tokenizer}
        run = _theirs(target, max_new_tokens, options)
        runs[f"{HF} assisted"] = Run(run, lambda: _as_shipped(target, model))
    return runs


def _theirs(
    target: Target, max_new_tokens: int, options: Mapping[str, Any]
) -> Callable[[Sequence[list[int]]], tuple[list[list[int]], list[Stats]]]:
    def decode(batch: Sequence[list[int]]) -> tuple[list[list[int]], list[Stats]]:
        (ids,) = batch
        prompt = to_device([ids], target.device)
        out = target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(max_new_tokens, target.max_length - len(ids)),
            do_sample=False,
            repetition_penalty=1.0,  # a model's generation config may bring one
            eos_token_id=sorted(target.eos_ids) or None,
            pad_token_id=0,
            **options,
        )
        return [out[0, len(ids) :].tolist()], []

    return decode


@contextmanager
def _as_shipped(*models: Target) -> Iterator[None]:
    """Let models compute as transformers ships them."""
    with ExitStack() as stack:
        for model in models:
            if model.packed is not None:
                stack.enter_context(model.packed.disabled())
        yield


def our_ways(
    target: Target,
    heads: Mapping[str, Head],
    *,
    draft_model: DraftModel | None = None,
    lookup: int | None = None,
    chain: int,
    costs: Callable[[], VerifyCosts],
) -> dict[str, Way]:
    """Return plain decoding, prompt lookup, and for every head and the draft model chains, trees and what was tuned.

    Args:
        target: The target.
        heads: Heads by name; see `name_heads`.
        draft_model: The draft model.
        lookup: Tokens that a second, fixed prompt lookup proposes; None for none.
        chain: Tokens in a head's chain, or as many as it drafts.
        costs: What passes cost, for the prompt lookup that chooses by it; asked when that is opened.
    """
    ways: dict[str, Way] = {PLAIN: _always(None), LOOKUP: lambda *_: AdaptiveLookup(costs())}
    if lookup is not None:
        ways[f"{LOOKUP} {lookup}"] = _always(PromptLookup(length=lookup))
    for name, head in heads.items():
        depth, config = head.drafter().max_depth, head.config
        tree = growing_tree(depth, config.draft_vocab_size or config.vocab_size)
        grown = Drafting.of(head) if head.tree is not None else Drafting(head, DynamicTree.of(tree))
        ways |= _drafting_ways(target, name, head, [Drafting(head, Chain(min(chain, depth))), grown])
    if draft_model is not None:
        chains = [Drafting(draft_model, Chain(length)) for length in DRAFT_LENGTHS]
        ways |= _drafting_ways(target, "draft model", draft_model, chains)
    return ways


def _always(proposer: Proposer | None) -> Way:
    return lambda temperature, rows: proposer


def _drafting_ways(
    target: Target, name: str, drafts: Head | DraftModel, draftings: Sequence[Drafting]
) -> dict[str, Way]:
    """Return these ways by their labels, and those of the plan for this machine if there is one."""
    ways = {_label(name, drafting): _always(drafting) for drafting in draftings}
    plan = find_plan(drafts.tuned, target)
    if plan is not None:
        ways[f"{name} tuned"] = lambda temperature, rows: plan.fixed(drafts, temperature, rows)
        ways[f"{name} adaptive"] = lambda temperature, rows: plan.adaptive(drafts, temperature)
    return ways


def name_heads(folders: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Return a name for each head: its kind, and where several are of one kind, the end of its folder's path.

    Args:
        folders: Head folders.
        kinds: Their head types.

    Raises:
        ValueError: If a folder is given twice.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a head is given twice: {', '.join(folders)}; leave one out")
    names = []
    for path, kind in zip(paths, kinds, strict=True):
        others = [p for p, k in zip(paths, kinds, strict=True) if k == kind and p != path]
        length = next((n for n in range(1, len(path.parts)) if all(p.parts[-n:] != path.parts[-n:] for p in others)), 1)
        names.append(f"{kind} {'/'.join(path.parts[-length:])}" if others else kind)
    return names


def _label(name: str, drafting: Drafting) -> str:
    """Say what drafts, and the shape and the nodes of its trees, root included."""
    shape = "chain" if drafting.grow.width == 1 else "tree"
    dynamic = " (dynamic)" if isinstance(drafting.grow, DynamicTree) else ""
    return f"{name} {shape} {drafting.max_nodes}{dynamic}"


def check_proposers(
    target: Target,
    proposers: Mapping[str, Proposer | None],
    longest: Sequence[int],
    sampling: Sampling,
    max_new_tokens: int,
) -> None:
    """Refuse what cannot be decoded with one of the proposers, before anything is.

    Raises:
        ValueError: If an argument cannot be honoured.
    """
    for proposer in proposers.values():  # the call checks; nothing is decoded
        stream(target, longest, proposer=proposer, sampling=sampling, max_new_tokens=max_new_tokens)


def select(names: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """Keep plain decoding and the methods whose names begin with one of `wanted`; all if it is None.

    Raises:
        ValueError: If no name begins so.
    """
    if wanted is None:
        return list(names)
    unknown = [start for start in wanted if not any(name.startswith(start) for name in names)]
    if unknown:
        raise ValueError(
            f"no method begins with {unknown}; there are {', '.join(names)} (transformers' own, where temperature 0 "
            "and 1 row are measured)"
        )
    return [name for name in names if name == PLAIN or name.startswith(tuple(wanted))]
