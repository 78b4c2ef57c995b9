"""How the target's texts rank in a drafter's guesses, and the best static tree of every size by that.

The value of a node is the probability that the text takes its whole path of ranks, counted jointly: a product of rates
per depth would call deep paths likelier than they are, since hard places are hard for all heads at once. The expected
tokens of a step are 1 + the sum of the values (Chen et al. 2024, Sequoia, arXiv:2402.12374, section 3), so the best
tree of N nodes is the N most valuable ones, and the best trees of all sizes are nested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.dynamic import shared_scores
from decode.grow import Paths
from decode.propose import Drafts
from decode.replay import Known, known_sampler
from decode.sampling import Sampler, Sampling
from heads import Drafter
from heads.transfer import to_device


@dataclass(frozen=True)
class Ranked:
    """One text and how its tokens rank in the head's guesses."""

    ranks: Tensor
    """[roots, K] int64: for a root at each place of the text, the rank of the token k + 1 places on in the logits of
    depth k; `NOT_RANKED` where it is not drafted or the text has ended."""


NOT_RANKED = 1 << 30
DEPTH = 6
"""Deepest guesses that are ranked by default."""


@torch.inference_mode()
def rank_texts(
    drafts: Drafts, texts: Sequence[Known], *, sampling: Sampling, depth: int = DEPTH, rows: int = 16
) -> list[Ranked]:
    """Rank texts' own tokens in a drafter's guesses at every place of their answers, behind the text's own tokens.

    At temperature T > 0 a guess is ranked as it is drafted: with T times the noise that its place was sampled with.

    Args:
        drafts: A head or a draft model.
        texts: From `replay.write_texts`.
        sampling: As the texts were written.
        depth: K at most; less if no more is drafted.
        rows: Texts ranked together.
    """
    found: list[Ranked] = []
    for start in range(0, len(texts), rows):
        found += _rank_together(drafts, texts[start : start + rows], sampling, depth)
    return found


def _rank_together(drafts: Drafts, texts: Sequence[Known], sampling: Sampling, depth: int) -> list[Ranked]:
    drafter = drafts.drafter()
    depth = min(depth, drafter.max_depth)
    cursors = [_Cursor(text, known_sampler(text, sampling), len(text.prompt_ids)) for text in texts]
    running = [cursor for cursor in cursors if not cursor.ended]
    synced = [0] * len(running)
    while running:
        logits = _sync(drafter, running, synced)
        samplers = [cursor.sampler for cursor in running]
        columns = []
        for level in range(depth):
            tokens, ends = _tokens(running, 1 + level, logits.device)
            scores = shared_scores(logits[:, None], drafter, samplers, level + 1, sampling.temperature)[:, 0]
            rank, known = _rank_of(scores, tokens, drafter.vocabulary)
            columns.append(torch.where(known & ~ends, rank, NOT_RANKED))
            if level + 1 < depth:
                logits = drafter.extend(tokens[:, None], torch.full_like(tokens, level)[:, None])[:, 0]
        for cursor, row in zip(running, torch.stack(columns, dim=1).tolist(), strict=True):
            cursor.ranks.append(row)
        synced = [cursor.place for cursor in running]
        for cursor in running:
            cursor.advance()
        kept = [row for row, cursor in enumerate(running) if not cursor.ended]
        if kept and len(kept) < len(running):
            drafter.keep(kept)
        running, synced = [running[row] for row in kept], [synced[row] for row in kept]
    return [Ranked(torch.tensor(c.ranks, dtype=torch.int64).reshape(-1, depth)) for c in cursors]


class _Cursor:
    """A place in a known text, from which tokens are drafted."""

    def __init__(self, text: Known, sampler: Sampler, place: int) -> None:
        self.text, self.sampler, self.place = text, sampler, place
        self.token_ids = [*text.prompt_ids, *text.token_ids]
        self.sampler.context = self.token_ids[: place + 1]
        self.ranks: list[list[int]] = []

    def advance(self) -> None:
        """Go on to the next token."""
        self.place += 1
        self.sampler.context = self.token_ids[: self.place + 1]

    @property
    def ended(self) -> bool:
        """Whether no token follows."""
        return self.place >= len(self.token_ids) - 1


