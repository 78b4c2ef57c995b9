"""Dynamic trees are what an obvious search over paths makes of the drafter's logits."""

import random

import pytest
import torch

from decode import Chain, DynamicTree, Sampling, noise
from decode.dynamic import _best_trees, _Level
from decode.sampling import Sampler

V = 23
INF = torch.inf
LOGITS = {
    "random": lambda chance, size: [chance.gauss(0, 2) for _ in range(size)],
    # every node has the same probabilities in another order: different paths are worth exactly the same
    "equal values": lambda chance, size: chance.sample([float(column) for column in range(size)], size),
    # certain, impossible and undecided tokens, and nodes without any possible child
    "extremes": lambda chance, size: chance.choice(
        [
            [0.0, *[-INF] * (size - 1)],
            [-INF] * size,
            chance.sample([2.0 * c for c in range(size)], size),
            [-INF if c % 3 else 1.5 * c for c in range(size)],
        ]
    ),
}


class Scripted:
    """Logits are a function of row and path (of the depth, if `shared`); counts what it is asked."""

    vocab_size = V
    max_depth = 6

    def __init__(self, rows: int, logits, *, vocabulary: torch.Tensor | None = None, shared: bool = False) -> None:
        self.vocabulary = vocabulary
        self.shared = shared
        self._logits = logits
        self.nodes: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]
        self.widths: list[int] = []

    def logits(self, row: int, path: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(self._logits(row, (0,) * len(path) if self.shared else path), dtype=torch.float64)

    def start(self) -> torch.Tensor:
        return torch.stack([self.logits(row, ()) for row in range(len(self.nodes))])

    def extend(self, token_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        assert token_ids.shape == parents.shape
        self.widths.append(token_ids.shape[1])
        levels = []
        for row, (nodes, tokens, above) in enumerate(
            zip(self.nodes, token_ids.tolist(), parents.tolist(), strict=True)
        ):
            new = [(*nodes[parent], token) for token, parent in zip(tokens, above, strict=True)]
            nodes += new  # numbered in the order in which they are added, the root is 0
            assert {len(path) for path in new} == {len(self.widths)}
            levels.append(torch.stack([self.logits(row, path) for path in new]))
        return torch.stack(levels)[:, :1] if self.shared else torch.stack(levels)


def seeded(kind: str, seed: int, size: int):
    return lambda row, path: LOGITS[kind](random.Random(f"{seed} {row} {path}"), size)


def samplers(rows: int, temperature: float = 0.0) -> list[Sampler]:
    sampling = Sampling(temperature=temperature, seed=3)
    return [Sampler(sampling, row, [1] * (4 + 2 * row)) for row in range(rows)]


def oracle(grow: DynamicTree, drafter: Scripted, row: int, gumbel) -> list[tuple[int, ...]]:
    """Paths of tokens of the tree's nodes, in their order."""
    value = {(): torch.zeros(())}  # in the order in which nodes are found
    frontier = [()]
    for depth in range(1, grow.depth + 1):
        found = []
        for node in frontier:
            scores = drafter.logits(row, node) + gumbel(depth)
            log_probs = scores.log_softmax(0).float()
            for column in scores.argsort(descending=True)[: grow.width].tolist():
                worth = value[node] + log_probs[column]
                if worth > -INF and worth.exp() >= grow.confidence:
                    token = column if drafter.vocabulary is None else int(drafter.vocabulary[column])
                    found.append((*node, token))
                    value[found[-1]] = worth
        frontier = sorted(found, key=lambda path: -value[path])[: grow.width]
    best = sorted(list(value)[1:], key=lambda path: -value[path])[: grow.size - 1]
    return [(), *(path for path in value if path in best)]


def paths_of(tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.shape.parents, strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


def grown(grow: DynamicTree, drafter: Scripted, *, temperature: float = 0.0, shared_noise: bool = True):
    rows = samplers(len(drafter.nodes), temperature)
    roots = torch.arange(5, 5 + len(rows))
    trees = grow(drafter, drafter.start(), roots, rows, shared_noise=shared_noise)
    assert [int(tree.token_ids[0]) for tree in trees] == roots.tolist()
    assert all(tree.draws is None for tree in trees)
    return trees


@pytest.mark.parametrize("noise_of", ["greedy", "no-noise", "shared-noise"])
@pytest.mark.parametrize("shared", [False, True], ids=["by-path", "by-depth"])
@pytest.mark.parametrize("kind", LOGITS)
def test_trees_equal_a_search_over_paths(kind, shared, noise_of):
    sizes = set()
    for seed in range(25):
        chance = random.Random(f"{kind} {shared} {noise_of} {seed}")
        columns = chance.choice([1, 2, 3, 8, V])
        vocabulary = torch.tensor(sorted(chance.sample(range(V), columns))) if columns < V else None
        grow = DynamicTree(
            depth=chance.randint(1, 5),
            width=chance.choice([1, 2, 3, 5, 9]),
            size=chance.choice([1, 2, 3, 6, 12, 40, 500]),
            confidence=chance.choice([0.0, 0.0, 0.01, 0.3]),
            temperature=chance.choice([None, 0.4]),
        )
        drafter = Scripted(3, seeded(kind, seed, columns), vocabulary=vocabulary, shared=shared)
        warmth = 0.0 if noise_of == "greedy" else 0.7
        trees = grown(grow, drafter, temperature=warmth, shared_noise=noise_of == "shared-noise")
        heat = 0.0 if noise_of != "shared-noise" else grow.temperature or warmth
        for row, (tree, sampler) in enumerate(zip(trees, samplers(3, warmth), strict=True)):

            def gumbel(depth, sampler=sampler, vocabulary=vocabulary, heat=heat):
                # the noise of the very position that a token at this depth takes
                key = sampler.key(noise.TARGET, len(sampler.context) + depth - 1)
                return heat * noise.gumbel([key], torch.arange(V) if vocabulary is None else vocabulary)[0]

            assert paths_of(tree) == oracle(grow, drafter, row, gumbel)
            assert tree.shape.size <= grow.max_nodes <= grow.size
            assert list(tree.shape.depths) == sorted(tree.shape.depths)
            sizes.add(tree.shape.size)
    assert len(sizes) > 3


def test_among_equal_values_parents_come_first_and_then_what_was_found_first():
    def script(row, path):
        return [0.0, 0.0] if not path else [0.0, -INF]  # undecided at first, then certain

    for size, expected in [
        (2, [(0,)]),
        (3, [(0,), (1,)]),
        (4, [(0,), (1,), (0, 0)]),
        (6, [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]),
        (99, [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]),
    ]:
        tree = grown(DynamicTree(3, 2, size), Scripted(1, script))[0]
        assert paths_of(tree)[1:] == expected


@pytest.mark.parametrize("size", range(1, 12))
def test_a_certain_chain_is_cut_at_its_end(size):
    for confidence in (0.0, 1.0):
        grow = DynamicTree(6, 3, size, confidence)
        tree = grown(grow, Scripted(1, lambda row, path: [-INF, 0.0, -INF]))[0]
        assert paths_of(tree) == [(1,) * depth for depth in range(min(size, 7))]


@pytest.mark.parametrize("size", [1, 2, 5, 9, 30])
def test_trees_of_undecided_tokens_are_trees(size):
    tree = grown(DynamicTree(4, 3, size), Scripted(1, lambda row, path: [0.0] * 5))[0]
    assert tree.shape.size == size
    assert len(set(paths_of(tree))) == size


@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 1, 2), (6, 1, 7), (1, 5, 6), (4, 3, 1 + 3 + 3 * 9)])
def test_room_is_for_what_depth_and_width_can_fill_and_no_more(depth, width, nodes):
    grow = DynamicTree(depth, width, 10**8)
    assert grow.max_nodes == nodes
    assert grown(grow, Scripted(1, lambda row, path: [0.0] * 5))[0].shape.size == nodes


