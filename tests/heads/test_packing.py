import copy
import pickle

import pytest
import torch
from torch import nn

from decode import Target, generate
from heads import create_head, head_class, load_head, save_head
from heads.packing import pack_linears
from heads.products import PackedProduct, PackedRows, can_pack
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


def linears(biases, inputs=48):
    torch.manual_seed(0)
    return [nn.Linear(inputs, 8 * (i + 1), bias=bias) for i, bias in enumerate(biases)]


def side_by_side(layers, x):
    return torch.cat([nn.functional.linear(x, layer.weight, layer.bias) for layer in layers], dim=-1)


@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 48), (2, 3, 48), (2, 0, 48)], ids=str)
@pytest.mark.parametrize("biases", [(False,), (True,), (False, False), (True, True), (True, False, True)], ids=str)
@torch.no_grad()
def test_one_product_gives_the_outputs_of_all_layers_side_by_side_and_adds_a_residual(biases, shape):
    layers, x = linears(biases), torch.randn(shape)
    product, expected = PackedProduct(layers), side_by_side(layers, x)
    residual = torch.randn_like(expected)
    given = residual.clone()
    torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product(x, residual), expected + residual, atol=1e-5, rtol=1e-5)
    assert torch.equal(residual, given)


@torch.no_grad()
def test_inputs_and_residuals_may_be_views():
    layers = linears((True, False))
    product = PackedProduct(layers)
    x, residual = torch.randn(48, 3, 8).permute(2, 1, 0), torch.randn(24, 6, 8).permute(2, 1, 0)[:, ::2]
    torch.testing.assert_close(product(x, residual), side_by_side(layers, x) + residual, atol=1e-5, rtol=1e-5)
    row = torch.randn(24).expand(8, 3, 24)
    torch.testing.assert_close(product(x, row), side_by_side(layers, x) + row, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_product_follows_each_of_its_weights_and_biases():
    layers, x = linears((True, False)), torch.randn(3, 48)
    product = PackedProduct(layers)

    def check():
        assert product.is_ready()
        torch.testing.assert_close(product(x), side_by_side(layers, x), atol=1e-5, rtol=1e-5)

    for parameter in (layers[0].weight, layers[0].bias, layers[1].weight):
        parameter.mul_(2)
        check()
    layers[0].bias = nn.Parameter(torch.randn(8))
    check()
    layers[0].bias = None
    check()
    layers[1].bias = nn.Parameter(torch.randn(16))
    check()
    product.forget()
    check()
    layers[0].weight.data.mul_(2)  # which torch does not count
    product.pack()
    check()
    layers[1].double()
    assert not product.is_ready()
    layers[1].float()
    check()


@pytest.mark.parametrize("biases", [(True,), (True, False)], ids=str)
@torch.no_grad()
def test_a_released_product_computes_the_same_without_the_plain_weights(biases):
    layers, x = linears(biases), torch.randn(3, 48)
    product, expected = PackedProduct(layers), side_by_side(layers, x)
    held = [parameter.detach() for layer in layers for parameter in layer.parameters()]
    product.release()
    for _ in range(2):
        for parameter in held:
            parameter.fill_(7.0)
        torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)
        product.forget()
        product.pack()
        assert product.is_ready()
    for layer, size in zip(layers, (8, 16), strict=False):
        assert all(parameter.is_meta for parameter in layer.parameters())
        assert layer.weight.shape == (size, 48)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="keep_weights=True"):
            copying(product)


def test_released_layers_compute_and_refuse_gradients_other_precisions_and_to_be_taken_off():
    model, x = nn.Sequential(*linears((True,)), nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(3, 48)
    with torch.no_grad():
        expected = model(x)
    packed = pack_linears(model)
    packed.release(keep=model[2])
    assert [layer.weight.is_meta for layer in model] == [True, True, False]
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        model[2].weight.mul_(2)
        torch.testing.assert_close(model(x) - model[2].bias, 2 * (expected - model[2].bias))
        with pytest.raises(RuntimeError, match="keep_weights=True"):
            model[0](x.double())
    for refused in (lambda: model(x), packed.disable, packed.disabled().__enter__):
        with pytest.raises(RuntimeError, match="keep_weights=True"):
            refused()
    model[2](torch.randn(3, 8)).sum().backward()
    assert model[2].weight.grad is not None


def test_layers_whose_weight_is_of_its_own_type_are_left_alone():
    class Quantised(torch.Tensor):
        pass

    layer = nn.Linear(8, 8)
    assert can_pack(layer)
    layer.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Quantised))
    assert not can_pack(layer)
    assert not pack_linears(layer)