def _sync(drafter: Drafter, cursors: Sequence[_Cursor], synced: Sequence[int]) -> Tensor:
    """Give the drafter the texts from `synced` up to the roots and return the logits behind them: [B, U]."""
    device, pad = cursors[0].text.hidden.device, torch.nn.utils.rnn.pad_sequence
    spans = [slice(start, cursor.place) for start, cursor in zip(synced, cursors, strict=True)]
    token_ids = [to_device(c.token_ids[s.start : s.stop + 1], device) for c, s in zip(cursors, spans, strict=True)]
    hidden = [c.text.hidden[s] for c, s in zip(cursors, spans, strict=True)]
    features = [c.text.features[s] for c, s in zip(cursors, spans, strict=True) if c.text.features is not None]
    return drafter.sync(
        pad(token_ids, batch_first=True),
        pad(hidden, batch_first=True),
        [s.stop - s.start for s in spans],
        pad(features, batch_first=True) if features else None,
    )


def _tokens(cursors: Sequence[_Cursor], ahead: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens so far ahead of the roots and whether their texts have ended before: [B] each."""
    places = [cursor.place + ahead for cursor in cursors]
    ids = [c.token_ids[min(p, len(c.token_ids) - 1)] for p, c in zip(places, cursors, strict=True)]
    ends = [p >= len(c.token_ids) for p, c in zip(places, cursors, strict=True)]
    return to_device(ids, device), to_device(ends, device)


def _rank_of(logits: Tensor, token: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each row's rank of `token` and whether it can be drafted at all: [n, U], [n] -> [n], [n]."""
    known = torch.ones_like(token, dtype=torch.bool)
    column = token
    if vocabulary is not None:
        column = torch.searchsorted(vocabulary, token).clamp(max=len(vocabulary) - 1)
        known = vocabulary[column] == token
    return (logits > logits.gather(-1, column[:, None])).sum(-1), known


def best_tree(texts: Sequence[Ranked], size: int, *, max_rank: int = 12, rounds: int = 4) -> Paths:
    """Return the paths of the tree of `size` nodes (root included) that these texts would have accepted most from.

    Steps do not start everywhere: a step starts where the last one was rejected. The first tree counts all places;
    further rounds count the places at which decoding with the last tree starts a step.

    Args:
        texts: From `rank_texts`.
        size: Nodes, root included.
        max_rank: Ranks at or above this are not considered.
        rounds: Rounds of counting.
    """
    starts: Sequence[Sequence[int]] = [range(len(text.ranks)) for text in texts]
    paths: Paths = ()
    for _ in range(rounds):
        counts: Counter[tuple[int, ...]] = Counter()
        for text, places in zip(texts, starts, strict=True):
            for row in text.ranks[list(places)].tolist():
                for depth in range(1, len(row) + 1):
                    if row[depth - 1] >= max_rank:
                        break
                    counts[tuple(row[:depth])] += 1
        paths = _most_valuable(counts, size - 1)
        starts = [_starts(text, paths) for text in texts]
    return paths


def _most_valuable(counts: Counter[tuple[int, ...]], number: int) -> Paths:
    """Take paths in order of their counts, each after its parent and elder sibling."""
    chosen: list[tuple[int, ...]] = []
    frontier: set[tuple[int, ...]] = {(0,)}
    while frontier and len(chosen) < number:
        path = min(frontier, key=lambda p: (-counts[p], len(p), p))
        if not counts[path]:
            break
        frontier.remove(path)
        chosen.append(path)
        frontier |= {(*path[:-1], path[-1] + 1), (*path, 0)}
    return tuple(sorted(chosen, key=lambda p: (len(p), p)))


def _starts(text: Ranked, paths: Paths) -> list[int]:
    """Return the places at which greedy decoding of this text with this tree starts a step."""
    known = set(paths)
    places, place = [], 0
    rows = text.ranks.tolist()
    while place < len(rows):
        places.append(place)
        depth = 0
        while depth < len(rows[place]) and tuple(rows[place][: depth + 1]) in known:
            depth += 1
        place += depth + 1
    return places


def acceptance(texts: Sequence[Ranked], *, width: int = 4) -> list[list[float]]:
    """Return how often the text's token has each rank at each depth, given that all above it were among the best.

    Args:
        texts: From `rank_texts`.
        width: Ranks that count as drafted.

    Returns:
        For each depth, the shares of the ranks 0 … width - 1; a depth that was never reached is left out.
    """
    table = []
    for depth in range(texts[0].ranks.shape[1]):
        rows = torch.cat([text.ranks[: max(0, len(text.ranks) - depth)] for text in texts])  # the others have ended
        rows = rows[(rows[:, :depth] < width).all(1)]
        if not len(rows):
            break
        table.append([(rows[:, depth] == rank).double().mean().item() for rank in range(width)])
    return table


def simulated_tokens_per_step(texts: Sequence[Ranked], paths: Paths) -> float:
    """Return the tokens per step that greedy decoding of these texts with this tree takes."""
    steps = sum(len(_starts(text, paths)) for text in texts)
    return sum(len(text.ranks) for text in texts) / steps if steps else 1.0
