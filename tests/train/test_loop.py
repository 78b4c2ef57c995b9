import copy
import signal
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from accelerate import Accelerator

from data.batches import BatchPlan
from heads.base import FeatureBatch
from heads.medusa import MedusaHead
from train.config import OptimConfig
from train.loop import StopRequest, accumulate_gradients, schedule_factor


class RandomFeatures:
    """Sixteen ragged samples of random states."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.lengths = [6 + n % 5 for n in range(16)]
        self.token_ids = torch.randint(320, (16, 10), generator=generator)
        self.hidden = torch.randn(16, 10, 32, generator=generator, dtype=torch.float64)

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        longest = max(self.lengths[n] for n in indices)
        mask = torch.zeros(len(indices), longest, dtype=torch.bool)
        for row, n in enumerate(indices):
            mask[row, 2 : self.lengths[n]] = True
        return FeatureBatch(self.token_ids[list(indices), :longest], mask, self.hidden[list(indices), :longest])

    def num_supervised(self, indices: Sequence[int]) -> int:
        return sum(self.lengths[n] - 2 for n in indices)

    def num_tokens(self, indices: Sequence[int]) -> int:
        return sum(self.lengths[n] for n in indices)


def gradients(
    head: MedusaHead, indices: Sequence[int], accumulation: int
) -> tuple[list[torch.Tensor], dict[str, float]]:
    head = copy.deepcopy(head)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(head)
    sums = accumulate_gradients(accelerator, prepared, RandomFeatures(), indices, accumulation)
    means = {name: (value[0] / value[1]).item() for name, value in sums.items()}
    return [parameter.grad for parameter in head.parameters()], means


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_a_step_is_the_same_however_its_batch_is_split(tiny_head: MedusaHead, fresh_accelerate, accumulation: int):
    indices = BatchPlan(16, 8, seed=0).indices(1)
    whole, loss = gradients(tiny_head, indices, 1)
    split, split_loss = gradients(tiny_head, indices, accumulation)
    assert split_loss == pytest.approx(loss, abs=1e-12)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert all(gradient.abs().max() > 1e-6 for gradient in whole)


def test_the_loss_is_per_supervised_token_of_the_whole_batch(tiny_head: MedusaHead, fresh_accelerate):
    source = RandomFeatures()
    found, means = gradients(tiny_head, [0, 4, 3, 9], 2)
    head = copy.deepcopy(tiny_head)
    total = head(source.batch([0, 4, 3, 9])).loss
    expected = total / source.num_supervised([0, 4, 3, 9])
    expected.backward()
    assert means["loss"] == pytest.approx(expected.item(), rel=1e-12)
    for parameter, gradient in zip(head.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_warmup_rises_to_the_peak_and_cosine_falls_to_zero():
    factor = schedule_factor(OptimConfig(steps=100, warmup_steps=10), 100)
    rising = [factor(step) for step in range(11)]
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(1 / 11)  # no step is lost at a rate of 0
    assert rising[10] == 1.0
    assert factor(55) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(0.0)
    constant = schedule_factor(OptimConfig(steps=100, warmup_steps=10, schedule="constant"), 100)
    assert {constant(step) for step in range(10, 100)} == {1.0}


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell started the tests in the background and has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_request_and_is_given_back_at_the_end(number: signal.Signals):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        signal.raise_signal(number)  # a repeated one changes nothing
        assert stop()
    assert signal.getsignal(number) is before


def test_a_later_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch, python_interrupts: None):
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        later = time.monotonic() + 10
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop()
