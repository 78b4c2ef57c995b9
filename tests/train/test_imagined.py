"""A step that is only imagined takes the bytes of one that is made."""

import pytest
import torch

from data.batches import collate
from data.conversations import Encoded
from decode import Target
from heads import head_class
from heads.base import FeatureBatch, Head
from train.draft_model import DraftModelConfig, DraftModelInTraining
from train.imagined import Imagined, LiveBytes, step_bytes
from train.new_head import target_sizes

KINDS = {
    "medusa": {"own_lm_head": True},
    "hydra": {"prefix_layer": True},
    "eagle": {"unroll": 2},
    "eagle3": {"feature_layers": (1, 2), "draft_vocab_size": 100, "unroll": 3},
    "draft_model": {"width": 16, "num_attention_heads": 2, "num_layers": 1},
}
SAMPLES = [Encoded(list(range(5, 5 + n)), [False] * 4 + [True] * (n - 4)) for n in (40, 23)]


@pytest.fixture(scope="module")
def target(make_tiny_llama) -> Target:
    return Target(make_tiny_llama(dtype=torch.float32), name="tiny")


def make_head(kind: str, target: Target) -> Head:
    if kind == "draft_model":
        return DraftModelInTraining(DraftModelConfig(hidden_size=32, vocab_size=320, **KINDS[kind]), target)
    head = head_class(kind)
    return head(head.Config(**target_sizes(target, head.Config), chunk_size=8, **KINDS[kind]), target)


def real_step(head: Head, dtype: torch.dtype, passes: int, bf16: bool) -> LiveBytes:
    counted = LiveBytes(torch.device("cpu"))
    token_ids, loss_mask = collate(SAMPLES)
    for _ in range(passes):
        with counted:
            layers = [torch.randn(*token_ids.shape, 32, dtype=dtype) for _ in head.feature_layers]
            features = torch.cat(layers, dim=-1) if layers else None
            batch = FeatureBatch(token_ids, loss_mask, torch.randn(*token_ids.shape, 32, dtype=dtype), features)
            features = None if features is None else features.to(head.dtype)
            given = FeatureBatch(token_ids, loss_mask, batch.hidden.to(head.dtype), features)
            del layers
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = head(given)
            output.loss.backward()
            del output
    return counted


@pytest.mark.parametrize(("passes", "bf16"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_imagined_step_takes_the_bytes_of_a_real_one(target: Target, kind: str, passes: int, bf16: bool):
    head = make_head(kind, target)
    dtype = torch.bfloat16 if bf16 else torch.float32
    before = {name: parameter.clone() for name, parameter in head.named_parameters()}
    peak, small = step_bytes(head, SAMPLES, dtype, passes=passes, bf16=bf16)
    assert all(torch.equal(parameter, before[name]) for name, parameter in head.named_parameters())
    assert all(parameter.grad is None for parameter in head.parameters())
    real = real_step(head, dtype, passes, bf16)
    assert peak == pytest.approx(real.peak, rel=0.001)
    assert small == peak  # all blocks are small here
    assert peak > sum(parameter.nbytes for parameter in head.parameters())  # the gradients


def test_what_is_freed_is_not_counted_and_views_are_not_counted_twice():
    before = torch.zeros(1000)
    with LiveBytes(torch.device("cpu")) as counted:
        kept = torch.zeros(100)
        more = [kept.view(10, 10), kept.add_(1), before.view(10, 100)]
        assert counted.live == 400
        torch.zeros(50)
        assert (counted.live, counted.peak) == (400, 600)
        del more
        kept = torch.zeros(2**23 + 1)
    assert counted.live == kept.nbytes
    assert counted.small == 600


def test_a_step_larger_than_any_machine_is_counted():
    with Imagined(torch.device("cpu")) as imagined:
        x = torch.ones(2**30, 2**15, dtype=torch.float32)
        y = x * 2
    assert imagined.peak == 2 * 2**47 == x.nbytes + y.nbytes
