"""The chunked loss equals the obvious one, in value and gradients, and never holds [positions, vocabulary]."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.losses import vocabulary_loss, vocabulary_loss_reference
from heads.objectives import OBJECTIVES

N, K, U, D = 7, 3, 23, 5
BOTH = {"ce": 0.3, "kl": 0.9}
SINGLE = [{name: 0.7} for name in OBJECTIVES]
MIXED = [BOTH, {"tv": 0.5, "acceptance": 0.2}, {name: 0.1 + 0.2 * n for n, name in enumerate(OBJECTIVES)}]


def make_inputs(
    *, own: bool, n: int = N, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    return {
        "states": normal(n, K, D).requires_grad_(),
        "weight": normal(*((K, U, D) if own else (U, D))).requires_grad_(),
        "labels": torch.randint(0, U, (n,), generator=generator),
        "teacher": normal(n, D),
        "teacher_weight": normal(U, D),
        "row_weights": torch.rand(n, K, generator=generator, dtype=torch.float64).to(dtype),
    }


def gradients(loss: torch.Tensor, inputs: dict) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, [inputs["states"], inputs["weight"]])


@pytest.mark.parametrize("own", [False, True], ids=["shared-weight", "own-weights"])
@pytest.mark.parametrize("chunk_size", [1, 3, N, 5 * N])
@pytest.mark.parametrize("losses", [*SINGLE, *MIXED], ids="-".join)
def test_chunks_give_the_values_and_gradients_of_the_reference(own, chunk_size, losses):
    inputs = make_inputs(own=own)
    expected = vocabulary_loss_reference(**inputs, losses=losses)
    loss, *_ = vocabulary_loss(**inputs, losses=losses, chunk_size=chunk_size)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    # a factor on the loss, as accumulation and clipping put one
    for found, wanted in zip(gradients(2.5 * loss, inputs), gradients(2.5 * expected, inputs), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("own", [False, True])
def test_terms_are_cross_entropy_and_divergence_as_torch_defines_them(own):
    inputs = make_inputs(own=own)
    loss, terms, correct, accept = vocabulary_loss(**inputs, losses=BOTH, chunk_size=2)
    loss = loss.detach()
    total = 0.0
    for i in range(N):
        teacher = (inputs["teacher_weight"] @ inputs["teacher"][i]).softmax(-1)
        for k in range(K):
            weight = inputs["weight"][k] if own else inputs["weight"]
            logits = (weight @ inputs["states"][i, k]).detach()
            cross_entropy = F.cross_entropy(logits, inputs["labels"][i])
            divergence = F.kl_div(logits.log_softmax(-1), teacher, reduction="sum")
            expected = 0.3 * cross_entropy + 0.9 * divergence
            assert float(terms[i, k]) == pytest.approx(float(expected), abs=1e-12)
            assert float(accept[i, k]) == pytest.approx(
                float(torch.minimum(logits.softmax(-1), teacher).sum()), abs=1e-12
            )
            assert bool(correct[i, k]) == (int(logits.argmax()) == int(inputs["labels"][i]))
            total += float(inputs["row_weights"][i, k] * expected)
    assert float(loss) == pytest.approx(total, abs=1e-10)
    assert not terms.requires_grad
    assert not accept.requires_grad


@pytest.mark.parametrize("name", ["kl", "reverse_kl"])
def test_a_head_that_equals_its_target_has_no_divergence_and_no_gradient(name):
    inputs = make_inputs(own=False)
    inputs["teacher_weight"] = inputs["weight"].detach().clone()
    inputs["states"] = inputs["teacher"][:, None].expand(-1, K, -1).clone().requires_grad_()
    loss, terms, _, accept = vocabulary_loss(**inputs, losses={name: 1.0}, chunk_size=3)
    assert float(terms.abs().max()) < 1e-12
    assert float(accept.min()) > 1 - 1e-12
    for gradient in gradients(loss, inputs):
        assert float(gradient.abs().max()) < 1e-12


@pytest.mark.parametrize("losses", [BOTH, {"tv": 1.0}])
@pytest.mark.parametrize("own", [False, True])
def test_terms_of_weight_zero_have_no_gradient_and_do_not_count(own, losses):
    inputs = make_inputs(own=own)
    inputs["row_weights"][2] = 0
    inputs["row_weights"][:, 1] = 0
    loss, terms, *_ = vocabulary_loss(**inputs, losses=losses, chunk_size=3)
    states, weight = gradients(loss, inputs)
    assert not states[2].any()
    assert not states[:, 1].any()
    assert states[0, 0].any()
    assert terms[2, 1] != 0  # the term itself is reported whatever its weight
    assert float(loss.detach()) == pytest.approx(float((terms * inputs["row_weights"]).sum()))
    if own:
        assert not weight[1].any()
        assert weight[2].any()


@pytest.mark.parametrize("losses", [*SINGLE, *MIXED], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_extreme_logits_stay_finite(dtype, losses):
    inputs = make_inputs(own=False, scale=100.0, dtype=dtype)  # logits of the order of 1e4
    loss, terms, *_ = vocabulary_loss(**inputs, losses=losses, chunk_size=3)
    assert math.isfinite(float(loss.detach()))
    assert terms.isfinite().all()
    assert float(loss.detach()) > (100 if set(losses) & {"ce", "kl", "reverse_kl"} else 1)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    for gradient in gradients(loss, inputs):
        assert gradient.isfinite().all()
        assert gradient.dtype == dtype


def test_no_positions_give_loss_zero_and_zero_gradients():
    inputs = make_inputs(own=True, n=0)
    loss, terms, correct, accept = vocabulary_loss(**inputs, losses=BOTH, chunk_size=3)
    assert float(loss.detach()) == 0
    assert terms.shape == correct.shape == accept.shape == (0, K)
    states, weight = gradients(loss, inputs)
    assert states.shape == (0, K, D)
    assert not weight.any()


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0) if sizes else self.numel
        return result


@pytest.mark.parametrize("losses", [BOTH, MIXED[-1]], ids=["usual", "all"])
def test_memory_does_not_grow_with_positions_times_vocabulary(losses):
    n, u, chunk = 200, 997, 4
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(n, K, D, generator=generator).requires_grad_()
    weight = torch.randn(u, D, generator=generator).requires_grad_()
    labels = torch.randint(0, u, (n,), generator=generator)
    with LargestTensor() as largest:
        loss, *_ = vocabulary_loss(
            states, weight, labels, states[:, 0].detach(), weight.detach(), torch.ones(n, K),
            losses=losses, chunk_size=chunk,
        )  # fmt: skip
        loss.backward()
    assert largest.numel <= max(chunk * K * u, n * K * D, u * D)
    assert largest.numel >= chunk * K * u  # the recorder sees the logits at all
    with LargestTensor() as reference:
        vocabulary_loss_reference(
            states, weight, labels, states[:, 0].detach(), weight.detach(), torch.ones(n, K), losses=losses
        )
    assert reference.numel >= n * K * u
