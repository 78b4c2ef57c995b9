"""Whether two texts are the same, and if not, whether a near tie excuses it.

A pass over N rows rounds differently from a pass over one. Where the two best scores are closer than that rounding,
either token may come out. Such a difference is shown and counted; any other is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decode import noise
from decode.sampling import Sampler, Sampling
from decode.target import Target
from heads.transfer import to_device

ULPS = 4
"""bf16 units of rounding that half precision is allowed."""


@dataclass(frozen=True)
class Difference:
    """The first place where two texts of one prompt part."""

    position: int
    """Index into the new tokens."""
    tokens: tuple[int | None, int | None]
    """The first text's token and the second's; None where it has ended."""
    gap: float
    """How far the worse of the two is below the best score of all, noise included, by a plain forward."""
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding may have made either of them the best."""
        return self.gap <= self.tolerance

    def __str__(self) -> str:
        kind = "near tie" if self.near_tie else "NOT a tie"
        first, second = self.tokens
        return f"token {self.position}: {first} or {second}, gap {self.gap:.2g} (allowed {self.tolerance:.2g}), {kind}"


def first_difference(
    target: Target,
    prompt_ids: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    sampling: Sampling,
    *,
    row: int = 0,
) -> Difference | None:
    """Return where two texts of one prompt part and by how much, or None if they are equal.

    Args:
        target: The target both were decoded on.
        prompt_ids: The prompt.
        first: New tokens of one text.
        second: New tokens of the other.
        sampling: Settings of both, with a seed unless greedy, and without processors that keep a state.
        row: Row of the batch, for the noise.
    """
    if list(first) == list(second):
        return None
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    tokens = (first[same] if same < len(first) else None, second[same] if same < len(second) else None)
    if tokens[0] is None or tokens[1] is None:
        return Difference(same, tokens, float("inf"), 0.0)
    sampler = Sampler(sampling.with_seed(1) if sampling.seed is None else sampling, row, prompt_ids)
    sampler.context += first[:same]
    with torch.inference_mode():
        ids = to_device([sampler.context], target.device)
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
    scores = sampler.scores(logits, [])[0].double()
    if not sampling.greedy:
        everything = torch.arange(len(scores), device=scores.device)
        scores = scores + noise.gumbel([sampler.key(noise.TARGET, len(sampler.context))], everything)[0]
    chosen = scores[list(tokens)]
    # from the best of all, not from each other: in half precision three tokens may tie
    gap = float(scores.max() - chosen.min())
    allowed = tolerance(target.dtype, float(logits.abs().max()))
    if target.dtype in (torch.bfloat16, torch.float16) and not sampling.greedy:
        allowed /= sampling.temperature  # as the scores are
    return Difference(same, tokens, gap, allowed)


def tolerance(dtype: torch.dtype, logit: float) -> float:
    """Return the largest gap that rounding explains, where the largest logit has the size `logit`."""
    if dtype == torch.float64:
        return 0.0
    return 1e-4 if dtype == torch.float32 else ULPS * 2.0**-8 * logit
