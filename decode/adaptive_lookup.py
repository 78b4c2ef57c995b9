"""Prompt lookup that chooses how many tokens to propose, from what a pass costs and how often copies were right.

The longer the copied place agrees with the text before it, the more likely it is to go on agreeing. A session keeps an
estimate of that for each length of agreement, and proposes as much as gives the most tokens per second: long copies in
a text that repeats itself, nothing elsewhere. The estimates learn from every step, drafts or none, because what a
lookup found can always be compared with what came. No clock is read: the same text gives the same proposals.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from decode.checks import StateError
from decode.costs import VerifyCosts
from decode.lookup import NgramIndex, check_lookup
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape
from heads.transfer import to_device

LONGEST_MATCH = 32
"""Tokens before two places that are compared at most."""
BUCKETS = (1, 2, 4, 8, 16)
"""Longest match of each bucket but the last, which has no end."""
PRIOR_RATES = (0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""For each bucket, the chance that the next token agrees too, before anything is known of the text. Rather low for
short matches: drafts that fail cost time, and those that are left out are learned from all the same."""
HALF_LIFE = 100.0
"""Trials of a bucket after which an outcome counts half."""


@dataclass(frozen=True)
class AdaptiveLookup:
    """Propose what followed the last similar place, as long as it pays; see the module."""

    costs: VerifyCosts
    """Seconds of passes on this machine; see `measure_costs`."""
    longest: int = 32
    """Tokens proposed at most."""
    max_ngram: int = 3
    """Longest n-gram looked for; shorter ones follow, down to `min_ngram`. Matches may be longer."""
    min_ngram: int = 1
    prior_strength: float = 8.0
    """Trials that `PRIOR_RATES` count for."""

    def __post_init__(self) -> None:
        """Reject settings that find nothing or cannot be weighed."""
        check_lookup("longest", self.longest, self.min_ngram, self.max_ngram)
        if not isinstance(self.costs, VerifyCosts):
            raise ValueError(
                f"costs must be VerifyCosts, as measure_costs(target) returns, got {type(self.costs).__name__}"
            )
        if not isinstance(self.prior_strength, Real) or not 0 < self.prior_strength < math.inf:
            raise ValueError(f"prior_strength must be a number of trials above 0, got {self.prior_strength!r}")

    @property
    def max_nodes(self) -> int:
        """Root and `longest` tokens."""
        return self.longest + 1

    @property
    def feature_layers(self) -> Sequence[int]:
        """None: it reads the text only."""
        return ()

    def begin(self, rows: int, *, shared_noise: bool) -> _AdaptiveState:
        """Open a session; see `Proposer.begin`."""
        return _AdaptiveState(self, rows)


@dataclass(frozen=True)
class Found:
    """A place of the text that resembles its end."""

    end: int
    """Length of the text."""
    place: int
    """Where what followed begins."""
    length: int
    """Tokens before both that agree, at most `LONGEST_MATCH`."""
    tokens: list[int]
    """What followed. Where it runs into the text's end it goes on with itself: a period is repeated."""


class AgreementRates:
    """For each length of a match, how often the next token agreed too; old outcomes fade."""

    def __init__(self, prior_strength: float) -> None:
        """Know nothing but the prior."""
        self._strength = prior_strength
        self._agreed = [0.0] * len(PRIOR_RATES)
        self._trials = [0.0] * len(PRIOR_RATES)

    def learn(self, match: Found, came: Sequence[int]) -> None:
        """Compare what a match predicted with what came, up to the first token that differs."""
        keep = 0.5 ** (1.0 / HALF_LIFE)
        for depth, (predicted, token) in enumerate(zip(match.tokens, came, strict=False)):
            bucket = bisect_left(BUCKETS, match.length + depth)
            self._agreed[bucket] = self._agreed[bucket] * keep + (predicted == token)
            self._trials[bucket] = self._trials[bucket] * keep + 1.0
            if predicted != token:
                return

    def survivals(self, length: int, depth: int) -> list[float]:
        """Return the chance that a match of this length goes on for 1, 2, …, `depth` tokens."""
        rates = [
            (prior * self._strength + agreed) / (self._strength + trials)
            for prior, agreed, trials in zip(PRIOR_RATES, self._agreed, self._trials, strict=True)
        ]
        chances, chance = [], 1.0
        for reached in range(length, length + depth):
            chance *= rates[bisect_left(BUCKETS, reached)]
            chances.append(chance)
        return chances


