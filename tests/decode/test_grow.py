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


def expected_tree(drafter, row: int, paths, choose) -> tuple[dict, dict]:
    """By recursion from the root: the tokens along every path of ranks, and the law that a node's children carry."""
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    laws: dict[tuple[int, ...], torch.Tensor | None] = {}

    def descend(ranks: tuple[int, ...]) -> None:
        count = sum(path[:-1] == ranks for path in paths)
        if count:
            columns, laws[ranks] = choose(drafter.logits(row, tokens[ranks]), len(ranks) + 1, count)
            for rank, column in enumerate(columns):
                token = column if drafter.vocabulary is None else int(drafter.vocabulary[column])
                tokens[(*ranks, rank)] = (*tokens[ranks], token)
                descend((*ranks, rank))

    descend(())
    return tokens, laws


def ranked(score):
    """The best columns by `score(logits, depth)`."""
    return lambda logits, depth, count: (score(logits, depth).argsort(descending=True)[:count].tolist(), None)


def drawn(draw: str, temperature: float, gumbel):
    """What `decode.children.Draw` says, for one node; `gumbel(depth, rank)` is the noise."""

    def choose(logits, depth: int, count: int) -> tuple[list[int], torch.Tensor]:
        scores = logits / temperature
        if draw == "without_replacement":
            return (scores + gumbel(depth, 0)).argsort(descending=True)[:count].tolist(), scores.softmax(0)
        if draw == "with_replacement":
            return [int((scores + gumbel(depth, rank)).argmax()) for rank in range(count)], scores.softmax(0)
        best = scores.argsort(descending=True)[: count - 1].tolist()
        others = [column for column in range(len(scores)) if column not in best]
        law = torch.zeros_like(scores)
        law[others] = scores[others].softmax(0)
        return [*best, others[int((scores + gumbel(depth, 0))[others].argmax())]], law

    return choose


def check_tree(tree, grow, expected, root: int) -> None:
    paths = sorted(grow.paths, key=lambda path: (len(path), path))
    assert tree.shape.size == grow.max_nodes == len(paths) + 1
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

        check_tree(tree, grow, expected_tree(drafter, b, paths, ranked(score))[0], 5 + b)
        assert tree.draws is None


@pytest.mark.parametrize("paths", TREES.values(), ids=TREES)
@pytest.mark.parametrize("make", [DepthDrafter, PathDrafter])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
@pytest.mark.parametrize("draw", ["without_replacement", "with_replacement", "hybrid"])
@pytest.mark.parametrize("temperature", [None, 1.3], ids=["the-targets", "its-own"])
def test_drawn_trees_equal_a_recursion_and_carry_the_law_they_were_drawn_from(
    paths, make, vocabulary, draw, temperature
):
    rows = samplers(2, temperature=0.6)
    drafter = make(2, vocabulary)
    grow = StaticTree(paths, draw=draw, temperature=temperature)
    trees = grow(drafter, drafter.start(), torch.tensor([5, 6]), rows, shared_noise=False)
    columns = torch.arange(V) if vocabulary is None else vocabulary
    order = [(), *sorted(paths, key=lambda path: (len(path), path))]
    for b, (tree, row) in enumerate(zip(trees, rows, strict=True)):

        def gumbel(depth, rank, row=row):
            # of the position a token at this depth takes, of this step, and of this draw
            position = noise.key(noise.key(3, rows.index(row)), noise.DRAFT, len(row.context) + depth - 1)
            return noise.gumbel([noise.key(position, len(row.context), rank)], columns)[0]

        tokens, laws = expected_tree(drafter, b, paths, drawn(draw, temperature or 0.6, gumbel))
        check_tree(tree, grow, tokens, 5 + b)
        assert tree.draws.probs.shape == (grow.max_nodes, V)
        assert tree.draws.probs.dtype == torch.float64
        assert tree.draws.replacement == (draw == "with_replacement")
        for node, path in enumerate(order):
            last = bool(path) and (*path[:-1], path[-1] + 1) not in paths
            assert tree.draws.drawn[node] == (bool(path) and (draw != "hybrid" or last))
            full = torch.zeros(V, dtype=torch.float64)
            if path in laws:
                full[columns] = laws[path]
            torch.testing.assert_close(tree.draws.probs[node], full)


def test_a_chain_is_the_tree_of_the_best_tokens():
    assert Chain(3) == StaticTree(((0,), (0, 0), (0, 0, 0)))
    assert Chain(2, draw="hybrid", temperature=0.5) == StaticTree(((0,), (0, 0)), draw="hybrid", temperature=0.5)
    assert (Chain(3).depth, Chain(3).max_nodes) == (3, 4)
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
