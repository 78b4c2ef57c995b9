"""Training a draft model: what it starts from, its loss, what it saves, and whole runs of the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PhiConfig, PhiForCausalLM

from decode import Target
from heads import FeatureBatch
from train.draft_model import (
    DraftModelConfig,
    DraftModelInTraining,
    principal,
)

SIZES = {"width": 16, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
Run = Callable[..., Path]
Read = Callable[[Path], list[dict[str, float]]]


def make_draft(target: Target, **options) -> DraftModelInTraining:
    torch.manual_seed(0)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **SIZES}
    return DraftModelInTraining(DraftModelConfig(**{**sizes, **options}), target).double()


@pytest.fixture
def batch(tiny_target: Target) -> FeatureBatch:
    """Two ragged texts; the second half of each is supervised."""
    torch.manual_seed(1)
    ids, lengths = torch.randint(2, 320, (2, 12)), [12, 8]
    ids[1, 8:] = 0
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 5:], mask[1, 3:8] = True, True
    return FeatureBatch(ids, mask, tiny_target.encode(ids, lengths))


@pytest.mark.parametrize(("rows", "columns", "width"), [(50, 12, 5), (50, 12, 12), (8, 12, 10)])
def test_principal_directions_keep_the_products_between_rows_best(rows: int, columns: int, width: int):
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns, dtype=torch.float64) + 2  # uncentred: the mean is a direction like any other
    kept = principal(matrix, width)
    assert kept.shape == (rows, width)
    u, s, _ = torch.linalg.svd(matrix, full_matrices=False)
    best = (u[:, :width] * s[:width] ** 2) @ u[:, :width].T
    torch.testing.assert_close(kept @ kept.T, best, atol=1e-9, rtol=1e-9)
    sizes = F.pad(s[:width], (0, max(width - len(s), 0)))
    torch.testing.assert_close(kept.norm(dim=0), sizes, atol=1e-6, rtol=1e-9)  # the strongest comes first


def test_the_embedding_starts_from_the_targets_and_is_the_output_projection(tiny_target: Target):
    expected = principal(tiny_target.embed.weight.detach().float(), 16).double()
    head = make_draft(tiny_target)
    torch.testing.assert_close(head.model.get_input_embeddings().weight.detach(), expected)
    assert head.model.lm_head.weight is head.model.get_input_embeddings().weight
    other = make_draft(tiny_target, embedding="random", width=48, num_attention_heads=4)
    assert other.model.lm_head.weight is other.model.get_input_embeddings().weight
    assert other.model.config.max_position_embeddings == tiny_target.max_length
    assert not set(map(id, head.parameters())) & set(map(id, tiny_target.model.parameters()))


@pytest.mark.parametrize(("ce", "kl", "chunk_size"), [(0.1, 0.9, 128), (1.0, 0.0, 3), (0.0, 1.0, 5)])
def test_loss_and_gradients_equal_a_slow_reference(tiny_target, batch, ce, kl, chunk_size):
    head = make_draft(tiny_target, losses={"ce": ce, "kl": kl}, chunk_size=chunk_size)
    output = head(batch)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    scores = head.model(batch.token_ids, use_cache=False).logits.log_softmax(-1)
    teacher = tiny_target.lm_head(batch.hidden).detach().log_softmax(-1)
    loss, right = torch.zeros((), dtype=torch.float64), 0
    for row, place in batch.loss_mask.nonzero().tolist():
        mine, theirs, label = scores[row, place - 1], teacher[row, place - 1], int(batch.token_ids[row, place])
        loss = loss + ce * -mine[label] + kl * (theirs.exp() * (theirs - mine)).sum()
        right += int(mine.argmax() == label)
    torch.testing.assert_close(output.loss, loss)
    assert output.metrics["top1"].tolist() == [right, int(batch.loss_mask.sum())]
    loss.backward()
    assert len(gradients) == len(list(head.parameters())) > 10
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-12, rtol=1e-9)


def test_a_first_token_has_nothing_to_be_predicted_from(tiny_target, batch):
    head = make_draft(tiny_target)
    mask = batch.loss_mask.clone()
    mask[:, 0] = True
    with_first = head(FeatureBatch(batch.token_ids, mask, batch.hidden))
    torch.testing.assert_close(with_first.loss, head(batch).loss)
    assert mask[:, 0].all()  # the caller's mask is its own


def test_no_loss_sees_a_token_after_its_own_or_padding(tiny_target, batch):
    """With one supervised token, everything behind it and every state but the one before it may change."""
    head = make_draft(tiny_target)
    for row, place in batch.loss_mask.nonzero().tolist():
        mask = torch.zeros_like(batch.loss_mask)
        mask[row, place] = True
        expected = head(FeatureBatch(batch.token_ids, mask, batch.hidden)).loss
        ids, hidden = torch.full_like(batch.token_ids, 9), torch.full_like(batch.hidden, 3.0)
        ids[row, : place + 1] = batch.token_ids[row, : place + 1]
        hidden[row, place - 1] = batch.hidden[row, place - 1]
        torch.testing.assert_close(head(FeatureBatch(ids, mask, hidden)).loss, expected)
        ids[row, place - 1] += 1 if ids[row, place - 1] < 319 else -1
        assert not torch.isclose(head(FeatureBatch(ids, mask, hidden)).loss, expected)


def test_training_and_drafting_agree_on_the_same_prefix(tiny_target, batch):
    head = make_draft(tiny_target)
    with torch.no_grad():
        logits = head.model(batch.token_ids, use_cache=False).logits
    for place in range(1, 7):
        drafter = head.drafter()
        text = batch.token_ids[:, : place + 1]
        root = drafter.sync(text, batch.hidden[:, :place], [place] * 2)
        torch.testing.assert_close(root, logits[:, place], atol=1e-9, rtol=1e-9)
        next_ids = batch.token_ids[:, place + 1 : place + 2]
        below = drafter.extend(next_ids, torch.zeros(2, 1, dtype=torch.int64))
        torch.testing.assert_close(below[:, 0], logits[:, place + 1], atol=1e-9, rtol=1e-9)


def test_one_batch_is_learned_by_heart(tiny_target, batch):
    head = make_draft(tiny_target, losses={"ce": 1.0})
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    first = float(head(batch).loss.detach())
    for _ in range(60):
        optimizer.zero_grad()
        head(batch).loss.backward()
        optimizer.step()
    output = head(batch)
    assert float(output.loss.detach()) < 0.05 * first
    right, count = output.metrics["top1"].tolist()
    assert right == count == 12
    # what was learned is drafted, with weights that changed since the drafter's model was made
    root = head.drafter().sync(batch.token_ids[:, :5], batch.hidden[:, :4], [4, 4])
    assert root.argmax(-1).tolist() == batch.token_ids[:, 5].tolist()


BAD = [
    ({"width": 0}, "head.width must be at least 1, got 0"),
    ({"num_layers": 0}, "head.num_layers must be at least 1"),
    ({"num_attention_heads": 0}, "head.num_attention_heads must be at least 1"),
    ({"intermediate_size": -1}, "head.intermediate_size must be at least 1, got -1"),
    ({"chunk_size": 0}, "head.chunk_size must be at least 1"),
    ({"width": 15}, r"head.width \(15\) must be head.num_attention_heads \(2\) times an even number"),
    ({"width": 14}, r"head.width \(14\) must be .* times an even number"),
    ({"width": 36}, r"head.width \(36\) is above the target's 32, .*embedding=random"),
    ({"losses": {"kl": -0.1}}, "not negative, got -0.1"),
    ({"losses": {"ce": 0.0, "kl": 0.0}}, "all losses have weight 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_sizes_that_make_no_model_are_refused(options: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        DraftModelConfig(hidden_size=32, vocab_size=320, **{**SIZES, **options})


def test_a_target_whose_lm_head_has_a_bias_is_not_taught_from_without_it():
    """Its states and the projection alone are not its distribution; Medusa heads refuse it too."""
    config = PhiConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    target = Target(PhiForCausalLM(config))
    assert target.plain_logits
    assert make_draft(target, losses={"ce": 1.0}).lm_head.bias is not None
    with pytest.raises(ValueError, match="bias"):
        make_draft(target, losses={"ce": 1.0, "tv": 0.9})


def test_all_layers_that_draft_may_be_packed_the_lm_head_too(tiny_target: Target):
    head = make_draft(tiny_target)
    layers = [layer for layer in head.body.modules() if isinstance(layer, torch.nn.Linear)]
    assert {*layers, head.model.lm_head} <= set(head.drafting_model.modules())
