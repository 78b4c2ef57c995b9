"""Ways of decoding a prompt that can be compared: ours with any drafts, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from decode.draft_model import DraftModel
from decode.dynamic import DynamicTree
from decode.generation import generate, stream
from decode.grow import Chain
from decode.propose import Drafting, PromptLookup, Proposer
from decode.results import Generation, Stats
from decode.sampling import Sampling
from decode.target import Target
from heads import Head, load_head
from heads.growing import growing_tree

HF_PACKED, HF = "transformers (packed weights)", "transformers"
DRAFT_LENGTHS = (2, 3, 4)
"""Chains that a draft model is measured with."""

Run = Callable[[list[int]], tuple[list[int], Stats | None]]


def methods(
    target: Target,
    heads: Sequence[str],
    *,
    draft_model: str | None = None,
    sampling: Sampling,
    max_new_tokens: int,
    lookup: int,
    longest: Sequence[int] | None = None,
) -> dict[str, Run]:
    """Return what to compare: name -> function from prompt ids to new tokens and counts.

    Chains are taken from the first head only: further ones are usually its copies with other trees.
    """
    proposers: dict[str, Proposer | None] = {"plain": None, "prompt lookup": PromptLookup(length=lookup)}
    for number, folder in enumerate(heads):
        head = load_head(folder, target)
        drafts = [Drafting.of(head)] if head.tree is not None else []
        if number == 0:
            depth = head.drafter().max_depth
            drafts += [Drafting(head, Chain(length)) for length in sorted({min(2, depth), depth})]
        for drafting in drafts:
            label = _label(head.kind, drafting)
            proposers[label if label not in proposers else f"{label} of {folder}"] = drafting
    if draft_model is not None:
        model = DraftModel.from_pretrained(draft_model, target)
        proposers |= {_label("draft model", d): d for d in (Drafting(model, Chain(n)) for n in DRAFT_LENGTHS)}
    if longest is not None:
        check_proposers(target, proposers, longest, sampling, max_new_tokens)

    def theirs(*, packed: bool) -> Run:
        def run(ids: list[int]) -> tuple[list[int], Stats | None]:
            if packed or target.packed is None:
                return _transformers_generate(target, ids, max_new_tokens), None
            with target.packed.disabled():
                return _transformers_generate(target, ids, max_new_tokens), None

        return run

    runs = our_runs(target, proposers, sampling, max_new_tokens)
    if sampling.greedy:  # transformers draws from another stream: its sampled texts are not comparable
        if target.packed:
            runs[HF_PACKED] = theirs(packed=True)
        runs[HF] = theirs(packed=False)
    return runs


def rivals(
    heads: Mapping[str, Head], *, draft_model: DraftModel | None = None, lookup: int, chain: int
) -> dict[str, Proposer | None]:
    """Return plain decoding, prompt lookup, a draft model's chain, and a chain and a tree of every head.

    Args:
        heads: Heads by name; see `name_heads`.
        draft_model: The draft model.
        lookup: Tokens that prompt lookup proposes.
        chain: Tokens in a chain, or as many as the head drafts.
    """
    proposers: dict[str, Proposer | None] = {"plain": None, "prompt lookup": PromptLookup(length=lookup)}
    if draft_model is not None:
        drafting = Drafting(draft_model, Chain(chain))
        proposers[_label("draft model", drafting)] = drafting
    for name, head in heads.items():
        depth, config = head.drafter().max_depth, head.config
        tree = growing_tree(depth, config.draft_vocab_size or config.vocab_size)
        grown = Drafting.of(head) if head.tree is not None else Drafting(head, DynamicTree.of(tree))
        for drafting in (Drafting(head, Chain(min(chain, depth))), grown):
            proposers[_label(name, drafting)] = drafting
    return proposers


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


def our_runs(
    target: Target, proposers: Mapping[str, Proposer | None], sampling: Sampling, max_new_tokens: int
) -> dict[str, Run]:
    """Return a function from prompt ids to new tokens and counts for each proposer."""

    def ours(proposer: Proposer | None) -> Run:
        def run(ids: list[int]) -> tuple[list[int], Stats | None]:
            out = generate(target, ids, proposer=proposer, sampling=sampling, max_new_tokens=max_new_tokens)
            assert isinstance(out, Generation)
            return out.token_ids, out.stats

        return run

    return {name: ours(proposer) for name, proposer in proposers.items()}


def select(runs: dict[str, Run], wanted: Sequence[str] | None) -> dict[str, Run]:
    """Keep plain decoding and the methods whose names begin with one of `wanted`; all if it is None.

    Raises:
        ValueError: If no name begins so.
    """
    if wanted is None:
        return runs
    unknown = [name for name in wanted if not any(run.startswith(name) for run in runs)]
    if unknown:
        raise ValueError(f"no method begins with {unknown}; there are {', '.join(runs)}")
    return {name: run for name, run in runs.items() if name == "plain" or name.startswith(tuple(wanted))}


def _transformers_generate(target: Target, ids: list[int], max_new_tokens: int) -> list[int]:
    prompt = torch.tensor([ids], device=target.device)
    limit = min(max_new_tokens, target.max_length - len(ids))
    out = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=limit,
        do_sample=False,
        repetition_penalty=1.0,  # a model's generation config may bring one
        eos_token_id=sorted(target.eos_ids) or None,
        pad_token_id=0,
    )
    return list(out[0, len(ids) :].tolist())
