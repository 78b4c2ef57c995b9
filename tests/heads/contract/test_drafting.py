"""A drafter's state is that of its text: however it was told, whatever was drafted, and whoever else was there."""

import json
from dataclasses import asdict

import pytest
import torch

from heads import load_head, save_head

LENGTHS = (12, 9, 10)
END = (8, 5, 6)
"""Roots at which all drafters end."""
PIECES = (((3, 1, 2), (5, 2, 5), END), ((1, 4, 1), END), ((2, 1, 1), (3, 2, 2), (4, 3, 5), END))
"""Roots at which they stop on the way; every sync brings at least one state."""


def piece(batch, start, stop):
    """What a sync is given between two roots, padded with what must not be read."""
    lengths = [b - a for a, b in zip(start, stop, strict=True)]
    rows, longest = range(len(lengths)), max(lengths)
    token_ids = torch.full((len(lengths), longest + 1), 3)
    parts = [part for part in (batch.hidden, batch.features) if part is not None]
    states = [part.new_full((len(lengths), longest, part.shape[-1]), 100.0) for part in parts]
    for row, first, length in zip(rows, start, lengths, strict=True):
        token_ids[row, : length + 1] = batch.token_ids[row, first : first + length + 1]
        for new, part in zip(states, parts, strict=True):
            new[row, :length] = part[row, first : first + length]
    return token_ids, states[0], lengths, states[1] if states[1:] else None


def grow(drafter, seed: int = 0) -> list[torch.Tensor]:
    """Draft a tree of three levels at most, and return their logits."""
    generator = torch.Generator().manual_seed(seed)
    rows, levels, below = len(END), [], [0]
    for _ in range(min(3, drafter.max_depth) - 1):
        first = below[-1] + 1
        parents = torch.tensor([[below[0], below[-1], below[-1]]] * rows)
        tokens = torch.randint(0, 320, (rows, 3), generator=generator)
        levels.append(drafter.extend(tokens, parents))
        below = [first, first + 1, first + 2]
    return levels


@pytest.mark.parametrize("pieces", PIECES)
def test_syncs_in_pieces_equal_one_sync_and_drafts_leave_no_trace(case, pieces):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    whole = head.drafter()
    expected = [whole.sync(*piece(batch, (0, 0, 0), END)), *grow(whole)]
    drafter, start = head.drafter(), (0, 0, 0)
    for number, stop in enumerate(pieces):
        logits = drafter.sync(*piece(batch, start, stop))
        if stop != END:
            grow(drafter, seed=number + 1)
        start = stop
    found = [logits, *grow(drafter)]
    for level, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda text, level=level: f"level {level}: {text}")


def test_a_ragged_row_drafts_what_it_drafts_alone(case):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    depth = min(3, head.drafter().max_depth)
    together = case.draft(head, batch, END, depth)
    for row, root in enumerate(END):
        alone = case.draft(head, case.cut(batch, [row], slice(0, LENGTHS[row])), [root], depth)
        torch.testing.assert_close(together[row], alone[0])


@pytest.mark.parametrize("rows", [[2, 0], [1], [2, 1, 0]])
def test_kept_rows_go_on_in_their_new_order(case, rows):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    depth = min(3, head.drafter().max_depth)
    middle = PIECES[0][0]
    expected = case.draft(head, batch, END, depth)[rows]
    drafter = head.drafter()
    drafter.sync(*piece(batch, (0, 0, 0), middle))
    grow(drafter)
    drafter.keep(rows)
    kept = case.cut(batch, rows, slice(0, None))
    stop = [END[row] for row in rows]
    logits = [drafter.sync(*piece(kept, [middle[row] for row in rows], stop))]
    drafter.keep(range(len(rows)))  # in the middle of a tree
    for level in range(1, depth):
        tokens = torch.stack([kept.token_ids[row, root + level] for row, root in enumerate(stop)])[:, None]
        logits.append(drafter.extend(tokens, torch.full((len(rows), 1), level - 1))[:, 0])
    torch.testing.assert_close(torch.stack(logits, dim=1), expected)


