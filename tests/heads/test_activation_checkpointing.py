"""Steps of the draft layer computed again in the backward pass: the same numbers in less memory."""

from dataclasses import replace

import pytest
import torch

from data.conversations import Encoded
from heads import create_head, head_class
from heads.base import FeatureBatch
from train.imagined import step_bytes
from train.new_head import target_sizes

SETTINGS = {"eagle": {"unroll": 3}, "eagle3": {"unroll": 4, "feature_layers": (1, 2)}}


def make(kind: str, target, **changes: object):
    config = head_class(kind).Config(**SETTINGS[kind], **target_sizes(target, head_class(kind).Config))
    torch.manual_seed(3)
    return create_head(kind, replace(config, **changes), target).train()


def learn(head, target, *, bf16: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the gradients of two rows of different length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 320, (2, 30), generator=generator)
    mask = torch.arange(30) >= torch.tensor([[6], [14]])
    hidden, features = target.encode_features(ids, [30, 30], head.feature_layers)
    parts = [None if part is None else part.float() for part in (hidden, features)]
    torch.manual_seed(7)  # of EAGLE's noise
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = head(FeatureBatch(ids, mask, *parts)).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in head.parameters()]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_loss_and_gradients_have_the_same_bits(tiny_target, kind: str, bf16: bool):
    kept, again = (
        learn(make(kind, tiny_target, activation_checkpointing=value), tiny_target, bf16=bf16)
        for value in (False, True)
    )
    assert torch.equal(kept[0], again[0])
    assert len(kept[1]) == len(again[1]) > 5
    for one, other in zip(kept[1], again[1], strict=True):
        assert torch.equal(one, other)
        assert one.abs().sum() > 0


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_takes_less_memory(tiny_target, kind: str):
    samples = [Encoded(list(range(2, 202)), [False] * 10 + [True] * 190)] * 2
    kept, again = (
        step_bytes(
            make(kind, tiny_target, activation_checkpointing=value, chunk_size=8),
            samples,
            torch.float32,
            passes=1,
            bf16=False,
        )[0]
        for value in (False, True)
    )
    assert again < 0.7 * kept