def test_a_child_worth_more_than_its_parent_is_a_bug_that_is_found():
    row = torch.tensor([[0, 0]])
    parents = _Level(torch.tensor([[-1.0, -5.0]]), row, row)
    children = _Level(torch.tensor([[-3.0, -4.0]]), row, row + 2)
    roots = torch.tensor([7])
    assert _best_trees([parents, children], roots, 5)[0].shape.parents == (-1, 0, 0, 2, 2)
    with pytest.raises(AssertionError, match="worth more than its parent"):
        _best_trees([parents, children], roots, 3)


def test_rounding_above_a_probability_of_1_is_cut_off(monkeypatch):
    exact = torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda scores, dim: exact(scores, dim) + 1e-3)
    drafter = Scripted(1, lambda row, path: [0.0, -INF] if path else [0.0, 0.0])
    assert paths_of(grown(DynamicTree(6, 2, 4), drafter)[0]) == [(), (0,), (1,), (0, 0)]


def test_a_drafter_that_gives_no_numbers_drafts_nothing():
    for logits in ([torch.nan] * 4, [-INF] * 4, [INF, 0.0, 0.0, 0.0]):
        tree = grown(DynamicTree(3, 2, 9), Scripted(1, lambda row, path, logits=logits: logits))[0]
        assert tree.shape.size == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_width_1_it_is_a_chain_of_the_best_tokens(temperature):
    for seed in range(5):
        drafter = Scripted(3, seeded("random", seed, V))
        dynamic = grown(DynamicTree(4, 1, 5), drafter, temperature=temperature)
        drafter = Scripted(3, seeded("random", seed, V))
        chains = grown(Chain(4), drafter, temperature=temperature)
        assert [paths_of(tree) for tree in dynamic] == [paths_of(tree) for tree in chains]


