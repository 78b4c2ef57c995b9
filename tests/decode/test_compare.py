"""A difference of two texts is found, measured and judged."""

import pytest
import torch

from decode import Sampling, Target, generate, noise
from decode.compare import first_difference
from decode.sampling import to_scores

PROMPT = [5, 6, 7]


def measured_gap(target, context, tokens, sampling, key=None) -> float:
    with torch.no_grad():
        logits = target.model(torch.tensor([context]), use_cache=False).logits[:, -1]
    scores = to_scores(logits, torch.tensor([context]), sampling.processor_list(0, len(PROMPT)))[0].double()
    if key is not None:
        scores = scores + noise.gumbel([key], torch.arange(len(scores)))[0]
    assert set(scores.topk(2).indices.tolist()) == set(tokens)
    return float((scores[tokens[0]] - scores[tokens[1]]).abs())


def second_best(target, context, sampling, key=None) -> tuple[int, int]:
    with torch.no_grad():
        logits = target.model(torch.tensor([context]), use_cache=False).logits[:, -1]
    scores = to_scores(logits, torch.tensor([context]), sampling.processor_list(0, len(PROMPT)))[0].double()
    if key is not None:
        scores = scores + noise.gumbel([key], torch.arange(len(scores)))[0]
    best, second = scores.topk(2).indices.tolist()
    return best, second


def test_equal_texts_have_no_difference(tiny_target):
    assert first_difference(tiny_target, PROMPT, [1, 2], [1, 2], Sampling()) is None


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 40}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("row", [0, 2])
def test_the_gap_is_that_of_the_scores_the_token_was_chosen_by(tiny_target, place, settings, row):
    sampling = Sampling(**settings, seed=8)
    text = generate(tiny_target, [PROMPT] * (row + 1), sampling=sampling, max_new_tokens=6, eos_ids=())[row].token_ids
    context = PROMPT + text[:place]
    key = noise.key(noise.key(8, row), noise.TARGET, len(context)) if "temperature" in settings else None
    best, second = second_best(tiny_target, context, sampling, key)
    assert best == text[place]
    other = [*text[:place], second, *text[place + 1 :]]
    found = first_difference(tiny_target, PROMPT, text, other, sampling, row=row)
    assert found.position == place
    assert found.tokens == (best, second)
    assert found.gap == pytest.approx(measured_gap(tiny_target, context, (best, second), sampling, key))
    assert not found.near_tie
    assert f"token {place}: {best} or {second}" in str(found)
    assert "NOT a tie" in str(found)


def test_a_list_of_seeds_is_that_of_the_batch(tiny_target):
    """Row r of a batch with a list of seeds has the noise of seed r."""
    sampling = Sampling(temperature=0.9, seed=[3, 8, 5])
    texts = [
        result.token_ids
        for result in generate(tiny_target, [PROMPT] * 3, sampling=sampling, max_new_tokens=4, eos_ids=())
    ]
    for row, seed in enumerate([3, 8, 5]):
        key = noise.key(noise.key(seed, 0), noise.TARGET, len(PROMPT))
        best, second = second_best(tiny_target, PROMPT, sampling, key)
        assert best == texts[row][0]
        found = first_difference(tiny_target, PROMPT, texts[row], [second, *texts[row][1:]], sampling, row=row)
        assert found.gap == pytest.approx(measured_gap(tiny_target, PROMPT, (best, second), sampling, key))


def test_a_shorter_text_or_a_token_beyond_the_two_best_is_never_a_tie(tiny_target):
    text = generate(tiny_target, PROMPT, max_new_tokens=4, eos_ids=()).token_ids
    shorter = first_difference(tiny_target, PROMPT, text, text[:2], Sampling())
    assert (shorter.position, shorter.tokens) == (2, (text[2], None))
    assert not shorter.near_tie
    worst = (text[0] + 1) % 320
    best, second = second_best(tiny_target, PROMPT, Sampling())
    worst = next(token for token in range(320) if token not in (best, second))
    beyond = first_difference(tiny_target, PROMPT, text, [worst], Sampling())
    assert beyond.gap > 1e-3
    assert not beyond.near_tie
    banned = Sampling(temperature=1.0, top_k=1, seed=0)
    assert not first_difference(tiny_target, PROMPT, [best], [second], banned).near_tie


class TiedTarget(Target):
    """Not a subclass for use: `make` builds a target whose two best tokens are `gap` apart everywhere."""

    @classmethod
    def make(cls, model, dtype: torch.dtype, gap: float) -> "TiedTarget":
        target = cls(model.to(dtype), name="tied", pack=False)

        def hook(module, args, output):
            output = torch.zeros_like(output)
            output[..., 9], output[..., 4] = 2.0, 2.0 - gap
            return output

        model.lm_head.register_forward_hook(hook)
        return target


@pytest.mark.parametrize(
    ("dtype", "gap", "excused"),
    [
        (torch.float64, 0.0, True),
        (torch.float64, 1e-9, False),
        (torch.float32, 5e-5, True),
        (torch.float32, 3e-4, False),
        (torch.bfloat16, 2.0**-6, True),
        (torch.bfloat16, 2.0**-4, False),
    ],
)
def test_only_gaps_of_rounding_size_are_excused(tiny_target, dtype, gap, excused):
    import copy

    target = TiedTarget.make(copy.deepcopy(tiny_target.model), dtype, gap)
    found = first_difference(target, PROMPT, [9], [4], Sampling())
    assert found.gap == pytest.approx(gap, abs=2e-7)
    assert found.near_tie == excused


def test_three_tokens_may_tie_in_half_precision(tiny_target):
    """The text's two tokens need not be a third computation's two best."""
    import copy

    target = TiedTarget.make(copy.deepcopy(tiny_target.model), torch.bfloat16, 2.0**-6)
    target.model.lm_head.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.tensor([7]), 2.0)
    )
    found = first_difference(target, PROMPT, [9], [4], Sampling())
    assert found.gap == pytest.approx(2.0**-6)
    assert found.near_tie


def test_half_precision_is_allowed_what_its_largest_logit_loses_at_the_temperature(tiny_target):
    import copy

    target = TiedTarget.make(copy.deepcopy(tiny_target.model), torch.bfloat16, 2.0**-6)
    target.model.lm_head.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.tensor([7]), -8.0)
    )
    for temperature in (0.0, 0.5, 2.0):
        found = first_difference(target, PROMPT, [9], [4], Sampling(temperature=temperature, seed=0))
        assert found.tolerance == pytest.approx(4 * 2.0**-8 * 8 / (temperature or 1))
