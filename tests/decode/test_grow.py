"""Trees are what an obvious recursion over paths makes of the drafter's logits."""

import random

import pytest
import torch

from decode import Chain, Sampling, StaticTree, generate, noise
from decode.sampling import Sampler
from heads import create_head
from heads.medusa import MedusaConfig

V = 23
VOCABULARY = torch.tensor([0, 2, 3, 5, 11, 14, 20, 22])
TREES = {
    "root only": (),
    "chain": ((0,), (0, 0), (0, 0, 0)),
    "wide": ((0,), (1,), (2,), (3,)),
    "mixed": (
        (0, 0, 0),
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (0, 1, 0),
        (2, 1, 0),
        (2, 1, 1),
        (2, 1, 0, 0),
    ),
    "late branch": ((0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 2)),
}


class DepthDrafter:
    """Logits depend on row and depth only, as Medusa's do."""

    max_depth = 4
    vocab_size = V

    def __init__(self, rows: int, vocabulary: torch.Tensor | None) -> None:
        self.vocabulary = vocabulary
        self.rows = list(range(rows))
        self.width = V if vocabulary is None else len(vocabulary)
        self.depth = 0

    def logits(self, row: int, path: tuple[int, ...]) -> torch.Tensor:
        """What this drafter thinks of the children of a node, given as the tokens below the root."""
        generator = torch.Generator().manual_seed(100 * row + len(path))
        return torch.randn(self.width, generator=generator, dtype=torch.float64)

    def start(self) -> torch.Tensor:
        self.depth = 0
        self.nodes: list[list[tuple[int, ...]]] = [[()] for _ in self.rows]
        return torch.stack([self.logits(row, ()) for row in self.rows])

    def extend(self, token_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        assert token_ids.shape == parents.shape == (len(self.rows), token_ids.shape[1])
        self.depth += 1
        return torch.stack([self.logits(row, (0,) * self.depth) for row in self.rows])[:, None]


class PathDrafter(DepthDrafter):
    """Logits depend on the tokens of the path: wrong node numbers give another tree."""

    def logits(self, row: int, path: tuple[int, ...]) -> torch.Tensor:
        number = sum((token + 1) * (V + 1) ** i for i, token in enumerate(path))
        return torch.randn(
            self.width, generator=torch.Generator().manual_seed(7 * row + 31 * number), dtype=torch.float64
        )

    def extend(self, token_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        levels = []
        for row, nodes, tokens, above in zip(self.rows, self.nodes, token_ids.tolist(), parents.tolist(), strict=True):
            new = [(*nodes[parent], token) for token, parent in zip(tokens, above, strict=True)]
            nodes += new  # numbered in the order in which they are added, the root is 0
            levels.append(torch.stack([self.logits(row, path) for path in new]))
        return torch.stack(levels)


def samplers(rows: int, **settings) -> list[Sampler]:
    sampling = Sampling(**settings, seed=3)
    return [Sampler(sampling, row, [1] * (4 + 2 * row)) for row in range(rows)]


def expected_tokens(drafter, row: int, paths, score) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Tokens along every path of ranks, by recursion from the root."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}

    def tokens_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in known:
            above = tokens_of(ranks[:-1])
            order = score(drafter.logits(row, above), len(ranks)).argsort(descending=True)
            column = int(order[ranks[-1]])
            token = column if drafter.vocabulary is None else int(drafter.vocabulary[column])
            known[ranks] = (*above, token)
        return known[ranks]

    return {path: tokens_of(path) for path in paths}


def check_tree(tree, grow, expected, root: int) -> None:
    paths = sorted(grow.paths, key=lambda path: (len(path), path))
    assert tree.shape.size == grow.size == len(paths) + 1
    assert int(tree.token_ids[0]) == root
    for node, path in enumerate(paths, start=1):
        assert tree.shape.depths[node] == len(path)
        assert tree.shape.parents[node] == ([(), *paths].index(path[:-1]))
        assert int(tree.token_ids[node]) == expected[path][-1]
    for node, children in enumerate(tree.shape.children):
        here = [(), *paths][node]
        assert [[(), *paths][child] for child in children] == [(*here, rank) for rank in range(len(children))]


@pytest.mark.parametrize("paths", TREES.values(), ids=TREES)
@pytest.mark.parametrize("make", [DepthDrafter, PathDrafter])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
@pytest.mark.parametrize("mode", ["greedy", "no-noise", "shared-noise"])
def test_static_trees_equal_a_recursion_over_ranks(paths, make, vocabulary, mode):
    rows = samplers(3, temperature=0.0 if mode == "greedy" else 0.6)
    drafter = make(3, vocabulary)
    shuffled = random.Random(0).sample(paths, len(paths))
    grow = StaticTree(tuple(shuffled))
    assert grow.depth == max(map(len, paths), default=0)
    trees = grow(drafter, drafter.start(), torch.tensor([5, 6, 7]), rows, shared_noise=mode == "shared-noise")
    columns = torch.arange(V) if vocabulary is None else vocabulary
    for b, (tree, row) in enumerate(zip(trees, rows, strict=True)):

        def score(logits, depth, row=row):
            if mode != "shared-noise":
                return logits
            # the noise of the very position that a token at this depth takes
            key = noise.key(noise.key(3, rows.index(row)), noise.TARGET, len(row.context) + depth - 1)
            return logits / 0.6 + noise.gumbel([key], columns)[0]

        check_tree(tree, grow, expected_tokens(drafter, b, paths, score), 5 + b)
        assert tree.draft_probs is None


@pytest.mark.parametrize("paths", TREES.values(), ids=TREES)
@pytest.mark.parametrize("make", [DepthDrafter, PathDrafter])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
def test_drawn_trees_carry_the_distribution_they_were_drawn_from(paths, make, vocabulary):
    rows = samplers(2, temperature=0.6)
    drafter = make(2, vocabulary)
    grow = StaticTree(paths, sampled=True)
    trees = grow(drafter, drafter.start(), torch.tensor([5, 6]), rows, shared_noise=False)
    columns = torch.arange(V) if vocabulary is None else vocabulary
    for b, (tree, row) in enumerate(zip(trees, rows, strict=True)):

        def score(logits, depth, row=row):
            key = noise.key(noise.key(3, rows.index(row)), noise.DRAFT, len(row.context) + depth - 1)
            return logits / 0.6 + noise.gumbel([key], columns)[0]

        expected = expected_tokens(drafter, b, paths, score)
        check_tree(tree, grow, expected, 5 + b)
        assert tree.draft_probs.shape == (grow.size, V)
        for node, path in enumerate([(), *sorted(paths, key=lambda p: (len(p), p))]):
            if tree.shape.children[node]:
                full = torch.zeros(V, dtype=torch.float64)
                full[columns] = (drafter.logits(b, expected[path] if path else ()) / 0.6).softmax(0)
                torch.testing.assert_close(tree.draft_probs[node], full)


def test_drawn_children_follow_their_distribution_without_replacement(oracles):
    drafter = DepthDrafter(1, None)
    probs = (drafter.logits(0, ()) / 1.5).softmax(0)
    first, second = torch.zeros(V), torch.zeros(V)
    favourite = int(probs.argmax())
    draws = 4000
    for seed in range(draws):
        row = Sampler(Sampling(temperature=1.5, seed=seed), 0, [1])
        (tree,) = StaticTree(((0,), (1,)), sampled=True)(
            drafter, drafter.start(), torch.tensor([1]), [row], shared_noise=False
        )
        a, b = tree.token_ids[1:].tolist()
        assert a != b
        first[a] += 1
        second[b] += a == favourite
    assert oracles.chi_square_p(first, probs * draws) > 1e-6
    rest = probs.clone()
    rest[favourite] = 0
    assert oracles.chi_square_p(second, rest / rest.sum() * second.sum()) > 1e-6


def test_greedy_drawn_trees_are_ranked_point_masses():
    drafter = DepthDrafter(1, None)
    grow = StaticTree(TREES["mixed"], sampled=True)
    (drawn,) = grow(drafter, drafter.start(), torch.tensor([1]), samplers(1), shared_noise=False)
    assert drawn.draft_probs is None
    check_tree(drawn, grow, expected_tokens(drafter, 0, TREES["mixed"], lambda logits, depth: logits), 1)


def test_a_chain_is_the_tree_of_the_best_tokens():
    assert Chain(3) == StaticTree(((0,), (0, 0), (0, 0, 0)))
    assert Chain(2, sampled=True) == StaticTree(((0,), (0, 0)), sampled=True)
    assert (Chain(3).depth, Chain(3).size) == (3, 4)
    assert StaticTree(((0, 0), (0,), (0,))) == StaticTree(((0,), (0, 0)))
    for length in (0, -1):
        with pytest.raises(ValueError, match="at least 1 token"):
            Chain(length)


@pytest.mark.parametrize(
    "paths",
    [((1,),), ((0, 0),), ((0,), (0, 1)), ((0,), (2,)), ((0,), ()), ((-1,),), ((0,), (0, -1)), ((0,), (1, 0))],
    ids=str,
)
def test_paths_without_parent_or_elder_sibling_are_refused(paths):
    with pytest.raises(ValueError, match="needs its parent and its elder sibling"):
        StaticTree(paths)


def test_trees_deeper_than_the_head_are_refused(tiny_target, tiny_head):
    drafter = DepthDrafter(1, None)
    with pytest.raises(ValueError, match="tree is 5 deep, but the head drafts only 4"):
        Chain(5)(drafter, drafter.start(), torch.tensor([1]), samplers(1), shared_noise=False)
    with pytest.raises(ValueError, match="4 deep, but the head drafts 3"):
        generate(tiny_target, [5], head=tiny_head, grow=Chain(4))


def test_ranks_beyond_the_draft_vocabulary_are_refused_before_decoding(tiny_target):
    config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=2, draft_vocab_size=3)
    head = create_head("medusa", config, tiny_target).double()
    fits = generate(tiny_target, [5], head=head, grow=StaticTree(((0,), (1,), (2,))), max_new_tokens=3)
    assert len(fits.token_ids) == 3
    with pytest.raises(ValueError, match="vocabulary"):
        generate(tiny_target, [5], head=head, grow=StaticTree(((0,), (1,), (2,), (3,))), max_new_tokens=3)
