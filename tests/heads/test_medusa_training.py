"""Medusa heads learn, and refuse settings and vocabularies that make no head."""

import pytest
import torch

from heads import FeatureBatch, create_head
from heads.medusa import MedusaConfig

D, V = 32, 320


@pytest.mark.parametrize(("own", "vocabulary_size"), [(False, None), (True, 40), (False, 40)])
def test_one_batch_is_learned_by_heart(tiny_target, own, vocabulary_size):
    torch.manual_seed(0)
    options = {"own_lm_head": own, "draft_vocab_size": vocabulary_size, "losses": {"ce": 1.0}}
    head = create_head(
        "medusa", MedusaConfig(hidden_size=D, vocab_size=V, num_heads=2, **options), tiny_target
    ).double()
    ids = torch.randint(2, vocabulary_size or V, (2, 10))
    batch = FeatureBatch(ids, torch.ones(2, 10, dtype=torch.bool), tiny_target.encode(ids, [10, 10]))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    first = float(head(batch).loss.detach())
    for _ in range(300):
        optimizer.zero_grad()
        head(batch).loss.backward()
        optimizer.step()
    output = head(batch)
    assert float(output.loss.detach()) < 0.05 * first
    for k in range(2):
        right, count = output.metrics[f"depth{k + 1}/top1"].tolist()
        assert right == count == 2 * (8 - k)
    # and the drafter drafts what was learned
    drafter = head.drafter()
    logits = drafter.sync(ids[:, :5], batch.hidden[:, :4], [4, 4])
    columns = torch.arange(V) if drafter.vocabulary is None else drafter.vocabulary
    assert columns[logits.argmax(-1)].tolist() == ids[:, 5].tolist()
    second = drafter.extend(ids[:, 5:6], torch.zeros(2, 1, dtype=torch.int64))
    assert columns[second[:, 0].argmax(-1)].tolist() == ids[:, 6].tolist()


def test_own_lm_heads_start_from_the_targets_rows_of_the_vocabulary(tiny_target):
    config = MedusaConfig(hidden_size=D, vocab_size=V, num_heads=2, own_lm_head=True, draft_vocab_size=4)
    head = create_head("medusa", config, tiny_target)
    for vocabulary in ([0, 1, 2, 3], [5, 9, 100, 319]):
        head.set_vocabulary(torch.tensor(vocabulary))
        for k in range(2):
            torch.testing.assert_close(head.projection[k], tiny_target.lm_head.weight[vocabulary].detach().float())
    assert head.projection.requires_grad
    assert "projection" in head.state_dict()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "expected 3 draft ids"),
        ([1, 2, 2], "distinct, ascending"),
        ([3, 2, 1], "distinct, ascending"),
        ([-1, 2, 3], "below 320"),
        ([1, 2, 320], "below 320"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused(tiny_target, ids, message):
    head = create_head("medusa", MedusaConfig(hidden_size=D, vocab_size=V, draft_vocab_size=3), tiny_target)
    with pytest.raises(ValueError, match=message):
        head.set_vocabulary(torch.tensor(ids))
    assert head.vocabulary.tolist() == [0, 1, 2]


def test_a_head_without_draft_vocabulary_takes_none(tiny_target):
    head = create_head("medusa", MedusaConfig(hidden_size=D, vocab_size=V), tiny_target)
    with pytest.raises(ValueError, match="draft ids"):
        head.set_vocabulary(torch.arange(V))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be between 1 and the target's 320, got 0"),
        ({"draft_vocab_size": 321}, "draft_vocab_size must be between 1 and the target's 320, got 321"),
        ({"losses": {"ce": 0.0, "kl": 0.0}}, "all losses have weight 0"),
        ({"losses": {"kl": -0.1}}, "not negative, got -0.1"),
    ],
)
def test_settings_that_make_no_head_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MedusaConfig(hidden_size=D, vocab_size=V, **options)


@pytest.mark.parametrize("kind", ["medusaa", "base", "no.such.module", ""])
def test_unknown_head_types_are_named(tiny_target, kind):
    with pytest.raises(ValueError, match="head type"):
        create_head(kind, MedusaConfig(hidden_size=D, vocab_size=V), tiny_target)
