"""The batch plan is a pure function of seed and step, and covers every epoch exactly."""

import pytest
import torch

from data.batches import BatchPlan, collate
from data.conversations import Encoded

SIZES = [(1, 1), (7, 3), (8, 4), (5, 8), (3, 10), (100, 7)]


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_every_epoch_holds_every_sample_once(num_samples, batch_size):
    plan = BatchPlan(num_samples, batch_size, seed=3)
    batches = [plan.indices(step) for step in range(4 * plan.steps_per_epoch)]
    assert all(len(batch) == batch_size for batch in batches)
    stream = [index for batch in batches for index in batch]
    for epoch in range(len(stream) // num_samples):
        assert sorted(stream[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_batch_depends_on_seed_and_step_only(num_samples, batch_size):
    forward = [BatchPlan(num_samples, batch_size, seed=5).indices(step) for step in range(30)]
    backward = [BatchPlan(num_samples, batch_size, seed=5).indices(step) for step in reversed(range(30))]
    assert forward == backward[::-1]


def test_sample_order_does_not_depend_on_batch_size():
    stream = [index for step in range(12) for index in BatchPlan(10, 2, seed=1).indices(step)]
    assert stream == [index for step in range(4) for index in BatchPlan(10, 6, seed=1).indices(step)]


def test_epochs_and_seeds_differ():
    plan = BatchPlan(50, 50, seed=0)
    orders = [plan.indices(0), plan.indices(1), BatchPlan(50, 50, seed=1).indices(0), list(range(50))]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(("num_samples", "batch_size", "steps"), [(8, 4, 2), (9, 4, 3), (3, 10, 1)])
def test_steps_per_epoch_cover_every_sample(num_samples, batch_size, steps):
    plan = BatchPlan(num_samples, batch_size, seed=0)
    assert plan.steps_per_epoch == steps
    assert {index for step in range(steps) for index in plan.indices(step)} == set(range(num_samples))


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_plans_are_refused(sizes):
    with pytest.raises(ValueError, match="must"):
        BatchPlan(*sizes)


def test_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        BatchPlan(3, 2, 0).indices(-1)


def test_collate_pads_on_the_right():
    token_ids, loss_mask = collate([Encoded([5, 6, 7], [False, True, True]), Encoded([9], [True])])
    assert token_ids.dtype == torch.int64
    assert loss_mask.dtype == torch.bool
    assert token_ids.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert loss_mask.tolist() == [[False, True, True], [True, False, False]]


def test_collate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        collate([])
