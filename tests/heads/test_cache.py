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


def write(cache: TreeCache, reference: ListCache, tree: list[list[int]], nodes: list[list[int]]) -> None:
    """Add one pass to each row's `tree` and compare what attention would read with the lists."""
    cache.begin(len(nodes[0]), torch.device("cpu"))
    for row, new in zip(tree, nodes, strict=True):
        row += new
    longest = max(cache.lengths)
    for layer in range(LAYERS):
        stored = cache.write(layer, stamp(nodes, layer, value=False), stamp(nodes, layer, value=True))
        for seen, value in zip(stored, (False, True), strict=True):
            assert seen.shape == (len(nodes), HEADS, longest + len(tree[0]), SIZE + value)
            for b, row in enumerate(reference.rows):
                expected = stamp([row + tree[b]], layer, value=value)[0]
                torch.testing.assert_close(seen[b, :, : len(row) + len(tree[b])], expected, rtol=0, atol=0)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_ragged_writes_commits_and_keeps_equal_lists(seed, grows):
    """Trees are written in one to three passes, some are forgotten, and a small cache is made larger within them."""
    chance = random.Random(seed)
    rows = 1 + seed % 4
    cache, reference = TreeCache(rows, 2 if grows else 100), ListCache(rows)
    number = 0
    for step in range(10):
        for forgotten in [True] * chance.randint(0, 1) + [False]:
            tree: list[list[int]] = [[] for _ in reference.rows]
            for _ in range(chance.randint(1, 3)):
                size = chance.randint(1, 4)
                nodes = [[number + b * size + j for j in range(size)] for b in range(len(reference.rows))]
                number += size * len(reference.rows)
                if grows:
                    cache.reserve_for(size)
                write(cache, reference, tree, nodes)
            if forgotten:
                cache.forget_tree()
                check(cache, reference)
        size = len(tree[0])
        assert cache.used == max(cache.lengths) + size == max(cache.lengths) + cache.nodes
        # path node numbers ascend, as parents come before children; sometimes nothing is kept
        paths = [sorted(chance.sample(range(size), chance.randint(0 if step else 1, size))) for _ in reference.rows]
        cache.commit(paths)
        reference.commit(tree, paths)
        check(cache, reference)
        assert cache.nodes == 0
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
        cache.forget_tree()
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


def started(rows: list[list[int]], capacity: int) -> tuple[TreeCache, ListCache]:
    """A cache with these committed tokens; each row is committed up to its own length."""
    cache, reference = TreeCache(len(rows), capacity), ListCache(len(rows))
    longest = max(map(len, rows))
    padded = [row + [999] * (longest - len(row)) for row in rows]
    cache.begin(longest, torch.device("cpu"))
    for layer in range(LAYERS):
        cache.write(layer, stamp(padded, layer, value=False), stamp(padded, layer, value=True))
    cache.commit([range(len(row)) for row in rows])
    reference.rows = [list(row) for row in rows]
    return cache, reference


def test_reserving_keeps_committed_tokens_and_the_tree_and_happens_only_where_needed():
    cache, reference = started([[1, 2, 3], [4]], 5)
    write(cache, reference, [[], []], [[5, 6], [7, 8]])
    blocks = [*cache._keys, *cache._values]
    for nodes in (0, -2):
        cache.reserve_for(nodes)
    assert cache.capacity == 5
    assert all(a is b for a, b in zip(blocks, [*cache._keys, *cache._values], strict=True))
    with pytest.raises(RuntimeError, match="5 slots cannot take 3 nodes after 3 tokens"):
        cache.begin(1, torch.device("cpu"))
    cache.reserve_for(1)
    assert cache.capacity == 12
    assert all(block.shape[2] == 12 for block in (*cache._keys, *cache._values))
    write(cache, reference, [[5, 6], [7, 8]], [[9], [10]])
    cache.commit([[0, 2], [1, 2]])
    reference.commit([[5, 6, 9], [7, 8, 10]], [[0, 2], [1, 2]])
    check(cache, reference)
    empty = TreeCache(2, 1)
    empty.reserve_for(3)
    write(empty, ListCache(2), [[], []], [[1, 2, 3], [4, 5, 6]])


def test_a_pass_that_does_not_fit_leaves_the_tree_as_it_was():
    cache, reference = started([[1, 2], [3]], 4)
    write(cache, reference, [[], []], [[4], [5]])
    with pytest.raises(RuntimeError, match="4 slots cannot take 3 nodes after 2 tokens"):
        cache.begin(2, torch.device("cpu"))
    write(cache, reference, [[4], [5]], [[6], [7]])
    cache.commit([[0, 1], [1]])
    reference.commit([[4, 6], [5, 7]], [[0, 1], [1]])
    check(cache, reference)


@pytest.mark.parametrize("rows", [[[1, 2, 3]], [[1, 2], [3, 4]], [[1, 2, 3], [4], [5, 6]]])
def test_poison_spares_committed_tokens_and_spoils_all_else_finitely_where_a_pass_could_multiply_it(rows):
    cache, reference = started(rows, 9)
    write(cache, reference, [[] for _ in rows], [[10 + b, 20 + b] for b in range(len(rows))])
    cache.commit([[0] for _ in rows])
    reference.commit([[10 + b, 20 + b] for b in range(len(rows))], [[0] for _ in rows])
    cache.poison()
    check(cache, reference)
    equal = len({len(row) for row in rows}) == 1
    for block in (*cache._keys, *cache._values):
        for b, length in enumerate(cache.lengths):
            behind = block[b, :, length:]
            assert behind.isnan().all() if equal else (behind >= 10).all()
            assert equal or behind.isfinite().all()
    # the next tree is read whole, and nothing of the poison with it where rows are equally long
    tree = [[] for _ in rows]
    write(cache, reference, tree, [[30 + b] for b in range(len(rows))])
    write(cache, reference, tree, [[40 + b, 50 + b] for b in range(len(rows))])
    seen = cache._keys[0][:, :, : cache.used]
    assert seen.isfinite().all()
    cache.commit([[0, 2] for _ in rows])
    reference.commit(tree, [[0, 2] for _ in rows])
    check(cache, reference)


def test_a_tree_of_several_passes_moves_over_itself_without_overwriting_its_sources():
    cache, reference = started([[1], [2, 3]], 20)
    tree: list[list[int]] = [[], []]
    for first in (10, 20, 30):
        write(cache, reference, tree, [[first, first + 1, first + 2], [first + 3, first + 4, first + 5]])
    paths = [[1, 2, 4, 5, 7, 8], [0, 4, 8]]
    cache.commit(paths)
    reference.commit(tree, paths)
    check(cache, reference)
