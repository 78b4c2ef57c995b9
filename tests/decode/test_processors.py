"""Penalties by hand, the constraint of each row, what is asked behind an end, and processors with a state."""

import threading

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from decode import Sampling, noise
from decode.sampling import Sampler, batch_samplers

V = 12
LOGITS = torch.linspace(-2.0, 3.0, V, dtype=torch.float64)


def scores(sampling: Sampling, prompt: list[int], text: list[int], path: list[int], row: int = 0) -> torch.Tensor:
    sampler = Sampler(sampling, row, prompt)
    sampler.context += text
    return sampler.scores(LOGITS, path)[0]


def test_counts_are_of_the_text_and_the_path_but_not_of_the_prompt():
    sampling = Sampling(presence_penalty=0.7, frequency_penalty=0.3, seed=0)
    expected = LOGITS.clone()
    expected[5] -= 2 * 0.3 + 0.7
    expected[7] -= 2 * 0.3 + 0.7
    expected[8] -= 1 * 0.3 + 0.7
    found = scores(sampling, [3, 3, 5], [5, 5, 7], [7, 8])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    assert torch.equal(scores(sampling, [3, 3, 5], [], []), LOGITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_of_half_precision_logits_are_float32(dtype):
    sampler = Sampler(Sampling(frequency_penalty=1e-3, seed=0), 0, [1])
    found = sampler.scores(LOGITS.to(dtype), [4, 4])[0]
    assert found.dtype == torch.float32
    assert float(found[4]) == pytest.approx(float(LOGITS.to(dtype)[4]) - 2e-3, abs=1e-7)


def test_the_repetition_penalty_comes_first_and_counts_the_prompt():
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, seed=0)
    expected = LOGITS.clone()
    expected[11] = 3.0 / 2 - 0.5 - 2 * 0.25
    expected[0] = -2.0 * 2
    torch.testing.assert_close(scores(sampling, [0], [11], [11]), expected, rtol=0, atol=1e-15)


def test_an_end_token_may_be_a_bad_word_and_numpy_ids_are_ids():
    sampler = Sampler(Sampling(bad_words_ids=np.array([[11], [10]]).tolist(), seed=0), 0, [1], frozenset({11}))
    assert sampler.choose(LOGITS, []) == 9
    assert Sampler(Sampling(bad_words_ids=[list(np.array([11]))], seed=0), 0, [1]).choose(LOGITS, []) == 10


def test_a_bad_word_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match=r"vocabulary size is 12.*\[12\]"):
        scores(Sampling(bad_words_ids=[[3, 12]], seed=0), [1], [], [])


def test_typical_sampling_may_drop_the_likeliest_token():
    probs = torch.tensor([0.4, 0.15, 0.15, 0.15, 0.15], dtype=torch.float64)  # -log p: .92, 1.90; entropy 1.51
    kept = Sampler(Sampling(temperature=1.0, typical_p=0.5, seed=0), 0, [1]).probs(probs.log(), [])
    torch.testing.assert_close(kept, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]).double())
    kept = Sampler(Sampling(temperature=1.0, min_p=0.5, typical_p=0.5, seed=0), 0, [1]).probs(probs.log(), [])
    assert kept.tolist() == [1, 0, 0, 0, 0]  # min-p comes before


def test_the_constraint_is_asked_for_its_row_with_the_path():
    asked = []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        asked.append((row, ids.tolist()))
        return [row, 7]

    found = scores(Sampling(prefix_allowed_tokens_fn=allowed, seed=0), [1, 2], [3], [4, 5], row=3)
    assert asked == [(3, [1, 2, 3, 4, 5])]
    assert found.isfinite().nonzero()[:, 0].tolist() == [3, 7]
    assert torch.equal(found[[3, 7]], LOGITS[[3, 7]])


