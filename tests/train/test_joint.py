"""Heads and an adapter in one loss: gradients, schedule, and a target that stays itself while the adapter is off."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import GraniteConfig, GraniteForCausalLM

from decode import Target
from heads import FeatureBatch
from heads.medusa import MedusaConfig, MedusaHead
from train.config import ConfigError
from train.drift import compare, describe
from train.joint import Medusa2Config, Medusa2InTraining

SIZES = {"hidden_size": 32, "vocab_size": 320, "num_heads": 2, "depth_decay": 0.5}
Make = Callable[..., Medusa2InTraining]


@pytest.fixture
def target(make_tiny_llama, tiny_tokenizer) -> Target:
    return Target(make_tiny_llama(), tiny_tokenizer, name="tiny", pack=False)


@pytest.fixture
def make(target: Target) -> Make:
    """An untrained head in float64, or one whose heads and adapter are random."""

    def make(*, random: float = 0.0, **options) -> Medusa2InTraining:
        torch.manual_seed(0)
        head = Medusa2InTraining(Medusa2Config(**{**SIZES, "rank": 4, **options}), target).double()
        if random:
            for parameter in head.parameters():
                torch.nn.init.normal_(parameter, std=random)
        return head

    return make


@pytest.fixture
def batch(target: Target) -> FeatureBatch:
    """Two ragged texts; the states are the original target's."""
    torch.manual_seed(1)
    ids, lengths = torch.randint(2, 320, (2, 12)), [12, 8]
    ids[1, 8:] = 0
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 0], mask[0, 5:], mask[1, 3:8] = True, True, True
    return FeatureBatch(ids, mask, target.encode(ids, lengths))


