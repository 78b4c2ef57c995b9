"""Losses between a head and its target: each is its definition, gradients are derivatives, nothing becomes NaN."""

import math

import pytest
import torch

from heads.losses import check_losses, depth_metrics, needs_teacher, vocabulary_loss
from heads.objectives import LOG_FLOOR, OBJECTIVES, TOP_K, Chunk, Part, Teacher, mix

C, K, U = 4, 2, 30
NAMES = list(OBJECTIVES)


def make_chunk(*, scale: float = 2.0, dtype=torch.float64) -> tuple[Chunk, torch.Tensor, torch.Tensor]:
    """A chunk with the logits of the heads and of the target that it was made from."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(C, K, U, generator=generator, dtype=torch.float64).to(dtype)
    taught = scale * torch.randn(C, U, generator=generator, dtype=torch.float64).to(dtype)
    return compare(logits, torch.tensor([3, 0, 29, 7]), taught), logits, taught


def compare(logits: torch.Tensor, labels: torch.Tensor, taught: torch.Tensor) -> Chunk:
    return Chunk(logits.clone(), labels, Teacher(taught))  # it takes the memory of the logits


def gradient(part: Part, q: torch.Tensor) -> torch.Tensor:
    """What `Part` says its gradient is, written out."""
    result = torch.zeros_like(q)
    if part.targets is not None:
        result += part.targets.sum(-1)[:, None, None] * q - part.targets[:, None]
    if part.slope is not None:
        result += q * (part.slope - (q * part.slope).sum(-1, keepdim=True))
    return result


def define(name: str, q: list[float], p: list[float], label: int) -> float:
    pairs = list(zip(p, q, strict=True))
    likely = sorted(pairs, reverse=True)[:10]
    return {
        "ce": -math.log(q[label]),
        "kl": sum(a * math.log(a / b) for a, b in pairs),
        "reverse_kl": sum(b * math.log(b / a) for a, b in pairs),
        # a token drawn from q is kept with probability min(1, p / q)
        "tv": 1 - sum(b * min(1, a / b) for a, b in pairs),
        "acceptance": -math.log(sum(b * min(1, a / b) for a, b in pairs)),
        "top_k": -sum(a * math.log(b) for a, b in likely),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_terms_are_the_definition(name):
    chunk, logits, taught = make_chunk()
    part = OBJECTIVES[name](chunk)
    for i in range(C):
        for k in range(K):
            expected = define(name, logits[i, k].softmax(-1).tolist(), taught[i].softmax(-1).tolist(), chunk.labels[i])
            assert float(part.terms[i, k]) == pytest.approx(expected, abs=1e-12)
    assert TOP_K == 10


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_differences_of_the_terms(name):
    chunk, logits, taught = make_chunk()
    found = gradient(OBJECTIVES[name](chunk), chunk.q)
    step = 1e-6
    for u in range(U):
        moved = []
        for sign in (1, -1):
            shifted = logits.clone()
            shifted[..., u] += sign * step
            moved.append(OBJECTIVES[name](compare(shifted, chunk.labels, taught)).terms)
        torch.testing.assert_close(found[..., u], (moved[0] - moved[1]) / (2 * step), atol=1e-8, rtol=1e-6)
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_torch_finds_the_same_gradient_numerically(name):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 5), (13, 5), (3, 5), (13, 5), (3, 2))
    states, weight, *fixed = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    labels = torch.tensor([4, 12, 0])

    def loss(states, weight):
        return vocabulary_loss(states, weight, labels, *fixed, losses={name: 0.6}, chunk_size=2)[0]

    assert torch.autograd.gradcheck(loss, (states.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv", "acceptance"])
def test_only_a_head_that_equals_its_target_has_loss_zero(name):
    chunk, logits, _ = make_chunk()
    same = compare(logits, chunk.labels, logits[:, 0])
    terms = OBJECTIVES[name](same).terms
    assert terms[:, 0].abs().max() < 1e-12
    assert terms[:, 1].min() > 0.1
    assert OBJECTIVES[name](chunk).terms.min() > 0.1
    assert gradient(OBJECTIVES[name](same), same.q)[:, 0].abs().max() < 1e-12


@pytest.mark.parametrize("name", ["tv", "acceptance"])
def test_rounding_makes_no_negative_loss(name):
    logits = 2 * torch.randn(50, 1, 500, generator=torch.Generator().manual_seed(0))
    same = compare(logits, torch.zeros(50, dtype=torch.int64), logits[:, 0])
    assert same.q.sum(-1).max() > 1  # in float32
    terms = OBJECTIVES[name](same).terms
    assert terms.min() >= 0
    assert terms.max() < 1e-5


def test_a_mix_is_the_weighted_sum_whatever_the_order():
    scale = torch.rand(C, K, dtype=torch.float64)
    losses = {name: 0.3 + n for n, name in enumerate(NAMES)}
    results = []
    for names in (NAMES, NAMES[::-1]):
        chunk, _, _ = make_chunk()
        q = chunk.q.clone()
        parts = {name: OBJECTIVES[name](chunk) for name in names}
        terms, found = mix(chunk, {name: losses[name] for name in names}, scale)
        torch.testing.assert_close(terms, sum(losses[name] * part.terms for name, part in parts.items()))
        expected = sum(losses[name] * gradient(part, q) for name, part in parts.items())
        torch.testing.assert_close(found, scale[..., None] * expected)
        results.append(found)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_distributions_without_common_tokens_cost_a_finite_amount(name, dtype):
    """The head is sure of token 0, the target of token 1; the rest is 0 in any precision, or ruled out."""
    logits = torch.full((1, 1, U), -5e4, dtype=dtype)
    logits[..., 0] = 0
    for least in (-5e4, -math.inf):
        taught = torch.full((1, U), least, dtype=dtype)
        taught[:, 1] = 0
        chunk = compare(logits, torch.tensor([1]), taught)
        assert not chunk.q[..., 1:].any()
        part = OBJECTIVES[name](chunk)
        expected = {"tv": 1.0, "reverse_kl": -LOG_FLOOR, "acceptance": -LOG_FLOOR}.get(name, 5e4)
        assert float(part.terms) == pytest.approx(expected, rel=1e-4)
        found = gradient(part, chunk.q)
        assert found.isfinite().all()
        assert mix(chunk, {name: 1.0}, torch.ones(1, 1, dtype=dtype))[1].isfinite().all()
        # a head that is not quite as sure is drawn to the target's token
        logits[..., 1] = -3
        found = gradient(OBJECTIVES[name](compare(logits, torch.tensor([1]), taught)), logits.softmax(-1))
        assert float(found[0, 0, 1]) < -1e-3
        logits[..., 1] = -5e4


@pytest.mark.parametrize("losses", [{"ce": 1.0}, {"ce": 0.5, "kl": 0.0, "tv": 0}])
def test_the_teacher_is_computed_only_where_a_loss_needs_it(losses):
    states, weight = torch.randn(3, K, 5), torch.randn(U, 5)
    broken = torch.full((3, 5), math.nan)
    arguments = (states, weight, torch.tensor([1, 2, 3]), broken, weight, torch.ones(3, K))
    loss, _, _, accept = vocabulary_loss(*arguments, losses=losses, chunk_size=2)
    assert not needs_teacher(losses)
    assert loss.isfinite()
    assert accept is None
    for name in set(NAMES) - {"ce"}:
        assert needs_teacher({**losses, name: 1e-9})
        loss, _, _, accept = vocabulary_loss(*arguments, losses={**losses, name: 1.0}, chunk_size=2)
        assert loss.isnan()
        assert accept is not None


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({}, r"must map names to weights.*got \{\}; known: ce, kl, reverse_kl, tv, acceptance, top_k"),
        (None, "must map names to weights.*got None"),
        (["ce"], "must map names to weights"),
        ({"ce": 1.0, "KL": 1.0}, "unknown loss 'KL'; known: ce, kl"),
        ({"kl": -0.1}, "the weight of loss 'kl' must be a number and not negative, got -0.1"),
        ({"ce": 1, "kl": "0.5"}, "'kl' must be a number and not negative, got '0.5'"),
        ({"ce": math.nan}, "got nan"),
        ({"ce": math.inf}, "got inf"),
        ({"ce": 0, "kl": 0.0}, "all losses have weight 0"),
    ],
)
def test_losses_that_train_nothing_are_refused(losses, message):
    with pytest.raises(ValueError, match=message):
        check_losses(losses)


@pytest.mark.parametrize("losses", [{"ce": 1}, {"ce": 0, "top_k": 1e-3}, dict.fromkeys(NAMES, 2.0)])
def test_any_other_mix_is_accepted(losses):
    check_losses(losses)


def test_metrics_count_what_is_active_of_each_depth():
    terms = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    correct = torch.tensor([[True, False], [True, True], [False, True]])
    active = torch.tensor([[True, False], [False, True], [True, True]])
    metrics = depth_metrics(terms, correct, active, terms / 64)
    assert {name: value.tolist() for name, value in metrics.items()} == {
        "depth1/loss": [17, 2],
        "depth1/top1": [1, 2],
        "depth1/accept": [17 / 64, 2],
        "depth2/loss": [40, 2],
        "depth2/top1": [2, 2],
        "depth2/accept": [40 / 64, 2],
    }
    assert not any("accept" in name for name in depth_metrics(terms, correct, active, None))
