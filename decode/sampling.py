"""From logits to a distribution and from a distribution to a token: one function for plain and speculative decoding.

The order is transformers': penalties, the user's processors, temperature, top-k, top-p, min-p. Temperature 0 is a
one-hot on the best processed token. Randomness is keyed by position (`decode.noise`), so a token depends on the seed,
its place and its context, not on how it was reached.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode import noise


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy."""

    temperature: float = 0.0
    """0 takes the best token (after penalties and processors)."""
    top_k: int | None = None
    """Keep the k best tokens."""
    top_p: float = 1.0
    """Keep the smallest set of best tokens that holds this much probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the best."""
    repetition_penalty: float = 1.0
    """Divide (positive) or multiply (negative) the logits of tokens that occur in prompt or output (Keskar et al.
    2019)."""
    processors: Sequence[LogitsProcessor] = ()
    """Any transformers processors (a `LogitsProcessorList` too). They are called with `[1, length]` ids and `[1, V]`
    scores, for each token of the text once; a processor must be a function of these two, since text may be proposed
    and taken back."""
    seed: int | Sequence[int] | None = None
    """Row r of a batch draws from (seed, r); a list gives row r the noise of a single prompt with `seed[r]`. None
    draws a seed, which the result reports."""

    def __post_init__(self) -> None:
        """Reject values that no distribution has."""
        checks = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1, or None to keep all tokens"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is no penalty)"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise ValueError(f"{name} must be {expected}, got {vars(self)[name]}")

    @property
    def greedy(self) -> bool:
        """Whether there is no randomness."""
        return self.temperature == 0

    @property
    def needs_context(self) -> bool:
        """Whether the distribution depends on more than the logits."""
        return self.repetition_penalty != 1.0 or len(self.processors) > 0

    @cached_property
    def _context_processors(self) -> list[LogitsProcessor]:
        penalty = [] if self.repetition_penalty == 1.0 else [RepetitionPenaltyLogitsProcessor(self.repetition_penalty)]
        return [*penalty, *self.processors]

    @cached_property
    def _warpers(self) -> list[LogitsProcessor]:
        if self.greedy:
            return []
        warpers: list[LogitsProcessor] = []
        if self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def with_seed(self, rows: int) -> Sampling:
        """Return these settings with a seed that fits `rows` rows, drawn if there was none.

        Raises:
            ValueError: If a list of seeds has another length.
        """
        if self.seed is None:
            return replace(self, seed=secrets.randbits(31))
        if not isinstance(self.seed, int) and len(self.seed) != rows:
            raise ValueError(f"got {len(self.seed)} seeds for {rows} prompts; give one for each, or a single number")
        return self


def to_scores(logits: Tensor, context: Tensor | None, sampling: Sampling) -> Tensor:
    """Return the processed scores whose softmax is the target's distribution; -inf where it is zero.

    Args:
        logits: [1, V] the target's raw logits after `context`.
        context: [1, length] prompt and text so far; None is allowed where `sampling.needs_context` is false.
        sampling: The settings.

    Returns:
        [1, V] float32 (float64 for float64 logits). With temperature 0 the distribution is the one-hot of its argmax.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for processor in sampling._context_processors:
        scores = processor(context, scores)
    for warper in sampling._warpers:
        scores = warper(context, scores)
    return scores


def to_probs(scores: Tensor, sampling: Sampling) -> Tensor:
    """Turn the output of `to_scores` into probabilities: [1, V] -> [V] float64."""
    if sampling.greedy:
        return torch.zeros_like(scores[0], dtype=torch.float64).index_fill_(0, scores[0].argmax(), 1.0)
    return scores[0].double().softmax(-1)


class Sampler:
    """One row's settings, noise and text so far (prompt, emitted tokens, the root last)."""

    def __init__(self, sampling: Sampling, row: int, prompt: Sequence[int]) -> None:
        """Start a row.

        Args:
            sampling: Settings whose seed is set.
            row: Row of the batch.
            prompt: Its tokens.
        """
        if sampling.seed is None:
            raise ValueError("the seed must be set: call Sampling.with_seed first")
        self.sampling = sampling
        self.seed = sampling.seed if isinstance(sampling.seed, int) else sampling.seed[row]
        self._stream = noise.key(self.seed, row if isinstance(sampling.seed, int) else 0)
        self.context = list(prompt)
        self._coins = 0

    def key(self, purpose: int, position: int) -> int:
        """Return the noise key of an absolute position in this row."""
        return noise.key(self._stream, purpose, position)

    def scores(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Return the scores after the context and the tokens of `path` (root excluded): [V] -> [1, V]."""
        context = None
        if self.sampling.needs_context:
            context = torch.tensor([[*self.context, *path]], device=logits.device)
        return to_scores(logits[None], context, self.sampling)

    def probs(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Return the target's distribution after `path`: [V] -> [V] float64."""
        return to_probs(self.scores(logits, path), self.sampling)

    def choose(self, logits: Tensor, path: Sequence[int]) -> int:
        """Return the target's own token after `path`: `argmax(scores + G[position])`, the plain sampler."""
        scores = self.scores(logits, path)[0]
        if self.sampling.greedy:
            return int(scores.argmax())
        kept = scores.isfinite().nonzero()[:, 0]
        position = len(self.context) + len(path)
        perturbed = scores[kept].double() + noise.gumbel([self.key(noise.TARGET, position)], kept)[0]
        return int(kept[perturbed.argmax()])

    def flip(self, probability: float) -> bool:
        """Return True with this probability; 0 is never, 1 is always."""
        return self._coin() < probability

    def draw(self, weights: Tensor) -> int:
        """Draw an index in proportion to non-negative weights: [V]."""
        total = weights.double().cumsum(0)
        index = int(torch.searchsorted(total, self._coin() * total[-1], right=True))
        return min(index, int(weights.nonzero()[-1]))

    def _coin(self) -> float:
        self._coins += 1
        return noise.uniform(self.key(noise.COIN, self._coins))
