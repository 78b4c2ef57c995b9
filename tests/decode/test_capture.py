"""Features are the outputs of the decoder layers asked for, in training and in decoding."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from decode import Target, UnsupportedTargetError
from decode.tree import TokenTree, tree_shape


def layer_outputs(target: Target, ids: list[int], layers: list[int]) -> torch.Tensor:
    """transformers' own states: `output_hidden_states[k]` enters layer k + 1, so it is what layer k put out."""
    with torch.no_grad():
        states = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)[0]


def test_training_and_decoding_record_the_same_features(tiny_target):
    ids = [5, 6, 7, 8, 9, 10]
    expected = layer_outputs(tiny_target, ids, [1])
    _, encoded = tiny_target.encode_features(torch.tensor([ids]), [6], [1])
    torch.testing.assert_close(encoded[0], expected)
    session = tiny_target.session(2, 20, [1])
    out = session.prefill([ids[:4], ids[:3]], chunk_size=3)
    torch.testing.assert_close(out.features[0], expected[:4])
    torch.testing.assert_close(out.features[1, :3], expected[:3])
    session.keep([0])
    tree = session.score([TokenTree(torch.tensor([9, 11, 10]), tree_shape((-1, 0, 0)))])
    torch.testing.assert_close(tree.features[0, [0, 2]], expected[4:])


def test_the_last_layers_features_come_before_the_final_norm(tiny_target):
    ids = torch.tensor([[5, 6, 7]])
    hidden, features = tiny_target.encode_features(ids, [3], [1, 2])
    torch.testing.assert_close(tiny_target.model.model.norm(features[..., 32:]), hidden)


def test_no_features_are_recorded_where_none_are_wanted(tiny_target):
    session = tiny_target.session(1, 9)
    assert session.prefill([[1, 2]]).features is None
    assert tiny_target.encode_features(torch.tensor([[1, 2]]), [2], ())[1] is None


def test_layers_of_other_families_are_found():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=3, n_head=4, n_positions=64)).double()
    target = Target(model, name="gpt2")
    ids = [5, 6, 7]
    _, features = target.encode_features(torch.tensor([ids]), [3], [1, 2])
    torch.testing.assert_close(features[0], layer_outputs(target, ids, [1, 2]))


@pytest.mark.parametrize("layers", [[0], [3], [2, 1], [1, 1], [-1]])
def test_layers_that_there_are_not_are_refused(tiny_target, layers):
    with pytest.raises(ValueError, match=r"ascending numbers from 1 to 2 .* got \["):
        tiny_target.session(1, 9, layers)


def test_a_model_whose_layers_cannot_be_told_says_so(make_tiny_llama):
    model = make_tiny_llama()
    model.model.twins = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    target = Target(model, name="twins")
    with pytest.raises(UnsupportedTargetError, match="decoder layers: 2 lists of 2"):
        target.encode_features(torch.tensor([[1]]), [1], [1])
