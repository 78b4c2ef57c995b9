import torch
from torch import nn
from torch.nn import functional as F

from heads.packing import SharedInput, add_output, outputs, pack_linears


class Pair(SharedInput):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(48, 8), nn.Linear(48, 16, bias=False), nn.Linear(24, 48)

    @property
    def same_input(self):
        return self.first, self.second

    def forward(self, x):
        return add_output(x, self.last, torch.cat(list(outputs(self.same_input, x)), dim=-1))


def expected(pair, x):
    both = [F.linear(x, layer.weight, layer.bias) for layer in pair.same_input]
    return x + F.linear(torch.cat(both, dim=-1), pair.last.weight, pair.last.bias)


@torch.no_grad()
def test_layers_with_the_same_input_are_one_product_and_each_can_still_be_called_alone():
    pair, x = Pair(), torch.randn(3, 48)
    packed = pack_linears(pair)
    product = pair.first.forward.product
    assert pair.second.forward.product is product
    assert pair.last.forward.product is not product
    torch.testing.assert_close(pair(x), expected(pair, x), atol=1e-5, rtol=1e-5)
    for layer in pair.same_input:
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
    pair.second = nn.Linear(48, 16)  # not what was packed
    torch.testing.assert_close(pair(x), expected(pair, x), atol=1e-5, rtol=1e-5)
    packed.disable()
    assert torch.equal(pair(x), expected(pair, x))


def test_any_of_the_layers_forgets_the_product_where_gradients_are_on():
    pair, x = Pair(), torch.randn(3, 48)
    pack_linears(pair)
    for layer in pair.same_input:
        layer(x).sum().backward()
        layer.weight.data.mul_(2)  # unseen, as by fused optimisers
        with torch.no_grad():
            torch.testing.assert_close(pair(x), expected(pair, x), atol=1e-5, rtol=1e-5)