class _AdaptiveState:
    def __init__(self, settings: AdaptiveLookup, rows: int) -> None:
        self._settings = settings
        self._index = NgramIndex(rows, settings.min_ngram, settings.max_ngram)
        self._matches: list[Found | None] = [None] * rows
        self._rates = AgreementRates(settings.prior_strength)
        self._seconds: dict[tuple[int, int], list[float]] = {}

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> None:
        """Nothing to do: the rows' own text is read when a tree is proposed."""

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        for match, row in zip(self._matches, rows, strict=True):
            if match is not None:
                self._rates.learn(match, row.context[match.end :])
        self._matches = [self._match(b, row.context) for b, row in enumerate(rows)]
        drafts = self._choose(max(len(row.context) for row in rows)) - 1
        trees = []
        for match, row in zip(self._matches, rows, strict=True):
            tokens = [row.context[-1], *([] if match is None else match.tokens[:drafts])]
            trees.append(TokenTree(to_device(tokens, roots.device), chain_shape(len(tokens))))
        return trees

    def _match(self, b: int, text: list[int]) -> Found | None:
        """Return the longer of two matches, the last place of the final n-gram and the one followed so far."""
        place = self._index.find(b, text)
        if place is None:
            return None
        length = match_length(text, place)
        before = self._matches[b]
        if before is not None:
            followed = before.place + len(text) - before.end
            followed_length = match_length(text, followed)
            if followed_length > length:
                place, length = followed, followed_length
        tokens = text[place : place + self._settings.longest]
        period = len(text) - place
        while len(tokens) < self._settings.longest:
            tokens.append(tokens[-period])
        return Found(len(text), place, length, tokens)

    def _choose(self, context: int) -> int:
        """Return the nodes of each row's tree that give the most tokens per second; 1 where no draft pays.

        Args:
            context: Tokens of the longest row.
        """
        found = [match.length for match in self._matches if match is not None]
        seconds = self._costs(len(self._matches), context)
        if not found:
            return 1
        chances = [self._rates.survivals(length, self._settings.longest) for length in found]
        tokens = float(len(self._matches))
        best, most = 1, tokens / seconds[0]
        for nodes, at_depth in enumerate(zip(*chances, strict=True), start=2):
            tokens += sum(at_depth)
            if tokens / seconds[nodes - 1] > most:
                best, most = nodes, tokens / seconds[nodes - 1]
        return best

    def _costs(self, rows: int, context: int) -> list[float]:
        """Return the seconds of passes over 1, 2, … nodes in each of these rows, at the nearest context measured."""
        costs = self._settings.costs
        nearest = min(costs.contexts(1), key=lambda measured: abs(measured - context))
        if (rows, nearest) not in self._seconds:
            sizes = range(1, self._settings.max_nodes + 1)
            self._seconds[rows, nearest] = [pass_seconds(costs, rows, nodes, nearest) for nodes in sizes]
        return self._seconds[rows, nearest]

    def keep(self, rows: Sequence[int]) -> None:
        self._index.keep(rows)
        self._matches = [self._matches[row] for row in rows]

    def check(self, rows: Sequence[Sampler], hidden: Tensor, features: Tensor | None = None) -> None:
        fresh = NgramIndex(len(rows), self._settings.min_ngram, self._settings.max_ngram)
        for b, (row, match) in enumerate(zip(rows, self._matches, strict=True)):
            held, expected = self._index.find(b, row.context), fresh.find(b, row.context)
            if held != expected:
                raise StateError(f"row {b}: the index of n-grams finds place {held}, a fresh one {expected}")
            if match is not None and match.length > match_length(row.context[: match.end], match.place):
                raise StateError(f"row {b}: its text has no match of {match.length} tokens at place {match.place}")


def match_length(text: Sequence[int], place: int) -> int:
    """Return how many tokens before a place equal the last ones of the text, at most `LONGEST_MATCH`."""
    most = min(place, LONGEST_MATCH)
    return next((n for n in range(most) if text[place - 1 - n] != text[-1 - n]), most)


def pass_seconds(costs: VerifyCosts, rows: int, nodes: int, context: int) -> float:
    """Return the seconds of a pass; of more rows than were measured, those of as many nodes in fewer rows."""
    measured = max(point.rows for point in costs.points)
    fewer = min(rows, measured)
    return costs.seconds(fewer, nodes * rows / fewer, context)
