"""Medusa heads: the loss is its definition, training and decoding agree, and nothing leaks from the future."""

import pytest
import torch
from torch.nn import functional as F

from heads import FeatureBatch, create_head
from heads.medusa import MedusaConfig, MedusaHead

VOCABULARY = torch.tensor([1, 3, 4, 7, 20, 50, 119, 200, 319])
D, V = 32, 320


def make_head(target, *, vocabulary=None, seed: int = 1, **options) -> MedusaHead:
    size = None if vocabulary is None else len(vocabulary)
    head = create_head("medusa", MedusaConfig(hidden_size=D, vocab_size=V, draft_vocab_size=size, **options), target)
    assert isinstance(head, MedusaHead)
    if vocabulary is not None:
        head.set_vocabulary(vocabulary)
    torch.manual_seed(seed)
    for parameter in head.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    return head.double()


def make_batch(lengths=(14, 9, 2, 1), *, seed: int = 0, vocabulary=None) -> FeatureBatch:
    """Rows with padding, masks with gaps, a supervised first token, and random states."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = len(lengths), max(lengths)
    ids = torch.randint(0, V, (rows, longest), generator=generator)
    if vocabulary is not None:  # about half of the tokens can be drafted
        drafted = vocabulary[torch.randint(0, len(vocabulary), (rows, longest), generator=generator)]
        ids = torch.where(torch.rand(rows, longest, generator=generator) < 0.6, drafted, ids)
    mask = torch.rand(rows, longest, generator=generator) < 0.8
    mask[:, 0] = True
    for row, length in enumerate(lengths):
        mask[row, length:] = False
    hidden = torch.randn(rows, longest, D, generator=generator, dtype=torch.float64)
    return FeatureBatch(ids, mask, hidden)


def run_head(head: MedusaHead, k: int, state: torch.Tensor) -> torch.Tensor:
    """[D] -> [U], written out again from the paper."""
    for block in head.blocks[k]:
        state = state + F.silu(block.linear.weight @ state + block.linear.bias)
    weight = head.lm_head.weight if head.vocabulary is None else head.lm_head.weight[head.vocabulary]
    return (weight if head.projection is None else head.projection[k]) @ state


def slow_loss(head: MedusaHead, batch: FeatureBatch) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """The loss and metrics by loops over rows, labels and heads, from the definition in `MedusaHead.forward`."""
    config = head.config
    columns = list(range(V)) if head.vocabulary is None else head.vocabulary.tolist()
    loss = torch.zeros((), dtype=torch.float64)
    names = ("loss", "top1", "accept")
    metrics = {f"depth{k + 1}/{name}": [0.0, 0] for k in range(config.num_heads) for name in names}
    for row in range(batch.token_ids.shape[0]):
        for label in range(batch.token_ids.shape[1]):
            token = int(batch.token_ids[row, label])
            for k in range(config.num_heads):
                root = label - 1 - k
                if root < 1 or token not in columns or not batch.loss_mask[row, root : label + 1].all():
                    continue
                logits = run_head(head, k, batch.hidden[row, root - 1])
                teacher = (head.lm_head.weight[columns] @ batch.hidden[row, label - 1]).detach().softmax(-1)
                log_probs = logits.log_softmax(-1)
                cross_entropy = -log_probs[columns.index(token)]
                divergence = (teacher * (teacher.log() - log_probs)).sum()
                term = config.losses["ce"] * cross_entropy + config.losses["kl"] * divergence
                loss = loss + config.depth_decay**k * term
                accept = torch.minimum(teacher, log_probs.exp()).sum()
                found = (term.item(), columns[int(logits.argmax())] == token, accept.item())
                for name, value in zip(names, found, strict=True):
                    metrics[f"depth{k + 1}/{name}"][0] += value
                    metrics[f"depth{k + 1}/{name}"][1] += 1
    return loss, metrics


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own-lm-head"])
@pytest.mark.parametrize("chunk_size", [2, 256])
def test_loss_gradient_and_metrics_equal_the_definition(tiny_target, vocabulary, own, chunk_size):
    options = {"num_heads": 3, "num_layers": 2, "own_lm_head": own, "chunk_size": chunk_size, "depth_decay": 0.7}
    head = make_head(tiny_target, vocabulary=vocabulary, losses={"ce": 0.4, "kl": 0.6}, **options)
    batch = make_batch(vocabulary=vocabulary)
    output = head(batch)
    expected, metrics = slow_loss(head, batch)
    assert float(expected.detach()) > 1
    torch.testing.assert_close(output.loss, expected)
    assert set(output.metrics) == set(metrics)
    for name, (total, count) in metrics.items():
        assert output.metrics[name].tolist() == pytest.approx([total, count])
        assert not output.metrics[name].requires_grad
    parameters = dict(head.named_parameters())
    found = torch.autograd.grad(output.loss, list(parameters.values()))
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, found, wanted, strict=True):
        # powers of depth_decay are float32: 1e-8
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_an_untrained_head_repeats_the_targets_own_guess(tiny_target):
    for own in (False, True):
        config = MedusaConfig(hidden_size=D, vocab_size=V, num_heads=3, num_layers=2, own_lm_head=own)
        drafter = create_head("medusa", config, tiny_target).double().drafter()
        hidden = torch.randn(2, 4, D, dtype=torch.float64)
        logits = [drafter.sync(torch.zeros(2, 5, dtype=torch.int64), hidden, [4, 2])]
        for _ in range(2):
            logits.append(
                drafter.extend(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))[:, 0]
            )
        for depth_logits in logits:
            expected = tiny_target.lm_head(torch.stack([hidden[0, 3], hidden[1, 1]]))
            torch.testing.assert_close(depth_logits, expected, atol=1e-5, rtol=1e-5)  # own weights are kept in float32


def test_first_and_last_head_are_trained_and_the_target_is_not(tiny_target):
    head = make_head(tiny_target, num_heads=4)
    head(make_batch()).loss.backward()
    for k in (0, 3):
        for parameter in head.blocks[k].parameters():
            assert parameter.grad.abs().max() > 1e-6
    assert all(parameter.grad is None for parameter in tiny_target.model.parameters())
    assert not any(name.startswith(("embed", "lm_head")) for name in head.state_dict())


def test_the_loss_of_a_batch_is_the_sum_of_its_rows_alone(tiny_target):
    head = make_head(tiny_target, num_heads=3)
    batch = make_batch()
    alone = 0.0
    for row, length in enumerate((14, 9, 2, 1)):
        parts = (batch.token_ids, batch.loss_mask, batch.hidden)
        alone += float(head(FeatureBatch(*(part[row : row + 1, :length] for part in parts))).loss.detach())
    assert float(head(batch).loss.detach()) == pytest.approx(alone)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_batches_shorter_than_the_heads_reach_are_no_error(tiny_target, length):
    head = make_head(tiny_target, num_heads=4)
    batch = make_batch((length,))
    batch.loss_mask[:] = True
    output = head(batch)
    output.loss.backward()
    assert [int(output.metrics[f"depth{k + 1}/loss"][1]) for k in range(4)] == [
        max(0, length - 2 - k) for k in range(4)
    ]


def test_nothing_supervised_gives_loss_zero_and_zero_gradients(tiny_target):
    head = make_head(tiny_target)
    batch = make_batch()
    output = head(FeatureBatch(batch.token_ids, torch.zeros_like(batch.loss_mask), batch.hidden))
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters())
    assert all(metric.tolist() == [0, 0] for metric in output.metrics.values())


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own-lm-head"])
def test_drafts_after_a_prefix_are_what_training_computed_there(tiny_target, vocabulary, own):
    """Head k labels token r + 1 + k of root r; its top1 metric in training says whether the draft is that token."""
    head = make_head(tiny_target, vocabulary=vocabulary, num_heads=3, own_lm_head=own)
    ids = torch.randint(0, V, (1, 12), generator=torch.Generator().manual_seed(2))
    hidden = tiny_target.encode(ids, [12])
    for root in (1, 2, 7, 8):
        drafter = head.drafter()
        logits = [drafter.sync(ids[:, : root + 1], hidden[:, :root], [root])]
        for _ in range(2):
            logits.append(drafter.extend(ids[:, :1], torch.zeros(1, 1, dtype=torch.int64))[:, 0])
        columns = torch.arange(V) if drafter.vocabulary is None else drafter.vocabulary
        drafts = [int(columns[level[0].argmax()]) for level in logits]
        # put the drafts where training expects the labels, and supervise from the root to the last of them only
        text = ids.clone()
        text[0, root + 1 : root + 4] = torch.tensor(drafts)
        mask = torch.zeros(1, 12, dtype=torch.bool)
        mask[0, root : root + 4] = True
        metrics = head(FeatureBatch(text, mask, hidden)).metrics
        # supervised labels per head: those whose root is at or behind ours
        for k in range(3):
            assert int(metrics[f"depth{k + 1}/top1"][1]) == 3 - k
        only = torch.zeros(1, 12, dtype=torch.bool)
        for k in range(3):
            only[:] = False
            only[0, root : root + 2 + k] = True
            term = head(FeatureBatch(text, only, hidden)).metrics[f"depth{k + 1}/top1"]
            assert term.tolist() == [1, 1]
            log_probs = logits[k][0].log_softmax(-1)
            torch.testing.assert_close(run_head(head, k, hidden[0, root - 1]).log_softmax(-1), log_probs)


def test_a_draft_sees_nothing_behind_its_root(tiny_target):
    head = make_head(tiny_target, num_heads=3)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (2, 9), generator=generator)
    hidden = torch.randn(2, 8, D, generator=generator, dtype=torch.float64)

    def drafts(ids, hidden):
        drafter = head.drafter()
        levels = [drafter.sync(ids, hidden, [5, 3])]
        for _ in range(2):
            levels.append(drafter.extend(ids[:, :1], torch.zeros(2, 1, dtype=torch.int64))[:, 0])
        return torch.stack(levels)

    before = drafts(ids, hidden)
    future_ids, future = ids.clone(), hidden.clone()
    for row, length in enumerate((5, 3)):
        future[row, length:] = 1e3
        future_ids[row, length + 1 :] = 0
    assert torch.equal(drafts(future_ids, future), before)
    future[0, 4] += 1
    assert not torch.equal(drafts(future_ids, future)[:, 0], before[:, 0])


def test_syncs_in_pieces_equal_one_sync_and_rows_can_leave(tiny_target):
    head = make_head(tiny_target, num_heads=2)
    hidden = torch.randn(3, 6, D, dtype=torch.float64)
    ids = torch.randint(0, V, (3, 7))
    whole = head.drafter().sync(ids, hidden, [6, 6, 6])
    pieces = head.drafter()
    pieces.sync(ids[:, :3], hidden[:, :2], [2, 2, 1])
    pieces.extend(ids[:, :1], torch.zeros(3, 1, dtype=torch.int64))
    pieces.keep([2, 0])
    torch.testing.assert_close(pieces.sync(ids[[2, 0], 2:], hidden[[2, 0], 2:], [4, 4]), whole[[2, 0]])
    pieces.keep([1])
    second = pieces.extend(ids[:1, :1], torch.zeros(1, 1, dtype=torch.int64))
    assert second.shape == (1, 1, V)
    torch.testing.assert_close(second[0, 0], run_head(head, 1, hidden[0, 5]))
