"""Small passes over packed weights are padded to the number of rows that such products like; nobody notices."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from decode import PromptLookup, Target, generate
from decode.session import FEW_ROWS, SHORT_CONTEXT
from decode.tree import TokenTree, chain_shape


@pytest.fixture(scope="module")
def target(make_tiny_llama):
    return Target(make_tiny_llama(dtype=torch.float32))


def score(target, rows, nodes, context):
    session = target.session(rows, context + nodes)
    session.prefill([[5 + i % 90 for i in range(context)]] * rows)
    trees = [TokenTree(torch.arange(7, 7 + nodes), chain_shape(nodes)) for _ in range(rows)]
    out = session.score(trees)
    session.commit([range(nodes)] * rows)
    return out, session


@pytest.mark.parametrize(
    ("rows", "nodes", "padded"), [(1, 1, 4), (1, 3, 4), (1, 5, 5), (2, 1, 2), (3, 1, 2), (4, 1, 1)]
)
def test_few_nodes_are_padded_and_give_what_they_give_alone(target, rows, nodes, padded, monkeypatch):
    out, session = score(target, rows, nodes, 9)
    assert out.logits.shape[:2] == out.hidden.shape[:2] == (rows, padded)
    assert session.lengths == [9 + nodes] * rows
    monkeypatch.setattr("decode.session.FEW_ROWS", 1)
    alone, other = score(target, rows, nodes, 9)
    assert alone.logits.shape[1] == nodes
    torch.testing.assert_close(out.logits[:, :nodes], alone.logits, atol=1e-4, rtol=1e-4)
    for row in range(rows):
        torch.testing.assert_close(session.cache.contents(row), other.cache.contents(row), atol=1e-4, rtol=1e-4)


def test_nothing_is_padded_behind_a_long_context_or_where_nothing_is_packed(target, make_tiny_llama):
    assert score(target, 1, 1, SHORT_CONTEXT)[0].logits.shape[1] == FEW_ROWS
    assert score(target, 1, 1, SHORT_CONTEXT + 1)[0].logits.shape[1] == 1
    for other in (Target(make_tiny_llama()), Target(make_tiny_llama(dtype=torch.float32), pack=False)):
        assert score(other, 1, 1, 9)[0].logits.shape[1] == 1


def test_a_model_of_which_only_the_lm_head_is_packed_is_not_padded():
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    other = Target(GPT2LMHeadModel(GPT2Config(**sizes)))
    assert (len(other.packed), other.packed.has_products) == (1, True)
    out, session = score(other, 1, 1, 9)
    assert out.logits.shape[1] == 1
    assert session.lengths == [10]


def test_texts_are_the_unpadded_ones(target, monkeypatch):
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 9, 10, 9]]
    options = [{}, {"proposer": PromptLookup(length=2)}, {"proposer": PromptLookup(length=1), "check": True}]
    padded = [generate(target, p, max_new_tokens=20, **o).token_ids for p in prompts for o in options]
    monkeypatch.setattr("decode.session.FEW_ROWS", 1)
    assert padded == [generate(target, p, max_new_tokens=20, **o).token_ids for p in prompts for o in options]