@pytest.mark.parametrize("nothing", [[], torch.empty(0, dtype=torch.int64), [-1], [3, 99999], None], ids=str)
def test_a_constraint_that_allows_nothing_there_is_is_named_with_its_row(nothing):
    sampling = Sampling(prefix_allowed_tokens_fn=lambda row, ids: nothing, seed=0)
    with pytest.raises(
        ValueError, match=r"prefix_allowed_tokens_fn allows no token after 3 tokens of row 2 .*\[1, 8, 9\]"
    ):
        scores(sampling, [1], [8], [9], row=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_place_where_no_token_is_left_is_an_error(temperature):
    sampling = Sampling(temperature=temperature, bad_words_ids=[[4, token] for token in range(V)], seed=0)
    assert scores(sampling, [1], [], []).isfinite().any()
    with pytest.raises(ValueError, match=r"no token may follow 2 tokens .*\[1, 4\].*ban all of them"):
        Sampler(sampling, 0, [1]).choose(LOGITS, [4])


class Count(LogitsProcessor):
    """A state that every call changes."""

    def __init__(self, shared=None):
        self.calls = [] if shared is None else shared

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids[0].tolist())
        return scores - 50.0 * (torch.arange(V) % 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_asked_behind_an_end_token_of_the_path(temperature):
    count = Count()
    sampling = Sampling(temperature=temperature, repetition_penalty=3.0, processors=[count], seed=5)
    sampler = Sampler(sampling, 0, [1, 9], frozenset({9, 10}))
    assert sampler.choose(LOGITS, [4]) % 2 == 0  # an end token of the prompt ends nothing
    asked = [[1, 9, 4]]
    assert count.calls == asked
    for path in ([9], [4, 10], [10, 4, 4], [10, 9]):
        assert torch.equal(sampler.scores(LOGITS, path)[0], LOGITS)
        position = 2 + len(path)
        key = noise.key(noise.key(5, 0), noise.TARGET, position)
        noisy = LOGITS + (noise.gumbel([key], torch.arange(V))[0] if temperature else 0)
        assert sampler.choose(LOGITS, path) == int(noisy.argmax())
    assert count.calls == asked
    sampler.scores(LOGITS, [8])
    assert count.calls == [*asked, [1, 9, 8]]


def test_a_single_row_uses_the_processor_itself_and_rows_of_a_batch_have_copies():
    shared: list = []
    first, second = Count(shared), Count(shared)
    sampling = Sampling(temperature=1.0, processors=[first, second], seed=[3, 8, 3])
    samplers = batch_samplers(sampling, [[1], [2, 3], [4]], frozenset({9}))
    assert [sampler.context for sampler in samplers] == [[1], [2, 3], [4]]
    assert [sampler.seed for sampler in samplers] == [3, 8, 3]
    for row, sampler in enumerate(samplers):
        alone = Sampler(Sampling(temperature=1.0, processors=[Count()], seed=[3, 8, 3]), row, sampler.context)
        assert sampler.key(1, 7) == alone.key(1, 7)
        sampler.scores(LOGITS, [5])
        sampler.scores(LOGITS, [9, 5])  # behind an end
        own = sampler.sampling.processors
        assert own[0].calls is own[1].calls  # what a row's processors share stays shared
        assert own[0].calls == [[*sampler.context, 5]] * 2
    assert shared == []
    (only,) = batch_samplers(Sampling(processors=[first], seed=0), [[1]])
    only.scores(LOGITS, [])
    assert only.sampling.processors[0] is first
    assert shared == [[1]]


def test_a_batch_draws_one_seed_for_all_rows():
    samplers = batch_samplers(Sampling(temperature=1.0), [[1], [1]])
    assert samplers[0].seed == samplers[1].seed
    assert samplers[0].key(1, 1) != samplers[1].key(1, 1)
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        batch_samplers(Sampling(seed=[1, 2]), [[1], [2], [3]])


class Locked(Count):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Stubborn(Count):
    def __deepcopy__(self, memo):
        raise NotImplementedError("no copies of a compiled grammar")


@pytest.mark.parametrize("processor", [Locked(), Stubborn()], ids=lambda p: type(p).__name__)
def test_a_processor_that_cannot_be_copied_is_named(processor):
    sampling = Sampling(processors=[Count(), processor], seed=0)
    name = type(processor).__name__
    with pytest.raises(ValueError, match=f"needs its own {name}, but copying it failed .*one at a time"):
        batch_samplers(sampling, [[1], [2]])
    assert len(batch_samplers(sampling, [[1]])) == 1
