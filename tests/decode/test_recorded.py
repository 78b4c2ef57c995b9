"""Drafts are recorded as they were proposed, and a proposer beside another one changes nothing."""

import pytest

from decode import Chain, Drafting, StaticTree, generate
from decode.recorded import Beside, Recorded, Step

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def test_of_every_row_and_step_the_drafts_are_kept_with_the_length_of_their_context(tiny_target, tiny_head):
    recorded = Recorded(Drafting(tiny_head, Chain(3)))
    batch = generate(tiny_target, PROMPTS, proposer=recorded, max_new_tokens=12, eos_ids=())
    rows = recorded.rows
    assert len(rows) == len(PROMPTS)
    for prompt, result, steps in zip(PROMPTS, batch, rows, strict=True):
        alone = generate(tiny_target, prompt, proposer=recorded, max_new_tokens=12, eos_ids=())
        assert alone.token_ids == result.token_ids
        assert recorded.rows == [steps]  # of the last session
        assert len(steps) == result.stats.steps
        assert steps[0].context == len(prompt) + 1
        text, contexts = prompt + result.token_ids, [step.context for step in steps]
        for step, end in zip(steps, [*contexts[1:], len(text)], strict=True):
            accepted = text[step.context : end - 1]
            assert step.token_ids[: len(accepted)] == accepted
            assert len(step.token_ids) == 3


def test_nodes_of_a_tree_are_kept_in_their_order(tiny_target, tiny_head):
    tree = StaticTree(((0,), (1,), (0, 0)))
    recorded, chain = Recorded(Drafting(tiny_head, tree)), Recorded(Drafting(tiny_head, Chain(2)))
    for proposer in (recorded, chain):
        generate(tiny_target, PROMPTS[0], proposer=proposer, max_new_tokens=4)
    first, second = recorded.rows[0][0], chain.rows[0][0]
    assert [first.token_ids[0], first.token_ids[2]] == second.token_ids
    assert first.token_ids[1] != first.token_ids[0]


@pytest.mark.parametrize("swapped", [False, True])
def test_beside_decodes_with_the_first_and_both_draft_the_same_steps(tiny_target, tiny_head, swapped):
    pair = [Recorded(Drafting(tiny_head, Chain(length))) for length in ((1, 3) if swapped else (3, 1))]
    result = generate(tiny_target, PROMPTS, proposer=Beside(*pair), max_new_tokens=12, eos_ids=(), check=True)
    kept, thrown = [recorded.rows for recorded in pair]
    alone = generate(tiny_target, PROMPTS, proposer=pair[0], max_new_tokens=12, eos_ids=())
    assert [one.token_ids for one in result] == [one.token_ids for one in alone]
    assert [one.stats.steps for one in result] == [one.stats.steps for one in alone]
    for ours, theirs in zip(kept, thrown, strict=True):
        shorter = [Step(step.context, step.token_ids[:1]) for step in ours]
        assert [Step(step.context, step.token_ids[:1]) for step in theirs] == shorter
