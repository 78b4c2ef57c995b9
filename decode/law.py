"""The exact law of a few sampled tokens, and a test of samples against it whose false-positive rate is known.

The law comes from plain forwards of the model, without trees, caches or the loop. The test is the likelihood-ratio
chi-square: G = 2 sum(count ln(count / expectation)), divided by Williams' (1976) correction. Cells that expect fewer
than 5 samples are pooled. Pearson's statistic would not do: at such expectations its tail beyond 1e-5 is about ten
times too heavy, so that a correct program would fail ten times as often as stated.

How large an error would show: under another law q, G is about noncentral chi-square with noncentrality 2 N KL(q || p),
which is at least 4 N d^2 for a total-variation distance d between the laws of the cells (Pinsker), whatever direction
the error has. The distance stated is the d at which that many samples are beyond the critical value with probability
`POWER`. Errors between cells that are pooled do not count.

In half precision the law itself is known only to rounding. Scores that are off by s change it by a divergence of about
s^2 for each token, so the null hypothesis becomes noncentral by N * LENGTH * s^2, with one bf16 unit of the largest
logit as s. Where rounding may change *which* tokens top-k keeps, a cell ends before that token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.compare import ULPS, tolerance
from decode.sampling import Sampler, Sampling
from decode.target import Target
from heads.transfer import to_device

LENGTH, TOP_K = 3, 4
"""New tokens of a sample that are judged, and how many may stand at each place: 64 cells."""
DECODED = 8
"""New tokens of a sample: a tree is cut to what is still wanted, so few would leave most of it untested."""
CONTEXT = 16
"""Tokens before them."""
POWER = 0.999
"""Probability with which an error of the stated size shows."""
LEAST_EXPECTED = 5.0
ENOUGH_CELLS = 8

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """The law of the next `LENGTH` tokens."""

    context: list[int]
    probs: dict[Cell, float]
    """By text; by the beginning of a text where a near tie decides which tokens top-k keeps next."""
    rounding: float
    """Divergence that rounding may cause; see the module."""

    def count(self, texts: Sequence[Sequence[int]]) -> tuple[dict[Cell, int], Counter[Cell]]:
        """Return how many texts fell in each cell, in the order of `probs`, and how many of which no cell allows."""
        counts = dict.fromkeys(self.probs, 0)
        impossible: Counter[Cell] = Counter()
        for text in texts:
            beginnings = (tuple(text[:length]) for length in range(LENGTH + 1))
            cell = next((beginning for beginning in beginnings if beginning in counts), None)
            if cell is None:
                impossible[tuple(text[:LENGTH])] += 1
            else:
                counts[cell] += 1
        return counts, impossible


@torch.inference_mode()
def exact_law(target: Target, context: Sequence[int], temperature: float) -> Law:
    """Return the law of the next `LENGTH` tokens with top-k `TOP_K`, by one plain forward for each place.

    Args:
        target: The model.
        context: Tokens before.
        temperature: Above 0.
    """
    sampler = Sampler(Sampling(temperature=temperature, top_k=TOP_K, seed=0), 0, context)
    ended: dict[Cell, float] = {}
    open_cells: dict[Cell, float] = {(): 1.0}
    gap = 0.0
    for _ in range(LENGTH):
        if not open_cells:
            break
        ids = to_device([[*context, *cell] for cell in open_cells], target.device)
        logits = target.model(input_ids=ids, use_cache=False).logits[:, -1]
        longer: dict[Cell, float] = {}
        for (cell, mass), row in zip(open_cells.items(), logits, strict=True):
            allowed = tolerance(target.dtype, float(row.abs().max()))
            gap = max(gap, allowed)
            if _cut_in_a_tie(row, allowed):
                ended[cell] = mass
                continue
            probs = sampler.probs(row, cell)
            longer |= {(*cell, token): mass * float(probs[token]) for token in probs.nonzero()[:, 0].tolist()}
        open_cells = longer
    return Law(list(context), ended | open_cells, LENGTH * (gap / ULPS / temperature) ** 2)


def _cut_in_a_tie(logits: Tensor, allowed: float) -> bool:
    """Whether rounding may decide which tokens top-k keeps."""
    if len(logits) <= TOP_K:
        return False
    best = logits.double().topk(TOP_K + 1).values
    return float(best[-2] - best[-1]) <= allowed


def choose_law(target: Target, prompt: Sequence[int], temperature: float, samples: int) -> Law:
    """Return the law behind the prompt's end, or an earlier token where this one has too few cells to test.

    Args:
        target: The model.
        prompt: Token ids.
        temperature: Above 0.
        samples: N, which decides what is pooled.
    """
    best: tuple[int, Law] | None = None
    for end in range(len(prompt), max(0, len(prompt) - CONTEXT), -1):
        law = exact_law(target, prompt[max(0, end - CONTEXT) : end], temperature)
        size = len(pool(list(law.probs.values()), samples))
        if best is None or size > best[0]:
            best = size, law
        if size >= ENOUGH_CELLS:
            break
    if best is None:
        raise ValueError("the prompt is empty; give at least one token")
    return best[1]


def pool(probs: Sequence[float], samples: int) -> list[list[int]]:
    """Group cells so that each group but a lone one expects at least 5 samples; the rarest are pooled in the first."""
    groups: list[list[int]] = []
    pooled: list[int] = []
    expected = 0.0
    for cell in sorted(range(len(probs)), key=lambda i: probs[i]):
        if samples * probs[cell] < LEAST_EXPECTED or 0 < expected < LEAST_EXPECTED:
            pooled.append(cell)
            expected += samples * probs[cell]
        else:
            groups.append([cell])
    return [pooled, *groups] if pooled else groups


def p_value(counts: Sequence[int], probs: Sequence[float], *, rounding: float = 0.0) -> float:
    """Return the probability that samples of a law are as far from it as these, or 1 if there is nothing to test.

    Args:
        counts: Samples in each of C cells.
        probs: C probabilities that add up to 1.
        rounding: Divergence that is no error; see `Law.rounding`.
    """
    samples = sum(counts)
    groups = pool(probs, samples)
    freedom = len(groups) - 1
    if freedom < 1:
        return 1.0
    law = torch.tensor([sum(probs[cell] for cell in group) for group in groups], dtype=torch.float64)
    seen = torch.tensor([sum(counts[cell] for cell in group) for group in groups], dtype=torch.float64)
    statistic = 2 * torch.special.xlogy(seen, seen / (samples * law)).sum()
    williams = 1 + (float((1 / law).sum()) - 1) / (6 * samples * freedom)
    return survival(float(statistic) / williams, freedom, samples * rounding)


def detectable(samples: int, cells: int, alpha: float, *, rounding: float = 0.0) -> float:
    """Return the total-variation error whose p-value would be below `alpha` with probability `POWER`; see the module.

    Args:
        samples: N.
        cells: Of the test, after pooling.
        alpha: p-value below which a law counts as wrong.
        rounding: Divergence that is no error; see `Law.rounding`.
    """
    if cells < 2:
        return 1.0
    critical = _smallest(lambda x: survival(x, cells - 1, samples * rounding) <= alpha)
    needed = _smallest(lambda x: survival(critical, cells - 1, x) >= POWER)
    return min(1.0, math.sqrt(needed / (4 * samples)))


def survival(statistic: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return the probability that a chi-square variable is above `statistic`, as a Poisson mixture of central ones."""
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 60
    extra = torch.arange(max(0, int(mean - spread)), int(mean + spread) + 1, dtype=torch.float64)
    weights = (torch.special.xlogy(extra, torch.tensor(mean).double()) - mean - torch.lgamma(extra + 1)).exp()
    half = torch.full_like(extra, max(0.0, statistic) / 2)
    return float((weights * torch.special.gammaincc(freedom / 2 + extra, half)).sum())


def _smallest(holds: Callable[[float], bool]) -> float:
    """Return the smallest positive number from which on `holds` is true."""
    high = 1.0
    while not holds(high):
        high *= 2
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
