"""Trees of heads, and that drafting state belongs to its session."""

import pytest
import torch

from decode import Chain, Drafting, DynamicTree, Sampling, StaticTree
from decode.sampling import Sampler


def test_a_head_drafts_with_its_own_tree_or_a_chain_of_all_its_depths(tiny_head):
    assert Drafting.of(tiny_head).grow == Chain(3)
    tiny_head.tree = [[0], [1], [0, 0]]
    assert Drafting.of(tiny_head).grow == StaticTree(((0,), (1,), (0, 0)))
    assert Drafting.of(tiny_head).max_nodes == 4
    assert Drafting(tiny_head, DynamicTree(3, 2, 10**8)).max_nodes == 1 + 2 + 2 * 4
    tiny_head.tree = [[1]]
    with pytest.raises(ValueError, match="elder sibling"):
        Drafting.of(tiny_head)


def test_settings_of_a_dynamic_tree_are_a_dynamic_tree(tiny_head):
    settings = {"depth": 2, "width": 3, "size": 8}
    tiny_head.tree = settings
    assert Drafting.of(tiny_head).grow == DynamicTree(2, 3, 8)
    assert Drafting.of(tiny_head).max_nodes == 8
    tiny_head.tree = {**settings, "confidence": 0.5, "temperature": None}
    assert Drafting.of(tiny_head).grow == DynamicTree(2, 3, 8, confidence=0.5)
    for tree, message in [
        ({**settings, "depht": 3}, r"knows depth, width, size, confidence, temperature, got .*'depht'"),
        ({"depth": 3, "width": 2}, "needs depth, width, size"),
        ({}, "needs depth, width, size"),
        ({**settings, "size": 0}, "size must be a whole number of at least 1"),
        ({**settings, "depth": 4}, "4 deep, but the head drafts 3"),
        ({**settings, "width": 321}, "321 children, but the head's vocabulary has 320"),
    ]:
        tiny_head.tree = tree
        with pytest.raises(ValueError, match=message):
            Drafting.of(tiny_head)


def test_sessions_of_one_head_share_no_state(tiny_head):
    drafting = Drafting(tiny_head, Chain(3))
    states = torch.randn(2, 1, 3, 32, dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3, 4]])
    rows = [Sampler(Sampling(seed=0), 0, [1, 2, 3, 4])]
    roots = torch.tensor([4])
    first, second = (drafting.begin(1, shared_noise=False) for _ in range(2))
    first.sync(tokens, states[0], [3])
    alone = first.propose(roots, rows)[0].token_ids.tolist()
    first.sync(tokens, states[0], [3])
    second.sync(tokens, states[1], [3])
    assert first.propose(roots, rows)[0].token_ids.tolist() == alone
    assert second.propose(roots, rows)[0].token_ids.tolist() != alone
