"""Every head learns a text by heart and drafts it; and whatever it drafts, the text is that of plain decoding."""

import pytest
import torch

from decode import Chain, DynamicTree, Sampling, StaticTree, generate

PROMPTS = [[40, 41, 42, 43], [300], [7, 8, 9, 7, 8, 9], [120, 5]]
LEARNED = (0, 3)
"""The prompts whose greedy continuation the head is trained on."""
LENGTH = 12
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=3)}
GROWS = {
    "chain": Chain(3),
    "tree": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": DynamicTree(3, 2, 7),
    "own": None,
}


def decode(target, sampling: str, **options):
    options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": LENGTH, "eos_ids": (), **options}
    return generate(target, PROMPTS, **options)


@pytest.fixture(scope="module")
def plain(tiny_target):
    """Plain decoding's tokens."""
    return {name: [out.token_ids for out in decode(tiny_target, name)] for name in SAMPLINGS}


@pytest.fixture(scope="module")
def learned(case, plain):
    """A head trained on two continuations, its batch, and its first and last loss."""
    head = case.head(tokens_only=True, random=False, losses={"ce": 1.0})
    rows = [torch.tensor(PROMPTS[row] + plain["greedy"][row]) for row in LEARNED]
    batch = case.encode(head, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), list(map(len, rows)))
    optimizer = torch.optim.Adam(head.parameters(), lr=case.variant.lr)
    losses = []
    for _ in range(300):
        loss = head(batch).loss
        losses.append(loss.item())
        if losses[-1] < 0.03 * losses[0]:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head, batch, losses[0], losses[-1]


def test_a_text_is_learned_by_heart_and_drafted(case, learned):
    head, batch, first, last = learned
    assert last < 0.05 * first
    trained = len(case.losses(head, batch))
    for root in (3, 6, 8):
        columns = case.draft(head, batch, [root, root], trained).argmax(-1)
        tokens = columns if head.vocabulary is None else head.vocabulary[columns]
        assert torch.equal(tokens, batch.token_ids[:, root + 1 : root + 1 + trained])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("grow", GROWS)
def test_text_is_plain_decodings_and_every_state_is_right(case, learned, plain, sampling, grow):
    results = decode(case.target, sampling, head=learned[0], grow=GROWS[grow], check=True)
    assert [result.token_ids for result in results] == plain[sampling]
    if sampling == "greedy":  # what was learned is accepted, several tokens at a time
        assert all(results[row].stats.tokens_per_step > 1.5 for row in LEARNED)


def test_a_head_that_knows_nothing_changes_no_text(case, vocabulary, plain):
    head = case.head(vocabulary=vocabulary)
    for sampling in SAMPLINGS:
        results = decode(case.target, sampling, head=head, grow=GROWS["tree"], check=True)
        assert [result.token_ids for result in results] == plain[sampling]
