"""The best static tree of every size, from how real text ranks in a head's guesses.

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

from decode.grow import Paths
from heads import Head


@dataclass(frozen=True)
class Ranked:
    """One text and how its tokens rank in the head's guesses."""

    ranks: Tensor
    """[roots, K] int64: for a root at each place of the text, the rank of the token k + 1 places on in the logits of
    depth k; `NOT_RANKED` where it is not drafted or the text has ended."""


NOT_RANKED = 1 << 30


@torch.inference_mode()
def rank_text(head: Head, token_ids: Sequence[int], hidden: Tensor, answer_start: int) -> Ranked:
    """Rank a text's own tokens in the head's guesses at every place of its answer. Greedy text, logits by depth only.

    Args:
        head: A head whose logits depend on the depth (Medusa).
        token_ids: [T] prompt and answer.
        hidden: [T, D] the target's states.
        answer_start: First token of the answer; the first root.
    """
    drafter = head.drafter()
    roots = torch.arange(answer_start, len(token_ids) - 1, device=hidden.device)
    if not len(roots):
        return Ranked(torch.empty(0, drafter.max_depth, dtype=torch.int64))
    states = hidden[roots - 1][:, None]
    text = torch.tensor(token_ids, device=hidden.device)
    logits = drafter.sync(text[roots][:, None].expand(-1, 2), states, [1] * len(roots))
    columns = []
    for depth in range(drafter.max_depth):
        if depth:
            logits = drafter.extend(text[roots][:, None], torch.zeros_like(roots)[:, None])[:, 0]
        places = roots + 1 + depth
        token = text[places.clamp(max=len(token_ids) - 1)]
        rank, known = _rank_of(logits, token, drafter.vocabulary)
        columns.append(torch.where(known & (places < len(token_ids)), rank, NOT_RANKED))
    return Ranked(torch.stack(columns, dim=1).cpu())


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
        texts: From `rank_text`.
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


def simulated_tokens_per_step(texts: Sequence[Ranked], paths: Paths) -> float:
    """Return the tokens per step that greedy decoding of these texts with this tree takes."""
    steps = sum(len(_starts(text, paths)) for text in texts)
    return sum(len(text.ranks) for text in texts) / steps if steps else 1.0
