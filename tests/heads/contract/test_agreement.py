"""Training and decoding mean the same, and neither sees what decoding will not have."""

from dataclasses import replace

import pytest
import torch

LENGTHS = (12, 8)
ROOTS = ((1, 4), (4, 1), (7, 4), (8, 2))
"""Of both rows."""


def supervise(batch, row: int, root: int, label: int):
    """Supervise one row from a root to a label: at the depth between them there is no other."""
    mask = torch.zeros_like(batch.loss_mask)
    mask[row, root : label + 1] = True
    return replace(batch, loss_mask=mask)


def gradients(head, batch) -> list[torch.Tensor]:
    return list(torch.autograd.grad(head(batch).loss, list(head.parameters())))


def perturbed(batch, row: int, state: int, token: int):
    """Change a row's states from one place on, and its tokens from another."""
    token_ids, changed = batch.token_ids.clone(), [batch.hidden.clone()]
    token_ids[row, token:] = (token_ids[row, token:] + 7) % 320
    if batch.features is not None:
        changed.append(batch.features.clone())
    for states in changed:
        states[row, state:] = states[row, state:] * -3 + 5
    return replace(batch, token_ids=token_ids, hidden=changed[0], features=changed[1] if changed[1:] else None)


def expected_loss(case, head, batch, row: int, label: int, log_probs: torch.Tensor, loss: str) -> float:
    """The loss of a draft with these log-probabilities [U] for the token at `label`."""
    if loss == "ce":
        return -log_probs[case.column(head, int(batch.token_ids[row, label]))].item()
    logits = case.target.lm_head(batch.hidden[row, label - 1]).detach()
    teacher = (logits if head.vocabulary is None else logits[head.vocabulary]).log_softmax(-1)
    return (teacher.exp() * (teacher - log_probs)).sum().item()


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_loss_at_every_root_and_depth_is_that_of_the_draft_there(case, vocabulary, loss):
    head = case.head(vocabulary=vocabulary, tokens_only=True, losses={loss: 1.0})
    batch = case.batch(head, LENGTHS)
    depths = len(case.losses(head, batch))
    assert depths <= head.drafter().max_depth
    for roots in ROOTS:
        log_probs = case.draft(head, batch, roots, depths).log_softmax(-1)
        for row, root in enumerate(roots):
            for depth in range(depths):
                label = root + 1 + depth
                expected = expected_loss(case, head, batch, row, label, log_probs[row, depth], loss)
                found = case.losses(head, supervise(batch, row, root, label))[depth]
                assert found == (pytest.approx(expected, rel=1e-9), 1)


def test_the_loss_is_the_decayed_sum_over_depths(case):
    head = case.head(tokens_only=True)
    batch = case.batch(head, LENGTHS)
    (decay,) = (value for name, value in vars(head.config).items() if name.endswith("_decay"))
    losses = case.losses(head, batch)
    assert [count for _, count in losses] == [sum(LENGTHS) - 2 * (2 + depth) for depth in range(len(losses))]
    expected = sum(decay**depth * total for depth, (total, _) in enumerate(losses))
    assert head(batch).loss.item() == pytest.approx(expected, rel=1e-6)


def test_only_runs_of_supervised_tokens_count(case):
    """From the root to the label all tokens must be supervised, as in decoding."""
    head = case.head(tokens_only=True)
    batch = case.batch(head, (12,))
    mask = batch.loss_mask.clone()
    mask[0, 6] = False  # roots 1 to 5 and 7 to 11
    counts = [count for _, count in case.losses(head, replace(batch, loss_mask=mask))]
    assert counts == [max(0, 4 - depth) + max(0, 4 - depth) for depth in range(len(counts))]


def test_training_sees_no_state_behind_the_root_and_no_token_behind_the_label(case):
    head = case.head(tokens_only=True, losses={"ce": 1.0})
    batch = case.batch(head, LENGTHS)
    depths = len(case.losses(head, batch))
    for row, root in ((0, 4), (1, 2)):
        label = root + depths
        first, last = supervise(batch, row, root, root + 1), supervise(batch, row, root, label)
        future = perturbed(last, row, root + depths - 1, label + 1)
        # the label's own root stands at label - 1: no depth's term reads a state from there on
        assert case.losses(head, future) == case.losses(head, last)
        assert all(map(torch.equal, gradients(head, future), gradients(head, last)))
        assert head(future).loss.item() == head(last).loss.item()
        later = perturbed(first, row, root, root + 2)
        assert all(map(torch.equal, gradients(head, later), gradients(head, first)))
        # and it does read the last state before the root
        assert case.losses(head, perturbed(first, row, root - 1, root + 2))[0] != case.losses(head, first)[0]
        deepest = case.losses(head, perturbed(last, row, root, label + 1))[-1]
        assert deepest == case.losses(head, last)[-1]


def test_a_run_of_supervised_tokens_adds_the_same_wherever_else_there_are_some(case):
    head = case.head(tokens_only=True)
    batch = case.batch(head, (12,))
    runs = supervise(batch, 0, 1, 4), supervise(batch, 0, 6, 11)
    both = replace(batch, loss_mask=runs[0].loss_mask | runs[1].loss_mask)
    assert head(both).loss.item() == pytest.approx(sum(head(run).loss.item() for run in runs), rel=1e-9)
    for whole, *parts in zip(gradients(head, both), *(gradients(head, run) for run in runs), strict=True):
        torch.testing.assert_close(whole, sum(parts))


def test_padding_moves_nothing_in_training(case):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    other = perturbed(batch, 1, LENGTHS[1], LENGTHS[1])
    assert not torch.equal(other.hidden, batch.hidden)
    assert head(other).loss.item() == head(batch).loss.item()
    assert all(map(torch.equal, gradients(head, other), gradients(head, batch)))


def test_a_draft_sees_no_state_behind_its_root_and_no_token_but_its_own(case):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    for depth in (1, head.drafter().max_depth):
        for row, root in ((0, 3), (1, 2)):
            roots = [5, 5]  # the other row's: what is behind ours is padding in the same sync
            roots[row] = root
            before = case.draft(head, batch, roots, depth)
            future = perturbed(batch, row, root, root + depth)
            assert torch.equal(case.draft(head, future, roots, depth), before)
            past = case.draft(head, perturbed(batch, row, root - 1, root + depth), roots, depth)
            assert not torch.equal(past[row], before[row])
            assert torch.equal(past[1 - row], before[1 - row])
