"""Texts that are known, decoded again with drafts but without the target.

With `Match`, drafts do not change the text, so what a proposer gains on a text that the target has written can be
counted exactly without asking the target again: its states at every token are computed once, in one causal pass, and
the loop runs with the known text in place of the target's choices. Only drafting costs time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from decode.accept import Randomness, Verdict, follow_choices
from decode.counting import Counting
from decode.generation import generate
from decode.loop import Decoding, Row
from decode.propose import Proposer
from decode.results import Stats
from decode.sampling import Sampler, Sampling
from decode.session import Session, TargetOutput
from decode.stopping import Stopper
from decode.target import Target
from decode.tree import TokenTree
from heads.transfer import to_device


@dataclass(frozen=True)
class Known:
    """A text of the target's and its states."""

    prompt_ids: list[int]
    token_ids: list[int]
    """The answer."""
    seed: int
    hidden: Tensor
    """[T, D] at every token of prompt and answer."""
    features: Tensor | None
    """[T, F] there, of the layers that were asked for."""


def write_texts(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    feature_layers: Sequence[int],
    batch: int = 16,
) -> list[Known]:
    """Let the target answer prompts, plainly, and compute its states.

    Args:
        target: The target.
        prompts: Token ids.
        sampling: How tokens are chosen; text i has the seed `sampling.seed + i`.
        max_new_tokens: Limit for each.
        feature_layers: Decoder layers whose outputs are wanted.
        batch: Prompts answered together.

    Returns:
        The texts of at least two new tokens: others take no step.
    """
    first = sampling.seed if isinstance(sampling.seed, int) else 0
    texts = []
    for start in tqdm(range(0, len(prompts), batch), desc=f"texts, T={sampling.temperature:g}", leave=False):
        some = prompts[start : start + batch]
        seeds = [first + start + row for row in range(len(some))]
        own = replace(sampling, seed=seeds)
        results = generate(target, some, sampling=own, max_new_tokens=max_new_tokens)
        assert isinstance(results, list)
        for result, seed in zip(results, seeds, strict=True):
            if len(result.token_ids) > 1:
                text = torch.tensor([[*result.prompt_ids, *result.token_ids]])
                hidden, features = target.encode_features(text, [text.shape[1]], feature_layers)
                kept = None if features is None else features[0]
                texts.append(Known(result.prompt_ids, result.token_ids, seed, hidden[0], kept))
    return texts


@dataclass(frozen=True)
class Replayed:
    """What a proposer did with known texts."""

    stats: Stats
    """Of all texts."""
    by_text: list[Stats]
    """In their order."""
    sizes: list[list[int]]
    """For each step of the loop, the nodes of every row's tree."""
    draft_seconds: float
    """Of a step of the loop, on average: proposing, and absorbing what was committed."""
    other_seconds: float
    """Of a step of the loop, on average: choosing paths and keeping books."""


def replay(
    target: Target,
    texts: Sequence[Known],
    proposer: Proposer,
    *,
    sampling: Sampling,
    rows: int = 16,
    max_new_tokens: int | None = None,
) -> Replayed:
    """Decode known texts with a proposer and count what it gains.

    Args:
        target: The target they are of; it is not run.
        texts: From `write_texts`.
        proposer: What drafts.
        sampling: As the texts were written; their own seeds are used.
        rows: Texts decoded together.
        max_new_tokens: Only so many tokens of each.
    """
    counting = Counting(proposer)
    by_text: list[Stats] = []
    sizes: list[list[int]] = []
    draft = other = 0.0
    for start in range(0, len(texts), rows):
        some = texts[start : start + rows]
        known = _KnownTexts(target, some)
        states = [_row(number, text, sampling, max_new_tokens) for number, text in enumerate(some)]
        deltas = Decoding(known, states, counting, _Follow(), live=False).run()
        results = {delta.row: delta.result for delta in deltas if delta.result is not None}
        by_text += [results[row].stats for row in range(len(some))]
        last = max(by_text[-len(some) :], key=lambda stats: stats.seconds)
        drafting = last.parts.get("propose", 0.0) + known.waited - counting.take().prompt_seconds
        sizes += known.sizes
        draft += drafting
        other += last.parts.get("accept", 0.0) + last.parts.get("commit", 0.0)
    steps = max(1, len(sizes))
    return Replayed(Stats.total(by_text), by_text, sizes, max(0.0, draft) / steps, other / steps)


