"""`TreeCache` against lists: every row's slots are what an obvious list of nodes would hold."""

import random

import pytest
import torch

from heads.cache import TreeCache

HEADS, SIZE, LAYERS = 2, 3, 2


class ListCache:
    """Each row is a list of numbers, one for each committed token."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]

    def commit(self, nodes: list[list[int]], paths: list[list[int]]) -> None:
        for row, numbers, path in zip(self.rows, nodes, paths, strict=True):
            row += [numbers[node] for node in path]

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def stamp(numbers: list[list[int]], layer: int, *, value: bool) -> torch.Tensor:
    """[B, H, N, E] whose entries tell token, layer, head, column, and key from value."""
    tokens = torch.tensor(numbers, dtype=torch.float64)[:, None, :, None]
    heads = torch.arange(HEADS)[:, None, None]
    columns = torch.arange(SIZE + value)
    return tokens * 1000 + layer * 100 + heads * 10 + columns + (0.5 if value else 0.0)


def check(cache: TreeCache, reference: ListCache) -> None:
    assert cache.lengths == [len(row) for row in reference.rows]
    for b, row in enumerate(reference.rows):
        for layer, (keys, values) in enumerate(cache.contents(b)):
            torch.testing.assert_close(keys, stamp([row], layer, value=False)[0], rtol=0, atol=0)
            torch.testing.assert_close(values, stamp([row], layer, value=True)[0], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_random_ragged_writes_commits_and_keeps_equal_lists(seed):
    chance = random.Random(seed)
    rows = 1 + seed % 4
    cache, reference = TreeCache(rows, 60), ListCache(rows)
    number = 0
    for step in range(10):
        size = chance.randint(1, 5)
        nodes = [[number + b * size + j for j in range(size)] for b in range(len(reference.rows))]
        number += size * len(reference.rows)
        cache.begin(size, torch.device("cpu"))
        longest = max(cache.lengths)
        for layer in range(LAYERS):
            keys, values = cache.write(layer, stamp(nodes, layer, value=False), stamp(nodes, layer, value=True))
            assert keys.shape == (len(reference.rows), HEADS, longest + size, SIZE)
            for b, row in enumerate(reference.rows):
                seen = stamp([row + nodes[b]], layer, value=False)[0]
                torch.testing.assert_close(keys[b, :, : len(row) + size], seen, rtol=0, atol=0)
                seen = stamp([row + nodes[b]], layer, value=True)[0]
                torch.testing.assert_close(values[b, :, : len(row) + size], seen, rtol=0, atol=0)
        # path node numbers ascend, as parents come before children; sometimes nothing is kept
        paths = [sorted(chance.sample(range(size), chance.randint(0 if step else 1, size))) for _ in reference.rows]
        cache.commit(paths)
        reference.commit(nodes, paths)
        check(cache, reference)
        if step in (3, 6) and len(reference.rows) > 1:
            kept = chance.sample(range(len(reference.rows)), len(reference.rows) - 1)
            cache.keep(kept)
            reference.keep(kept)
            check(cache, reference)


def test_overlapping_moves_do_not_overwrite_their_own_sources():
    cache, reference = TreeCache(1, 20), ListCache(1)
    nodes = [list(range(9))]
    cache.begin(9, torch.device("cpu"))
    cache.write(0, stamp(nodes, 0, value=False), stamp(nodes, 0, value=True))
    path = [[0, 2, 3, 4, 5, 6, 8]]
    cache.commit(path)
    reference.commit(nodes, path)
    check(cache, reference)


def test_a_pass_that_is_not_committed_leaves_no_trace():
    cache = TreeCache(2, 12)
    for attempt in (100, 0):
        nodes = [[attempt + 1, attempt + 2, attempt + 3], [attempt + 4, attempt + 5, attempt + 6]]
        cache.begin(3, torch.device("cpu"))
        cache.write(0, stamp(nodes, 0, value=False), stamp(nodes, 0, value=True))
    cache.commit([[0, 1, 2], [0, 2]])
    reference = ListCache(2)
    reference.commit([[1, 2, 3], [4, 5, 6]], [[0, 1, 2], [0, 2]])
    check(cache, reference)


def test_keeping_rows_copies_them_apart():
    cache = TreeCache(2, 8)
    cache.begin(2, torch.device("cpu"))
    cache.write(0, stamp([[1, 2], [3, 4]], 0, value=False), stamp([[1, 2], [3, 4]], 0, value=True))
    cache.commit([[0, 1], [0]])
    cache.keep([1, 0])
    assert cache.lengths == [1, 2]
    cache.begin(1, torch.device("cpu"))
    cache.write(0, stamp([[5], [6]], 0, value=False), stamp([[5], [6]], 0, value=True))
    cache.commit([[0], [0]])
    reference = ListCache(2)
    reference.rows = [[3, 5], [1, 2, 6]]
    check(cache, reference)


@pytest.mark.parametrize(("capacity", "fits"), [(7, False), (8, True)])
def test_the_longest_row_decides_what_fits(capacity, fits):
    cache = TreeCache(2, capacity)
    cache.begin(5, torch.device("cpu"))
    cache.write(0, torch.zeros(2, 1, 5, 1), torch.zeros(2, 1, 5, 1))
    cache.commit([[0], [0, 1, 2, 3, 4]])
    if fits:
        cache.begin(3, torch.device("cpu"))
        assert cache.used == 8
    else:
        with pytest.raises(RuntimeError, match="7 slots cannot take 3 nodes after 5 tokens"):
            cache.begin(3, torch.device("cpu"))


def test_unwritten_slots_are_finite():
    cache = TreeCache(2, 16)
    cache.begin(2, torch.device("cpu"))
    keys, values = cache.write(0, torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4))
    cache.commit([[0, 1], []])
    cache.begin(1, torch.device("cpu"))
    keys, values = cache.write(0, torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4))
    assert keys.isfinite().all()
    assert values.isfinite().all()