def test_little_noise_is_no_noise():
    def trees(temperature):
        return [
            paths_of(t)
            for t in grown(DynamicTree(4, 3, 9), Scripted(3, seeded("random", 1, V)), temperature=temperature)
        ]

    assert trees(1e-6) == trees(0.0)
    assert trees(2.0) != trees(0.0)


def test_drafting_ends_where_no_row_is_confident_and_padding_stays_out():
    """Row b is certain for b + 1 tokens and undecided after that."""

    def script(row, path):
        return [9.0, 0.0, -9.0] if len(path) <= row and set(path) <= {0} else [0.1, 0.0, 0.0]

    drafter = Scripted(3, script)
    trees = grown(DynamicTree(6, 2, 20, confidence=0.5), drafter)
    assert [paths_of(tree) for tree in trees] == [[(0,) * d for d in range(row + 2)] for row in range(3)]
    assert drafter.widths == [1, 1, 1]  # rows that have ended are carried along; none goes on from the third
    drafter = Scripted(2, lambda row, path: [0.1, 0.0, 0.0])
    assert [tree.shape.size for tree in grown(DynamicTree(6, 2, 20, confidence=0.5), drafter)] == [1, 1]
    assert drafter.widths == []


def test_nodes_that_could_not_be_in_the_tree_are_not_expanded():
    drafter = Scripted(1, seeded("random", 0, V))
    grown(DynamicTree(6, 4, 6), drafter)
    assert drafter.widths == [4, 1]  # of the second level's nodes one is among the four best so far, of the third none
    drafter = Scripted(1, seeded("random", 0, V))
    grown(DynamicTree(3, 4, 60), drafter)
    assert drafter.widths == [4, 4]  # the last level's children would be too deep


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth must be a whole number of at least 1, got 0"),
        ({"width": 0}, "width must be .* got 0"),
        ({"size": -3}, "size must be .* got -3"),
        ({"width": 2.0}, "width must be .* got 2.0"),
        ({"size": "9"}, "size must be .* got '9'"),
        ({"depth": True}, "depth must be .* got True"),
        ({"confidence": -0.1}, "between 0 .* and 1, got -0.1"),
        ({"confidence": 1.5}, "between 0 .* and 1, got 1.5"),
        ({"confidence": float("nan")}, "between 0 .* and 1, got nan"),
        ({"confidence": "high"}, "between 0 .* and 1, got 'high'"),
        ({"temperature": -1.0}, "drafts' temperature must be at least 0"),
    ],
)
def test_settings_that_make_no_tree_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DynamicTree(**({"depth": 2, "width": 2, "size": 4} | settings))


def test_trees_deeper_than_the_drafter_are_refused():
    with pytest.raises(ValueError, match="tree is 7 deep, but the head drafts only 6"):
        grown(DynamicTree(7, 2, 9), Scripted(1, seeded("random", 0, V)))