def _row(number: int, text: Known, sampling: Sampling, max_new_tokens: int | None) -> Row:
    length = len(text.token_ids) if max_new_tokens is None else min(max_new_tokens, len(text.token_ids))
    stopper = Stopper(None, frozenset(), (), length)
    return Row(number, known_sampler(text, sampling), stopper, Stats(), text.prompt_ids)


def known_sampler(text: Known, sampling: Sampling) -> KnownSampler:
    """Return the noise and the settings that a text was written with, whose choices are the text's own tokens."""
    return KnownSampler(replace(sampling, seed=[text.seed]), 0, text)


class KnownSampler(Sampler):
    """Chooses the tokens of a known text."""

    def __init__(self, sampling: Sampling, row: int, text: Known) -> None:
        super().__init__(sampling, row, text.prompt_ids)
        self._tokens = [*text.prompt_ids, *text.token_ids]

    def choose(self, logits: Tensor, path: Sequence[int]) -> int:
        """Return the text's token after `path`; -1 behind its end."""
        place = len(self.context) + len(path)
        return self._tokens[place] if place < len(self._tokens) else -1


class _Follow:
    """`Match`, whose fast path reads logits, without one."""

    exact = shares_noise = in_order = True

    def __call__(self, trees: Sequence[TokenTree], logits: Tensor, rows: Sequence[Randomness]) -> list[Verdict]:
        return [follow_choices(tree, logits[b], row) for b, (tree, row) in enumerate(zip(trees, rows, strict=True))]


class _KnownTexts:
    """Takes the target's place: opens a session that knows all states."""

    def __init__(self, target: Target, texts: Sequence[Known]) -> None:
        self.device = target.device
        self.sizes: list[list[int]] = []
        self.waited = 0.0
        """Seconds that a GPU still drafted behind the last call that drafts."""
        self._texts = texts

    def session(self, rows: int, capacity: int, feature_layers: Sequence[int] = ()) -> Session:
        """Open the session; all texts are its rows."""
        return _KnownSession(self, self._texts, feature_layers)


class _KnownSession(Session):
    """Gives the known states where a target would compute them; a node's is that of the text at its depth."""

    def __init__(self, known: _KnownTexts, texts: Sequence[Known], feature_layers: Sequence[int]) -> None:
        self.feature_layers = feature_layers
        self._known, self._texts = known, list(texts)
        self._lengths = [0] * len(texts)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return self._lengths

    def prefill(self, prompts: Sequence[Sequence[int]], *, chunk_size: int = 512) -> TargetOutput:
        """Commit the prompts and return their states."""
        self._lengths = [len(prompt) for prompt in prompts]
        return self._output([range(length) for length in self._lengths])

    def score(self, trees: Sequence[TokenTree]) -> TargetOutput:
        """Return the text's states at the nodes' depths, which are those of the nodes that will be accepted."""
        if self._known.device.type == "cuda":
            start = time.perf_counter()
            torch.cuda.synchronize(self._known.device)
            self._known.waited += time.perf_counter() - start
        self._known.sizes.append([tree.shape.size for tree in trees])
        starts = zip(self._lengths, trees, strict=True)
        return self._output([[start + depth for depth in tree.shape.depths] for start, tree in starts])

    def _output(self, places: Sequence[Sequence[int]]) -> TargetOutput:
        """Return states and features at places of each row's text, padded."""
        hidden, features = [], []
        for text, wanted in zip(self._texts, places, strict=True):
            index = to_device(wanted, text.hidden.device).clamp(max=len(text.hidden) - 1)
            hidden.append(text.hidden[index])
            features += [] if text.features is None else [text.features[index]]
        pad = torch.nn.utils.rnn.pad_sequence
        states = pad(hidden, batch_first=True)
        return TargetOutput(states[:, :, :0], states, pad(features, batch_first=True) if features else None)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Count what was accepted."""
        self._lengths = [length + len(path) for length, path in zip(self._lengths, paths, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self._texts = [self._texts[row] for row in rows]
        self._lengths = [self._lengths[row] for row in rows]