def test_rows_can_leave_while_a_tree_grows(case):
    head = case.head()
    batch = case.batch(head, LENGTHS)
    drafters = [head.drafter(), head.drafter()]
    first, second = torch.tensor([[4, 9], [5, 5], [7, 3]]), torch.tensor([[8], [2], [6]])
    parents = torch.tensor([[2], [1], [2]])
    rows = [2, 0]
    for drafter in drafters:
        drafter.sync(*piece(batch, (0, 0, 0), END))
        drafter.extend(first, torch.zeros_like(first))
    drafters[0].keep(rows)
    expected = drafters[1].extend(second, parents)[rows]
    torch.testing.assert_close(drafters[0].extend(second[rows], parents[rows]), expected)


def test_a_nodes_children_depend_on_its_own_path_only(case):
    """Each node of a tree gets the logits that a chain of its path gets."""
    head = case.head()
    batch = case.batch(head, LENGTHS)
    drafter = head.drafter()
    drafter.sync(*piece(batch, (0, 0, 0), END))
    first, second = torch.tensor([[4, 9, 4]] * 3), torch.tensor([[8, 8, 30, 8]] * 3)
    above = torch.tensor([[1, 2, 2, 3]] * 3)  # nodes are counted from 1 on
    drafter.extend(first, torch.zeros_like(first))
    level = drafter.extend(second, above)
    logits = level.expand(-1, 4, -1)
    for node in range(4):
        chain = head.drafter()
        chain.sync(*piece(batch, (0, 0, 0), END))
        chain.extend(first.gather(1, above[:, node, None] - 1), torch.zeros(3, 1, dtype=torch.int64))
        alone = chain.extend(second[:, node, None], torch.ones(3, 1, dtype=torch.int64))
        torch.testing.assert_close(logits[:, node], alone[:, 0])
    torch.testing.assert_close(logits[:, 0], logits[:, 3])  # the same path twice
    if level.shape[1] > 1:  # else they depend on the depth alone, as Medusa's
        assert not torch.allclose(logits[:, 0], logits[:, 1])


def test_two_sessions_share_nothing(case):
    head = case.head()
    batch, other = case.batch(head, LENGTHS), case.batch(head, LENGTHS, seed=5)
    one, two = head.drafter(), head.drafter()
    one.sync(*piece(batch, (0, 0, 0), END))
    two.sync(*piece(other, (0, 0, 0), END))
    fresh = head.drafter()
    fresh.sync(*piece(batch, (0, 0, 0), END))
    assert all(map(torch.equal, grow(one), grow(fresh)))


def test_a_saved_head_drafts_the_same_bits(case, vocabulary, tmp_path):
    head = case.head(vocabulary=vocabulary)
    batch = case.batch(head, LENGTHS)
    save_head(head, tmp_path / "head", target=case.target)
    loaded = load_head(tmp_path / "head", case.target, dtype=torch.float64)
    assert type(loaded) is type(head)
    assert json.dumps(asdict(loaded.config)) == json.dumps(asdict(head.config))
    assert (loaded.tree, list(loaded.feature_layers)) == (head.tree, list(head.feature_layers))
    depth = head.drafter().max_depth
    roots = [min(root, length - depth) for root, length in zip(END, LENGTHS, strict=True)]
    assert torch.equal(case.draft(loaded, batch, roots, depth), case.draft(head, batch, roots, depth))


def test_what_the_target_lends_is_not_the_heads(case):
    head = case.head()
    lent = {id(parameter) for parameter in case.target.model.parameters()}
    assert not lent & {id(parameter) for parameter in head.parameters()}
    target_rows = {case.target.embed.weight.data_ptr(), case.target.lm_head.weight.data_ptr()}
    assert not target_rows & {tensor.data_ptr() for tensor in head.state_dict().values()}
    assert not any(name.startswith(("embed", "lm_head", "_lent")) for name in head.state_dict())
