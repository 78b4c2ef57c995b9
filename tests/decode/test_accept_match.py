"""`Match` emits what plain sampling with the same noise emits, whatever the tree; its fast path is its general walk."""

import random

import pytest
import torch

from decode import Match, Rejection, Sampling
from decode.accept import follow_choices
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape, tree_shape

V = 6
CHOOSE = Sampler.choose


def table_logits(text: list[int]) -> torch.Tensor:
    number = sum((token + 1) * 7**i for i, token in enumerate(text[-4:]))
    return 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(number + len(text)), dtype=torch.float64)


def random_tree(chance: random.Random, root: int, size: int) -> TokenTree:
    """Any shape, any tokens: siblings may repeat, order is not by depth."""
    parents = [-1, *(chance.randrange(i) for i in range(1, size))]
    tokens = [root, *(chance.randrange(V) for _ in range(1, size))]
    return TokenTree(torch.tensor(tokens), tree_shape(tuple(parents)))


def tree_logits(text: list[int], tree: TokenTree) -> torch.Tensor:
    rows = []
    for node in range(tree.shape.size):
        path = []
        while node:
            path.insert(0, int(tree.token_ids[node]))
            node = tree.shape.parents[node]
        rows.append(table_logits(text + path))
    return torch.stack(rows)


def decode(rule, sampler: Sampler, length: int, make_tree) -> tuple[list[int], int]:
    start, steps = len(sampler.context), 0
    while len(sampler.context) < start + length:
        tree = make_tree(sampler.context)
        (verdict,) = rule([tree], tree_logits(sampler.context, tree)[None], [sampler])
        assert list(verdict.tokens[:-1]) == tree.token_ids[list(verdict.path[1:])].tolist()
        sampler.context += verdict.tokens
        steps += 1
    return sampler.context[start : start + length], steps


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 0.7, "repetition_penalty": 1.3, "top_k": 4}], ids=str
)
def test_any_tree_gives_the_plain_text_of_every_seed(settings):
    accepted = 0
    for seed in range(40):
        sampling = Sampling(**settings, seed=seed)
        plain, steps = decode(
            Match(), Sampler(sampling, 0, [1, 2]), 12, lambda text: TokenTree(torch.tensor(text[-1:]), chain_shape(1))
        )
        assert steps == 12
        chance = random.Random(seed)
        for size in (2, 6, 14):
            text, steps = decode(
                Match(),
                Sampler(sampling, 0, [1, 2]),
                12,
                lambda text, size=size, chance=chance: random_tree(chance, text[-1], size),
            )
            assert text == plain
            accepted += 12 - steps
    assert accepted > 100


