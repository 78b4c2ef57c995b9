"""Ways of decoding a prompt that can be compared: ours with any drafts, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from decode.draft_model import DraftModel
from decode.generation import generate, stream
from decode.grow import Chain
from decode.propose import Drafting, PromptLookup, Proposer
from decode.results import Generation, Stats
from decode.sampling import Sampling
from decode.target import Target
from heads import load_head

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
            shape = "chain" if drafting.grow.width == 1 else "tree"
            proposers[f"{head.kind} {shape} {drafting.grow.size}"] = drafting
    if draft_model is not None:
        model = DraftModel.from_pretrained(draft_model, target)
        proposers |= {f"draft model chain {n + 1}": Drafting(model, Chain(n)) for n in DRAFT_LENGTHS}

    if longest is not None:  # what cannot be decoded is refused before anything is; stream decodes nothing by itself
        for proposer in proposers.values():
            stream(target, longest, proposer=proposer, sampling=sampling, max_new_tokens=max_new_tokens)

    def ours(proposer: Proposer | None) -> Run:
        def run(ids: list[int]) -> tuple[list[int], Stats | None]:
            out = generate(target, ids, proposer=proposer, sampling=sampling, max_new_tokens=max_new_tokens)
            assert isinstance(out, Generation)
            return out.token_ids, out.stats

        return run

    def theirs(*, packed: bool) -> Run:
        def run(ids: list[int]) -> tuple[list[int], Stats | None]:
            if packed or target.packed is None:
                return _transformers_generate(target, ids, max_new_tokens), None
            with target.packed.disabled():
                return _transformers_generate(target, ids, max_new_tokens), None

        return run

    runs = {name: ours(proposer) for name, proposer in proposers.items()}
    if sampling.greedy:  # transformers draws from another stream: its sampled texts are not comparable
        if target.packed:
            runs[HF_PACKED] = theirs(packed=True)
        runs[HF] = theirs(packed=False)
    return runs


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
