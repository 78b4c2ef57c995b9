import copy
import pickle

import pytest
import torch
from torch import nn

from decode import Target, generate
from heads import create_head, head_class, load_head, save_head
from heads.packing import PackedRows, pack_linears
from train.new_head import target_sizes

KINDS = {
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3, "prefix_layer": True},
    "eagle": {"max_depth": 3},
    "eagle3": {"max_depth": 3, "feature_layers": (1, 2)},
}
VOCABULARY = torch.tensor([1, *range(20, 320, 7)])


@pytest.fixture
def target(make_tiny_llama, tiny_tokenizer):
    return Target(make_tiny_llama().float(), tiny_tokenizer, name="tiny")


@pytest.fixture
def load(target, tmp_path):
    """Save a head with random weights and load it."""

    def load(kind, vocabulary=VOCABULARY):
        torch.manual_seed(1)
        config = head_class(kind).Config
        size = None if vocabulary is None else len(vocabulary)
        head = create_head(kind, config(**KINDS[kind], **target_sizes(target, config), draft_vocab_size=size), target)
        if vocabulary is not None:
            head.set_vocabulary(vocabulary)
        for parameter in head.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
        return again(head)

    def again(head):
        save_head(head, tmp_path / "head", target=target)
        return load_head(tmp_path / "head", target)

    load.again = again
    return load


def root_logits(head):
    torch.manual_seed(3)
    hidden = torch.randn(1, 3, head.config.hidden_size)
    features = torch.randn(1, 3, 2 * head.config.hidden_size) if head.feature_layers else None
    return head.drafter().sync(torch.tensor([[5, 6, 7, 8]]), hidden, [3], features)


@pytest.mark.parametrize("shape", [(576,), (0, 576), (1, 3, 576)], ids=str)
def test_products_with_chosen_rows_are_those_of_a_linear_layer(shape):
    torch.manual_seed(0)
    weight, rows, x = torch.randn(900, 576), torch.arange(0, 900, 3), torch.randn(shape)
    products = PackedRows()
    for dtype in (torch.float32, torch.float64):
        expected = nn.functional.linear(x.to(dtype), weight.to(dtype)[rows])
        torch.testing.assert_close(products(weight.to(dtype), rows)(x.to(dtype)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle"])
def test_the_lent_projection_gives_the_lent_weights_logits(load, kind):
    head = load(kind)
    states = torch.randn(2, 5, head.config.hidden_size)
    for vocabulary in (VOCABULARY, VOCABULARY + 1):
        head.set_vocabulary(vocabulary)
        expected = states @ head.lm_head.weight[vocabulary].T
        torch.testing.assert_close(head.lent_projection()(states), expected, atol=1e-4, rtol=1e-4)


def test_chosen_rows_are_packed_once_and_again_when_the_weight_changes():
    weight, rows = nn.Parameter(torch.randn(40, 8)), torch.tensor([1, 5, 9])
    products, x = PackedRows(), torch.randn(2, 8)
    with torch.no_grad():
        products(weight, rows)
        packed = products._packed
        products(weight, rows.clone())
        assert products._packed is packed
        weight.mul_(2)
        torch.testing.assert_close(products(weight, rows)(x), x @ weight[rows].T)
        weight.data = weight.data * 3  # as module.to() does
        torch.testing.assert_close(products(weight, rows)(x), x @ weight[rows].T)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_head_that_is_cast_there_and_back_drafts_from_its_present_weights(load, kind):
    head = load(kind, None)
    for _ in range(5):  # the allocator may give the old address to the new weights
        head.to(torch.bfloat16).to(torch.float32)
    torch.testing.assert_close(root_logits(head), root_logits(load.again(head)))


def test_a_loaded_head_that_a_fused_optimizer_trains_drafts_from_its_present_weights(load):
    head = load("eagle3").train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1, fused=True)
    layers = [layer for layer in head.modules() if type(layer) is nn.Linear]
    torch.stack([layer(torch.randn(2, layer.in_features)).sum() for layer in layers]).sum().backward()
    optimizer.step()  # which does not count the change
    torch.testing.assert_close(root_logits(head.eval()), root_logits(load.again(head)))


def test_a_loaded_head_that_gets_another_vocabulary_drafts_through_its_rows(load):
    head = load("eagle3")
    head.set_vocabulary(VOCABULARY + 1)
    torch.testing.assert_close(root_logits(head), root_logits(load.again(head)))


def test_a_loaded_head_can_be_copied_and_pickled(load):
    head = load("eagle3")
    for copied in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        torch.testing.assert_close(root_logits(copied), root_logits(head))


def test_a_head_loads_in_inference_mode(load, target):
    with torch.inference_mode():
        head = load("medusa")
        drafted = generate(target, [5, 6, 7], head=head, max_new_tokens=3)
    assert drafted.token_ids == generate(target, [5, 6, 7], max_new_tokens=3).token_ids


def test_packing_leaves_no_trace_when_it_is_taken_off(load):
    head = load("hydra", None)
    packed = pack_linears(head)
    assert len(packed) == sum(type(module) is nn.Linear for module in head.modules()) > 0
    packed.disable()
    assert not any("forward" in vars(module) for module in head.modules())