def test_another_seed_is_another_text():
    def plain(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), 0, [1])
        return decode(Match(), sampler, 12, lambda text: TokenTree(torch.tensor(text[-1:]), chain_shape(1)))[0]

    assert len({tuple(plain(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=["match", "rejection"])
def test_a_tree_of_one_node_emits_the_next_token_alone(rule):
    for settings in ({}, {"temperature": 1.0}):
        sampler = Sampler(Sampling(**settings, seed=1), 0, [1])
        tree = TokenTree(torch.tensor([1]), chain_shape(1))
        (verdict,) = rule([tree], tree_logits([1], tree)[None], [sampler])
        assert verdict.path == (0,)
        assert 0 <= verdict.next_token < V


@pytest.mark.parametrize("vocab_size", [V, 3000])
def test_the_greedy_fast_path_is_the_general_walk_even_in_ties(vocab_size):
    chance = random.Random(0)
    deepest = 0
    for trial in range(60):
        generator = torch.Generator().manual_seed(trial)
        rows = 1 + trial % 3
        trees = [random_tree(chance, 3, chance.randint(1, 12)) for _ in range(rows)]
        size = max(tree.shape.size for tree in trees)
        # passes may be padded to more nodes than any tree has
        logits = torch.randint(0, 2, (rows, size + trial % 4, vocab_size), generator=generator).float()
        if vocab_size > V:
            logits[..., V:] = (
                torch.randint(0, 2, logits[..., V:].shape, generator=generator) - 0.5
            )  # ties above 1 are rare
            logits[..., :V] += 1
        samplers = [Sampler(Sampling(seed=0), row, [3]) for row in range(rows)]
        fast = Match()(trees, logits, samplers)
        slow = [
            follow_choices(tree, logits[b], sampler)
            for b, (tree, sampler) in enumerate(zip(trees, samplers, strict=True))
        ]
        assert fast == slow
        point_masses = Rejection()(trees, logits, samplers)
        assert [verdict.path for verdict in point_masses] == [verdict.path for verdict in slow]
        assert [verdict.next_token for verdict in point_masses] == [verdict.next_token for verdict in slow]
        deepest = max(deepest, *(len(verdict.path) for verdict in fast))
    assert deepest > 2


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9, "min_p": 0.05}, {"temperature": 1.5, "top_k": 3}],
    ids=str,
)
def test_choosing_at_all_nodes_at_once_is_the_general_walk(settings, monkeypatch):
    monkeypatch.setattr("decode.accept.answers_later", lambda device: True)
    monkeypatch.setattr(Sampler, "choose", None)  # which asks node by node
    chance, lengths = random.Random(0), []
    for trial in range(60):
        rows = 1 + trial % 3
        trees = [random_tree(chance, 3, chance.randint(1, 12)) for _ in range(rows)]
        size = max(tree.shape.size for tree in trees)
        logits = torch.randn(rows, size + trial % 4, V, generator=torch.Generator().manual_seed(trial))
        samplers = [Sampler(Sampling(**settings, seed=trial), row, [3] * (row + 1)) for row in range(rows)]
        fast = Match()(trees, logits, samplers)
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "choose", CHOOSE)
            slow = [follow_choices(*row) for row in zip(trees, logits, samplers, strict=True)]
        assert fast == slow
        lengths += [len(verdict.path) for verdict in fast]
    assert max(lengths) > 2


def test_a_greedy_row_may_share_a_batch_with_sampled_ones(monkeypatch):
    monkeypatch.setattr("decode.accept.answers_later", lambda device: True)
    trees = [TokenTree(torch.tensor([2, 4, 4]), chain_shape(3))] * 2
    logits = torch.tensor([0.0, 0.9, 0.8, 0, 1.0, 0]).expand(2, 3, V)
    samplers = [Sampler(Sampling(temperature=t, seed=0), 0, [2]) for t in (0.0, 5.0)]
    assert Match()(trees, logits, samplers)[0] == ((0, 1, 2), (4, 4, 4))
    assert Match()(trees, logits, samplers)[1] == follow_choices(trees[1], logits[1], samplers[1])


def test_padding_nodes_of_smaller_trees_are_never_entered():
    """Logits of padding say token 0, which a short row must not take for a child (a Medusa bug)."""
    small, large = TokenTree(torch.tensor([4]), chain_shape(1)), TokenTree(torch.tensor([4, 0, 0, 0]), chain_shape(4))
    logits = torch.zeros(2, 4, V)
    logits[..., 0] = 1
    samplers = [Sampler(Sampling(seed=0), row, [4]) for row in range(2)]
    assert [v.path for v in Match()([small, large], logits, samplers)] == [(0,), (0, 1, 2, 3)]


def test_a_batch_of_greedy_and_penalised_rows_is_decided_row_by_row():
    tree = TokenTree(torch.tensor([2, 2, 2]), chain_shape(3))
    logits = torch.tensor([0.0, 0.9, 1.0, 0, 0, 0]).expand(1, 3, V)
    plain, penalised = Sampling(seed=0), Sampling(repetition_penalty=1e9, seed=0)
    assert Match()([tree], logits, [Sampler(plain, 0, [2])])[0] == ((0, 1, 2), (2, 2, 2))
    assert Match()([tree], logits, [Sampler(penalised, 0, [2])])[0] == ((0,), (1,))
    both = Match()([tree, tree], logits.expand(2, -1, -1), [Sampler(plain, 0, [2]), Sampler(penalised, 1, [2])])
    assert both == [((0, 1, 2), (2, 2, 2)), ((0,), (1,))]
    # the penalty counts the path itself: 1 may follow once
    path = TokenTree(torch.tensor([2, 1, 1]), chain_shape(3))
    assert Match()([path], logits, [Sampler(penalised, 0, [2])])[0].path == (0, 1)
