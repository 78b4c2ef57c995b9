"""The draft vocabulary is the most frequent supervised tokens."""

from collections import Counter

import pytest
import torch

from data.conversations import Encoded
from data.vocabulary import SupervisedTokens


def create_encoded(supervised, ignored=()):
    return Encoded([*ignored, *supervised], [False] * len(ignored) + [True] * len(supervised))


def draft_vocabulary(samples, vocab_size, size):
    return SupervisedTokens(samples, vocab_size).vocabulary(size)


def test_only_supervised_tokens_count():
    made = draft_vocabulary([create_encoded([4, 4, 2, 7], ignored=[1] * 9)], vocab_size=8, size=2)
    assert made.token_ids.tolist() == [2, 4]
    assert made.token_ids.dtype == torch.int64
    assert made.coverage == 0.75


def test_ties_go_to_the_lower_id():
    made = draft_vocabulary([create_encoded([7, 5, 3]), create_encoded([6, 6])], vocab_size=8, size=3)
    assert made.token_ids.tolist() == [3, 5, 6]


def test_fewer_tokens_than_asked_for_are_filled_up_with_the_lowest_unused_ids():
    made = draft_vocabulary([create_encoded([6, 1])], vocab_size=8, size=5)
    assert made.token_ids.tolist() == [0, 1, 2, 3, 6]
    assert made.coverage == 1.0


@pytest.mark.parametrize("size", [1, 10, 37, 50])
def test_equals_counting_by_hand(size):
    generator = torch.Generator().manual_seed(0)
    samples = [create_encoded((torch.rand(40, generator=generator) ** 2 * 50).long().tolist(), [0]) for _ in range(9)]
    counts = Counter(token_id for sample in samples for token_id in sample.token_ids[1:])
    expected = sorted(range(50), key=lambda token_id: (-counts[token_id], token_id))[:size]
    made = draft_vocabulary(samples, vocab_size=50, size=size)
    assert made.token_ids.tolist() == sorted(expected)
    assert made.coverage == pytest.approx(sum(counts[token_id] for token_id in expected) / 360)


@pytest.mark.parametrize("size", [0, -1, 9])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"1 to 8 tokens .* got {size}"):
        draft_vocabulary([create_encoded([1])], vocab_size=8, size=size)


def test_nothing_supervised_and_foreign_ids_are_refused():
    with pytest.raises(ValueError, match="no token is supervised"):
        draft_vocabulary([create_encoded([], [1, 2])], vocab_size=8, size=2)
    with pytest.raises(ValueError, match="run from 3 to 8, but the target's vocabulary has 8"):
        draft_vocabulary([create_encoded([3, 8])], vocab_size=8, size=2)


def test_the_digest_tells_vocabularies_apart_and_is_recorded():
    samples = [create_encoded([4, 4, 2, 7])]
    made = draft_vocabulary(samples, vocab_size=8, size=2)
    assert made.notes() == {"size": 2, "coverage": 0.75, "digest": made.digest}
    assert made.digest == draft_vocabulary([create_encoded([2, 2, 4, 7])], vocab_size=8, size=2).digest
    assert made.digest != draft_vocabulary(samples, vocab_size=8, size=3).digest
    assert f"2 tokens, which are 75.0% of the supervised ones; digest {made.digest}" in made.describe()
    again = SupervisedTokens(samples, 8).measure(made.token_ids.to(torch.int32))
    assert again.notes() == made.notes()


def decode_with_perfect_guesses(answers, known, depth):
    """Tokens per step, one step at a time."""
    tokens = steps = 0
    for answer in answers:
        at = 1  # the first token comes from the prefill
        while at < len(answer):
            accepted = 0
            while accepted < depth and at + accepted < len(answer) and answer[at + accepted] in known:
                accepted += 1
            at += accepted + 1
            steps += 1
        tokens += len(answer) - 1
    return tokens / steps


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 5, 20, 49, 50])
def test_the_ceiling_is_what_decoding_with_perfect_guesses_gives(size: int, depth: int):
    generator = torch.Generator().manual_seed(size + depth)
    samples, answers = [], []
    for _ in range(40):
        ids: list[int] = []
        mask: list[bool] = []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            length = int(torch.randint(1, 30, (), generator=generator))
            answer = (torch.rand(length, generator=generator) ** 3 * 50).long().tolist()
            ids += [0, *answer]
            mask += [False, *[True] * length]
            answers.append(answer)
        samples.append(Encoded(ids, mask))
    tokens = SupervisedTokens(samples, 50)
    known = set(tokens.vocabulary(size).token_ids.tolist())
    expected = decode_with_perfect_guesses(answers, known, depth)
    assert tokens.ceiling(size, depth) == pytest.approx(expected, rel=1e-12)


def test_answers_of_one_token_have_no_steps():
    assert SupervisedTokens([create_encoded([3], [1])], 8).ceiling(8, 4) == 0.0


def test_the_table_has_the_usual_sizes_below_the_targets_and_marks_the_chosen_one():
    samples = [create_encoded([*range(2000)] * 2, [1])]
    lines = SupervisedTokens(samples, 5000).table(size=1500, depth=3).splitlines()
    cells = [line.replace("*", " ").split() for line in lines[1:]]
    assert [row[0] for row in cells] == ["1,024", "1,500", "2,048", "4,096", "5,000"]
    assert [row[1] for row in cells] == ["51.20%", "75.00%", "100.00%", "100.00%", "100.00%"]
    assert [line[0] == "*" for line in lines[1:]] == [False, True, False, False, False]
    assert float(cells[0][2]) < float(cells[1][2]) < float(cells[2][2]) == float(cells[4][2])
    assert "chain of 3" in lines[0]