def slow_losses(head: Medusa2InTraining, target: Target, batch: FeatureBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The base's KL and the heads' loss, term by term, by autograd."""
    with head.adapter.on():
        out = target.model(batch.token_ids, use_cache=False, output_hidden_states=True)
    states, ours = out.hidden_states[-1], out.logits.log_softmax(-1)
    original = target.lm_head(batch.hidden).log_softmax(-1)
    base, heads = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row, j in batch.loss_mask.nonzero().tolist():
        if j == 0:
            continue
        p, q = original[row, j - 1], ours[row, j - 1]
        base = base + (p.exp() * (p - q)).sum()
        for k, block in enumerate(head.blocks):
            root = j - 1 - k
            if root < 1 or not batch.loss_mask[row, root : j + 1].all():
                continue
            state = states[row, root - 1]
            guess = target.lm_head(state + F.silu(block[0].linear(state))).log_softmax(-1)
            teacher = q.detach()  # of the adapted target, which verifies
            kl = (teacher.exp() * (teacher - guess)).sum()
            heads = heads + 0.5**k * (0.2 * -guess[batch.token_ids[row, j]] + 0.8 * kl)
    return base, heads


@pytest.mark.parametrize("chunk_size", [256, 3])
def test_the_gradient_is_that_of_a_slow_obvious_version(make: Make, target: Target, batch: FeatureBatch, chunk_size):
    head = make(random=0.1, head_weight=0.3, base_losses={"kl": 2.0}, chunk_size=chunk_size)
    output = head(batch)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    base, heads = slow_losses(head, target, batch)
    assert base > 0.01
    loss = 2 * base + 0.3 * heads
    torch.testing.assert_close(output.loss, loss)
    loss.backward()
    assert len(gradients) == 4 + 2 * 14  # heads; seven linear layers in each of two
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=1e-9)
    assert not any(part.requires_grad for name, part in target.model.named_parameters() if "lora" not in name)


def test_what_is_reported_is_the_bases_loss_and_accuracy(make: Make, target: Target, batch: FeatureBatch):
    head = make(random=0.1)
    metrics = head(batch).metrics
    mask = batch.loss_mask.clone()
    mask[:, 0] = False
    base, _ = slow_losses(head, target, batch)
    torch.testing.assert_close(metrics["base/loss"], torch.stack([base.detach(), mask.sum().double()]))
    with head.adapter.on(), torch.no_grad():
        best = target.model(batch.token_ids, use_cache=False).logits.argmax(-1)
    right = (best[:, :-1] == batch.token_ids[:, 1:])[mask[:, 1:]].sum()
    assert metrics["base/top1"].tolist() == [right, mask.sum()]
    assert "depth2/top1" in metrics


def test_the_heads_are_taught_by_what_the_adapted_target_says(make: Make, batch: FeatureBatch):
    """With the original's states in the batch changed, only the base's loss changes."""
    head = make(random=0.1)
    before, after = head(batch).metrics, head(replace(batch, hidden=batch.hidden + 1)).metrics
    assert torch.equal(before["depth1/loss"], after["depth1/loss"])
    assert not torch.equal(before["base/loss"], after["base/loss"])


def test_the_target_has_its_original_bits_but_where_the_adapter_is_on(
    make: Make, target: Target, batch: FeatureBatch, tiny_target: Target
):
    def states() -> torch.Tensor:
        return target.encode(batch.token_ids, [12, 8])

    before, head = batch.hidden, make()
    assert torch.equal(states(), before)
    with head.adapter.on():
        assert torch.equal(states(), before)  # an untrained adapter adds zeros
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        head(batch).loss.backward()
        assert torch.equal(states(), before)
        optimizer.step()
        assert torch.equal(states(), before)
    with head.adapter.on():
        assert not torch.allclose(states(), before)
    with pytest.raises(RuntimeError, match="interrupted"), head.adapter.on():
        raise RuntimeError("interrupted")
    assert torch.equal(states(), before)
    assert target.fingerprint == tiny_target.fingerprint
    assert all(parameter.requires_grad for parameter in head.parameters())  # or DDP and optimisers lose them


def train(head: MedusaHead, batch: FeatureBatch, steps: int) -> dict[str, float]:
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        head(batch).loss.backward()
        optimizer.step()
    return {name: float(value[0] / value[1]) for name, value in head(batch).metrics.items()}


def test_heads_with_an_adapter_learn_more_than_heads_alone(make: Make, target: Target, batch: FeatureBatch):
    alone = train(MedusaHead(MedusaConfig(**SIZES), target).double(), batch, 40)
    head = make(head_weight=1.0)
    first = float(head(batch).loss.detach())
    joint = train(head, batch, 40)
    assert float(head(batch).loss.detach()) < 0.5 * first
    assert joint["depth1/loss"] < 0.7 * alone["depth1/loss"]
    assert joint["depth2/loss"] < 0.7 * alone["depth2/loss"]


def test_the_losses_of_the_base_hold_the_target_where_it_was(make: Make, batch: FeatureBatch, make_tiny_llama):
    free = train(make(head_weight=1.0, base_losses={"kl": 1e-6}), batch, 20)["base/loss"] / 1e-6
    target = Target(make_tiny_llama(), name="tiny", pack=False)
    head = Medusa2InTraining(Medusa2Config(**SIZES, rank=4, base_losses={"kl": 30.0}, head_weight=1.0), target).double()
    held = train(head, batch, 20)["base/loss"] / 30
    assert held < 0.2 * free


def test_the_weight_of_the_heads_rises_along_a_sine_over_training_forwards_only(make: Make, batch: FeatureBatch):
    head = make(head_weight=0.5, head_warmup=0.4)
    head.total_steps, head.accumulation = 10, 2  # it rises in four
    weights = []
    for _ in range(12):
        head.eval()
        head(batch)
        head.train()
        weights.append(float(head(batch).metrics["head_weight"][0]))
    assert weights == pytest.approx([0.5 * x for x in (0.3826834, 0.7071068, 0.9238795, 1, 1, 1) for _ in (1, 2)])
    assert int(head.state_dict()["forwards"]) == 12  # a checkpoint knows where the schedule is


def test_heads_and_adapter_have_learning_rates_of_their_own(make: Make):
    head = make(adapter_lr=0.1)
    groups = head.learning_rates()
    assert {share: len(group) for share, group in groups.items()} == {1.0: 4, 0.1: 28}
    everything = [parameter for group in groups.values() for parameter in group]
    assert {*map(id, everything)} == {*map(id, head.parameters())}


def test_inputs_are_dropped_in_training_only(make: Make, batch: FeatureBatch):
    head = make(random=0.1, dropout=0.5)
    assert not torch.equal(head(batch).loss, head(batch).loss)
    head.eval()
    assert torch.equal(head(batch).loss, head(batch).loss)


def test_a_half_precision_target_gets_an_adapter_in_float32(make_tiny_llama, batch: FeatureBatch):
    target = Target(make_tiny_llama(dtype=torch.bfloat16), name="half", pack=False)
    head = Medusa2InTraining(Medusa2Config(**SIZES, rank=4), target)
    output = head(replace(batch, hidden=target.encode(batch.token_ids, [12, 8]).float()))
    output.loss.backward()
    assert {parameter.grad.dtype for parameter in head.parameters()} == {torch.float32}
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())


@pytest.mark.parametrize("modules", [("q_proj", "down_proj"), None])
def test_the_named_layers_are_adapted_or_all_but_the_lm_head(make: Make, target: Target, modules):
    head = make(modules=modules)
    names = {name.rpartition("/lora")[0].rpartition("/")[2] for name in head.adapted}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == (every if modules is None else set(modules))
    assert type(target.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("name", ["lm_head", "c_attn"])
def test_layers_that_there_are_not_are_refused_with_those_there_are(make: Make, name: str):
    with pytest.raises(ConfigError, match=rf"no linear layers \['{name}'\] .* it has q_proj, k_proj, .*, down_proj,"):
        make(modules=("q_proj", name))


def test_targets_that_cannot_be_adapted_are_refused(make_tiny_llama):
    with pytest.raises(ValueError, match="pack=False"):
        Medusa2InTraining(Medusa2Config(**SIZES), Target(make_tiny_llama(), pack=True))
    plain = Target(make_tiny_llama(), pack=False)
    Medusa2InTraining(Medusa2Config(**SIZES), plain)
    with pytest.raises(ValueError, match="has an adapter already; load the target anew"):
        Medusa2InTraining(Medusa2Config(**SIZES), plain)
    config = GraniteConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, logits_scaling=4.0,
    )  # fmt: skip
    scaled = Target(GraniteForCausalLM(config), name="scaled", pack=False)
    with pytest.raises(ConfigError, match=r"scaled scales or caps its logits .* train --head.type=medusa"):
        Medusa2InTraining(Medusa2Config(**SIZES, losses={"ce": 1.0}), scaled)


BAD = [
    ({"rank": 0}, "rank must be at least 1"),
    ({"modules": ()}, r"head\.modules is empty"),
    ({"dropout": 1.0}, r"head\.dropout must be .* below 1, got 1.0"),
    ({"head_warmup": 1.5}, r"head\.head_warmup must be between 0 and 1"),
    ({"head_weight": 0.0}, r"head\.head_weight must be a number above 0"),
    ({"adapter_lr": -1.0}, r"head\.adapter_lr must be a number above 0"),
    ({"base_losses": {"kk": 1.0}}, r"head\.base_losses: unknown loss 'kk'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_settings_that_make_no_training_are_refused(options, message: str):
    with pytest.raises(ValueError, match=message):
        Medusa2Config(**{**SIZES, **options})


def test_the_drift_is_the_divergence_of_the_adapted_target_from_the_original(target: Target):
    torch.manual_seed(2)
    before, after = torch.randn(2, 300, 32).double()
    with torch.no_grad():
        p, q = (target.lm_head(states).softmax(-1) for states in (before, after))
        expected = [float((p * (p / q).log()).sum()), float((p.argmax(-1) == q.argmax(-1)).sum()), 300.0]
        assert compare(target, before, after).tolist() == pytest.approx(expected)
        assert compare(target, before, before).tolist() == [0, 300, 300]


def test_a_drift_above_the_limit_is_a_warning_with_a_way_out():
    drift = {"kl": 0.11, "agreement": 0.875}
    assert describe(drift, 0.11) == describe(drift, 1).partition("\n")[0]
    assert "0.1100 nats" in describe(drift, 0.11)
    assert "87.5%" in describe(drift, 0.11)
    assert "warning: that is more than head.max_drift=0.1" in describe(drift, 0.1)
