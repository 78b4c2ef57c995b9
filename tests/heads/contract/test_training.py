"""Every head learns, with all of its parameters, and a batch's loss is the sum of its rows'."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from heads import FeatureBatch

LENGTHS = (12, 8, 3, 1)


def gradients(head, batch) -> dict[str, torch.Tensor]:
    names, parameters = zip(*head.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(head(batch).loss, parameters), strict=True))


def in_precision(batch, dtype):
    features = None if batch.features is None else batch.features.to(dtype)
    return replace(batch, hidden=batch.hidden.to(dtype), features=features)


def test_the_loss_of_a_batch_is_the_sum_of_its_rows_alone(case):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    rows = [case.cut(batch, [row], slice(0, length)) for row, length in enumerate(LENGTHS)]
    assert head(batch).loss.item() == pytest.approx(sum(head(row).loss.item() for row in rows), rel=1e-9)
    together, alone = gradients(head, batch), [gradients(head, row) for row in rows]
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, sum(row[name] for row in alone))
    for name, metric in head(batch).metrics.items():
        total = sum(head(row).metrics[name] for row in rows)
        torch.testing.assert_close(metric.double(), total.double())


def test_padding_adds_nothing(case):
    head = case.head()
    batch = case.batch(head, (8,))
    states = [None if part is None else F.pad(part, (0, 0, 0, 4)) for part in (batch.hidden, batch.features)]
    padded = FeatureBatch(F.pad(batch.token_ids, (0, 4)), F.pad(batch.loss_mask, (0, 4)), *states)
    assert head(padded).loss.item() == pytest.approx(head(batch).loss.item(), rel=1e-12)
    for a, b in zip(gradients(head, padded).values(), gradients(head, batch).values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_texts_shorter_than_the_reach_are_no_error(case, length):
    head = case.head()
    batch = case.batch(head, (length,))
    losses = case.losses(head, batch)
    assert [count for _, count in losses] == [max(0, length - 2 - depth) for depth in range(len(losses))]
    assert all(gradient.isfinite().all() for gradient in gradients(head, batch).values())


def test_nothing_supervised_gives_loss_zero_and_zero_gradients(case):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert head(batch).loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(head, batch).values())
    assert not any(metric.any() for metric in head(batch).metrics.values())


def test_the_gradient_reaches_every_parameter_and_nothing_of_the_target(case, vocabulary):
    head = case.head(vocabulary=vocabulary).train()
    for name, gradient in gradients(head, case.batch(head, LENGTHS)).items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 1e-9, f"{name} is dead"
    assert all(parameter.grad is None for parameter in case.target.model.parameters())


def test_metrics_carry_no_graph(case):
    head = case.head()
    output = head(case.batch(head, LENGTHS))
    assert output.loss.shape == ()
    for name, metric in output.metrics.items():
        assert metric.shape == (2,), name
        assert not metric.requires_grad, name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precisions_train_and_draft(case, dtype, tolerance):
    """The training loop hands over states in the head's precision, decoding in the target's."""
    exact = case.head()
    batch = case.batch(exact, (12, 8))
    loss, drafts = exact(batch).loss.item(), case.draft(exact, batch, [5, 4], 2)
    head = exact.to(dtype)
    low = in_precision(batch, dtype)
    assert head(low).loss.item() == pytest.approx(loss, rel=tolerance)
    assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in gradients(head, low).values())
    scale = drafts.abs().max().item()
    found = case.draft(head, batch, [5, 4], 2).double()
    torch.testing.assert_close(found, drafts, rtol=0, atol=tolerance * scale)


def test_a_head_trains_in_autocast(case):
    """`precision: bf16` keeps float32 weights and computes in bfloat16."""
    exact = case.head()
    batch = case.batch(exact, LENGTHS)
    loss = exact(batch).loss.item()
    head = exact.float()
    low = in_precision(batch, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = head(low)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(loss, rel=0.1)
    output.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters())
