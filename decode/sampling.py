"""From logits to a distribution and from a distribution to a token: one function for plain and speculative decoding.

The order is transformers': penalties, bad words, prefix constraint, the user's processors, temperature, top-k, top-p,
min-p, typical-p. Presence and frequency penalties, which it lacks, follow the repetition penalty, as in vLLM. All see
the prompt, the text and the path to the node that is scored. Temperature 0 is a one-hot on the best processed token.
Randomness is keyed by position (`decode.noise`), so a token depends on the seed, its place and its context, not on how
it was reached.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decode import noise
from decode.limits import check_sampling
from decode.processors import AllowedTokens, CountPenalty, RowConstraint, copies
from heads.transfer import to_device


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
    typical_p: float = 1.0
    """Keep the tokens of most typical surprise that hold this much probability (Meister et al. 2022)."""
    repetition_penalty: float = 1.0
    """Divide (positive) or multiply (negative) the logits of tokens that occur in prompt or output (Keskar et al.
    2019)."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtract this for each time a token occurs in the output."""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """Token sequences that may not occur. Unlike in transformers, that may be an end-of-text token."""
    prefix_allowed_tokens_fn: AllowedTokens | None = None
    """(row of the batch, [length] ids of prompt and text) -> the only tokens that may follow; as in transformers, even
    where all of them are bad words."""
    processors: Sequence[LogitsProcessor] = ()
    """Any transformers processors (a `LogitsProcessorList` too), called with `[1, length]` ids and `[1, V]` scores. One
    with a state, such as a grammar, works with acceptance rules that are `in_order`, as "match" is: it is asked once
    for each token of the text, in order, and never behind an end-of-text token, just as in plain decoding. Behind a
    stop string it may be asked. Make a new one for each call; rows of a batch get copies of it."""
    seed: int | Sequence[int] | None = None
    """Row r of a batch draws from (seed, r); a list gives row r the noise of a single prompt with `seed[r]`. None
    draws a seed, which the result reports."""

    def __post_init__(self) -> None:
        """Reject values that no distribution has."""
        check_sampling(self)

    @property
    def greedy(self) -> bool:
        """Whether there is no randomness."""
        return self.temperature == 0

    @cached_property
    def needs_context(self) -> bool:
        """Whether the distribution depends on more than the logits."""
        return len(self._context_processors(0, 0)) > 0

    def processor_list(self, row: int, prompt_length: int) -> list[LogitsProcessor]:
        """Return what `to_scores` applies, in order, to the logits of one row.

        Args:
            row: Row of the batch.
            prompt_length: Tokens of the context that presence and frequency penalties leave out.
        """
        return [*self._context_processors(row, prompt_length), *self._warpers]

    def _context_processors(self, row: int, prompt_length: int) -> list[LogitsProcessor]:
        made: list[LogitsProcessor] = []
        if self.repetition_penalty != 1.0:
            made.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.presence_penalty or self.frequency_penalty:
            made.append(CountPenalty(self.presence_penalty, self.frequency_penalty, prompt_length))
        if self.bad_words_ids:
            made.append(NoBadWordsLogitsProcessor([list(map(int, words)) for words in self.bad_words_ids]))
        if self.prefix_allowed_tokens_fn is not None:
            made.append(RowConstraint(self.prefix_allowed_tokens_fn, row))
        return [*made, *self.processors]

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
        if self.typical_p < 1.0:
            warpers.append(TypicalLogitsWarper(self.typical_p))
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


