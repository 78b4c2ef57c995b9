"""The draft vocabulary is the most frequent supervised tokens."""

from collections import Counter

import pytest
import torch

from data.conversations import Encoded
from data.vocabulary import draft_vocabulary


def create_encoded(supervised, ignored=()):
    return Encoded([*ignored, *supervised], [False] * len(ignored) + [True] * len(supervised))


def test_only_supervised_tokens_count():
    ids, coverage = draft_vocabulary([create_encoded([4, 4, 2, 7], ignored=[1] * 9)], vocab_size=8, size=2)
    assert ids.tolist() == [2, 4]
    assert ids.dtype == torch.int64
    assert coverage == 0.75


def test_ties_go_to_the_lower_id():
    ids, _ = draft_vocabulary([create_encoded([7, 5, 3]), create_encoded([6, 6])], vocab_size=8, size=3)
    assert ids.tolist() == [3, 5, 6]


def test_fewer_tokens_than_asked_for_are_filled_up_with_the_lowest_unused_ids():
    ids, coverage = draft_vocabulary([create_encoded([6, 1])], vocab_size=8, size=5)
    assert ids.tolist() == [0, 1, 2, 3, 6]
    assert coverage == 1.0


@pytest.mark.parametrize("size", [1, 10, 37, 50])
def test_equals_counting_by_hand(size):
    generator = torch.Generator().manual_seed(0)
    samples = [create_encoded((torch.rand(40, generator=generator) ** 2 * 50).long().tolist(), [0]) for _ in range(9)]
    counts = Counter(token_id for sample in samples for token_id in sample.token_ids[1:])
    expected = sorted(range(50), key=lambda token_id: (-counts[token_id], token_id))[:size]
    ids, coverage = draft_vocabulary(samples, vocab_size=50, size=size)
    assert ids.tolist() == sorted(expected)
    assert coverage == pytest.approx(sum(counts[token_id] for token_id in expected) / 360)


@pytest.mark.parametrize("size", [0, -1, 9])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"1 to 8 tokens .* got {size}"):
        draft_vocabulary([create_encoded([1])], vocab_size=8, size=size)


def test_nothing_supervised_and_foreign_ids_are_refused():
    with pytest.raises(ValueError, match="no token is supervised"):
        draft_vocabulary([create_encoded([], [1, 2])], vocab_size=8, size=2)
    with pytest.raises(ValueError, match="run from 3 to 8, but the target's vocabulary has 8"):
        draft_vocabulary([create_encoded([3, 8])], vocab_size=8, size=2)
