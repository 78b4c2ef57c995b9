"""Prompt lookup equals a brute-force search."""

import random

import pytest
import torch

from decode import PromptLookup, Sampling
from decode.sampling import Sampler


def brute_force(text: list[int], settings: PromptLookup) -> list[int]:
    """What followed the last earlier occurrence of the longest final n-gram that occurs earlier."""
    for size in range(settings.max_ngram, settings.min_ngram - 1, -1):
        if size > len(text):
            continue
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + settings.length]
    return []


def propose(state, rows: list[Sampler]) -> list[list[int]]:
    trees = state.propose(torch.tensor([row.context[-1] for row in rows]), rows)
    for tree, row in zip(trees, rows, strict=True):
        assert int(tree.token_ids[0]) == row.context[-1]
        assert tree.shape.parents == tuple(range(-1, tree.shape.size - 1))
        assert tree.draws is None
    return [tree.token_ids[1:].tolist() for tree in trees]


def rows_of(texts: list[list[int]]) -> list[Sampler]:
    return [Sampler(Sampling(seed=0), row, text) for row, text in enumerate(texts)]


SETTINGS = [
    PromptLookup(),
    PromptLookup(length=1, max_ngram=1),
    PromptLookup(length=4, max_ngram=5, min_ngram=2),
    PromptLookup(length=9, max_ngram=2),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("alphabet", [1, 2, 4, 30])
def test_lookup_equals_brute_force_while_texts_grow_and_rows_leave(settings, alphabet):
    chance = random.Random(alphabet)
    rows = rows_of([[chance.randrange(alphabet) for _ in range(length)] for length in (1, 2, 3, 4, 17, 40)])
    state = settings.begin(len(rows), shared_noise=True)
    found = 0
    for step in range(40):
        proposals = propose(state, rows)
        assert proposals == [brute_force(row.context, settings) for row in rows]
        assert all(len(proposal) + 1 <= settings.max_nodes for proposal in proposals)
        found += sum(map(len, proposals))
        for row in rows:
            row.context += [chance.randrange(alphabet) for _ in range(chance.randint(1, 5))]
        if step in (7, 11, 20):
            kept = chance.sample(range(len(rows)), len(rows) - 1)
            state.keep(kept)
            rows = [rows[row] for row in kept]
    assert found > 0 or alphabet == 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7], []),
        ([7, 7], [7]),
        ([7, 8], []),
        ([7, 8, 7], [8, 7]),
        ([7, 7, 7], [7]),
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 5, 2, 6, 1, 2], [5, 2, 6, 1, 2]),  # the longer n-gram wins over the later one
        ([2, 5, 2, 6, 2], [6, 2]),  # the last occurrence wins
    ],
)
def test_short_and_repetitive_texts(text, expected):
    assert propose(PromptLookup().begin(1, shared_noise=False), rows_of([text])) == [expected]


def test_proposals_are_repeatable_and_sessions_apart():
    settings = PromptLookup()
    rows = rows_of([[1, 2, 1]])
    state = settings.begin(1, shared_noise=False)
    assert propose(state, rows) == propose(state, rows) == [[2, 1]]
    other = settings.begin(1, shared_noise=False)
    assert propose(other, rows_of([[1]])) == [[]]


@pytest.mark.parametrize(
    "options", [{"length": 0}, {"max_ngram": 0}, {"min_ngram": 0}, {"min_ngram": 4, "max_ngram": 3}]
)
def test_settings_that_find_nothing_are_refused(options):
    with pytest.raises(ValueError, match="prompt lookup needs"):
        PromptLookup(**options)