def to_scores(logits: Tensor, context: Tensor | None, processors: Sequence[LogitsProcessor]) -> Tensor:
    """Return the processed scores whose softmax is the target's distribution; -inf where it is zero.

    Args:
        logits: [1, V] the target's raw logits after `context`; [N, V] for several nodes without.
        context: [1, length] prompt and text so far; None is allowed where `Sampling.needs_context` is false.
        processors: What `Sampling.processor_list` returns.

    Returns:
        [1 or N, V] float32 (float64 for float64 logits). With temperature 0 the law is the one-hot of its argmax.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for processor in processors:
        scores = processor(context, scores)
    return scores


def to_probs(scores: Tensor, sampling: Sampling) -> Tensor:
    """Turn the output of `to_scores` into probabilities: [1, V] -> [V] float64."""
    if sampling.greedy:
        return torch.zeros_like(scores[0], dtype=torch.float64).index_fill_(0, scores[0].argmax(), 1.0)
    return scores[0].double().softmax(-1)


class Sampler:
    """One row's settings, noise and text so far (prompt, emitted tokens, the root last)."""

    def __init__(
        self, sampling: Sampling, row: int, prompt: Sequence[int], eos_ids: frozenset[int] = frozenset()
    ) -> None:
        """Start a row.

        Args:
            sampling: Settings whose seed is set.
            row: Row of the batch.
            prompt: Its tokens.
            eos_ids: Tokens that end the text.
        """
        if sampling.seed is None:
            raise ValueError("the seed must be set: call Sampling.with_seed first")
        self.sampling = sampling
        self.seed = sampling.seed if isinstance(sampling.seed, int) else sampling.seed[row]
        self._stream = noise.key(self.seed, row if isinstance(sampling.seed, int) else 0)
        self._processors = sampling.processor_list(row, len(prompt))
        self._eos_ids = eos_ids
        self.context = list(prompt)
        self._coins = 0

    def key(self, purpose: int, position: int) -> int:
        """Return the noise key of an absolute position in this row."""
        return noise.key(self._stream, purpose, position)

    def scores(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Return the scores after the context and the tokens of `path` (root excluded): [V] -> [1, V]."""
        if not self._eos_ids.isdisjoint(path):
            return to_scores(logits[None], None, ())  # of a token that is never kept: plain decoding does not ask
        context = None
        if self.sampling.needs_context:
            context = to_device([[*self.context, *path]], logits.device)
        scores = to_scores(logits[None], context, self._processors)
        if context is not None and float(scores.max()) == -math.inf:
            raise ValueError(
                f"no token may follow {context.shape[1]} tokens of a prompt and its text (the last are "
                f"{context[0, -5:].tolist()}): bad_words_ids, processors and prefix_allowed_tokens_fn ban all of them"
            )
        return scores

    def probs(self, logits: Tensor, path: Sequence[int]) -> Tensor:
        """Return the target's distribution after `path`: [V] -> [V] float64."""
        return to_probs(self.scores(logits, path), self.sampling)

    def choose(self, logits: Tensor, path: Sequence[int]) -> int:
        """Return the target's own token after `path`: `argmax(scores + G[position])`, the plain sampler."""
        scores = self.scores(logits, path)[0]
        if self.sampling.greedy:
            return int(scores.argmax())
        key = self.key(noise.TARGET, len(self.context) + len(path))
        kept = scores.isfinite()
        if bool(kept.all()):
            return int(noise.gumbel([key], torch.arange(len(scores), device=scores.device))[0].add_(scores).argmax())
        ids = kept.nonzero()[:, 0]
        return int(ids[noise.gumbel([key], ids)[0].add_(scores[ids]).argmax()])

    def choices(self, logits: Tensor, depths: Sequence[int]) -> Tensor:
        """Return what `choose` would at nodes of these depths, without asking the device: [N, V] -> [N].

        Only where `Sampling.needs_context` is false. Choices behind an end-of-text token may differ.

        Args:
            logits: [N or more, V] the target's raw logits at the nodes.
            depths: Of N nodes; 0 is the root.
        """
        scores = to_scores(logits[: len(depths)], None, self._processors)
        if self.sampling.greedy:
            return scores.argmax(-1)
        keys = [self.key(noise.TARGET, len(self.context) + depth) for depth in range(max(depths) + 1)]
        gumbel = noise.gumbel(keys, torch.arange(scores.shape[-1], device=scores.device))
        return (scores.double() + gumbel[to_device(depths, scores.device)]).argmax(-1)

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


def batch_samplers(
    sampling: Sampling, prompts: Sequence[Sequence[int]], eos_ids: frozenset[int] = frozenset()
) -> list[Sampler]:
    """Start all rows of a batch; more than one have copies of the user's processors, so that no row sees another's.

    Args:
        sampling: Settings; a seed is drawn if there is none.
        prompts: Token ids of each row.
        eos_ids: Tokens that end a text.

    Raises:
        ValueError: If a list of seeds has another length, or a processor cannot be copied.
    """
    settings = sampling.with_seed(len(prompts))
    rows = [settings]
    if len(prompts) > 1:
        rows = [replace(settings, processors=copies(settings.processors)) for _ in prompts]
    return [Sampler(own, row, prompt, eos_ids) for row, (own, prompt) in enumerate(zip(rows, prompts, strict=True))]
