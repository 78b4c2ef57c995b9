"""`to_scores` is transformers' chain, `Sampler` draws its softmax, and settings that mean nothing are refused."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from decode import Sampling, generate, noise
from decode.sampling import Sampler, to_probs, to_scores

CONTEXT = [3, 5, 3, 5, 9, 3]
V = 320


def processors() -> LogitsProcessorList:
    return LogitsProcessorList(
        [NoRepeatNGramLogitsProcessor(2), SequenceBiasLogitsProcessor([[[7], -2.0], [[3, 11], 4.0]])]
    )


def logits_of(seed: int = 0, size: int = V, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def name(value: object) -> str:
    """A test's name: without addresses, which differ between processes."""
    if not isinstance(value, dict):
        return str(value)
    return ",".join(
        f"{key}={'given' if key in ('prefix_allowed_tokens_fn', 'processors') else value[key]}" for key in value
    )


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.4, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 1000, "min_p": 0.3},
    {"temperature": 0.8, "top_p": 0.05},
    {"temperature": 1.3, "repetition_penalty": 1.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.6, "repetition_penalty": 0.5, "min_p": 1.0},
    {"repetition_penalty": 3.0},
    {"temperature": 0.9, "typical_p": 0.3},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
    {"bad_words_ids": [[7], [3, 11], [9, 3, 12], [0] * 9]},
    {"temperature": 0.9, "repetition_penalty": 1.3, "bad_words_ids": [[3, 11], [3]], "typical_p": 0.5},
    {"prefix_allowed_tokens_fn": lambda row, ids: [row, 7, 11, 40 + int(ids[-1])]},
    {"temperature": 0.9, "bad_words_ids": [[7]], "prefix_allowed_tokens_fn": lambda row, ids: [7]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
@pytest.mark.parametrize("with_processors", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_those_of_transformers_own_chain(tiny_target, settings, with_processors, dtype):
    options = {name: value for name, value in settings.items() if name != "prefix_allowed_tokens_fn"}
    config = GenerationConfig(do_sample="temperature" in settings, num_beams=1, num_return_sequences=1, **options)
    config.top_k = settings.get("top_k", 0)
    custom = processors() if with_processors else LogitsProcessorList()
    tiny_target.model._prepare_special_tokens(config)
    chain = tiny_target.model._get_logits_processor(
        config,
        len(CONTEXT),
        prefix_allowed_tokens_fn=settings.get("prefix_allowed_tokens_fn"),
        logits_processor=custom,
        device="cpu",
    )
    sampling = Sampling(**settings, processors=custom)
    ours = sampling.processor_list(0, len(CONTEXT))
    context = torch.tensor([CONTEXT])
    for seed in range(5):
        logits = logits_of(seed).to(dtype)[None]
        kept = logits.clone()
        found = to_scores(logits, context, ours)
        expected = chain(context, logits.clone().to(torch.promote_types(dtype, torch.float32)))
        assert torch.equal(found, expected)
        assert torch.equal(logits, kept)  # the caller's logits are left alone
        assert sampling.needs_context or torch.equal(to_scores(logits, None, ours), expected)


def test_probabilities_are_a_softmax_or_a_one_hot():
    scores = torch.tensor([[1.0, -torch.inf, 2.0, 2.0]])
    probs = to_probs(scores, Sampling(temperature=0.5))
    torch.testing.assert_close(
        probs, torch.tensor([1.0, 0, 2.718281828459045, 2.718281828459045]).double() / 6.43656365691809
    )
    assert to_probs(scores, Sampling()).tolist() == [0, 0, 1, 0]
    assert probs.dtype == torch.float64


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_the_path_is_part_of_the_context(settings):
    sampling = Sampling(**settings, processors=processors(), seed=1)
    logits = logits_of()
    after = Sampler(sampling, 0, [*CONTEXT, 8, 5])
    before = Sampler(sampling, 0, CONTEXT)
    assert torch.equal(before.scores(logits, [8, 5]), after.scores(logits, []))
    assert torch.equal(before.probs(logits, [8, 5]), after.probs(logits, []))
    assert before.choose(logits, [8, 5]) == after.choose(logits, [])
    assert before.context == CONTEXT


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 6, "repetition_penalty": 1.4},
    ],
    ids=str,
)
def test_choices_over_positions_follow_the_softmax_of_the_scores(oracles, settings):
    size, draws = 24, 3000
    logits = logits_of(3, size, 1.5)
    sampler = Sampler(Sampling(**settings, seed=5), 2, [1, 2, 3])
    probs = sampler.probs(logits, [])
    counts = torch.zeros(size)
    pairs = torch.zeros(2, 2)
    previous = None
    for position in range(draws):
        # other positions by a longer context of the same tokens: the distribution stays
        sampler.context = [1, 2, 3] + [1] * position
        token = sampler.choose(logits, [])
        counts[token] += 1
        if previous is not None:
            pairs[int(previous < size // 2), int(token < size // 2)] += 1
        previous = token
    assert counts[probs == 0].sum() == 0
    assert oracles.chi_square_p(counts, probs * draws) > 1e-6
    low = probs[: size // 2].sum()
    split = torch.stack([1 - low, low])
    assert oracles.chi_square_p(pairs.flatten(), (split[:, None] * split).flatten() * (draws - 1)) > 1e-6


def test_choices_over_seeds_and_rows_follow_the_softmax_too(oracles):
    logits = logits_of(4, 8, 1.0)
    probs = logits.softmax(0)
    for axis in ("seed", "row"):
        counts = torch.zeros(8)
        for i in range(4000):
            sampling = Sampling(temperature=1.0, seed=i if axis == "seed" else 7)
            counts[Sampler(sampling, 0 if axis == "seed" else i, [1]).choose(logits, [])] += 1
        assert oracles.chi_square_p(counts, probs * 4000) > 1e-6


def test_a_choice_is_the_argmax_of_scores_and_noise():
    sampling = Sampling(temperature=0.9, top_k=30, seed=[4, 9])
    sampler = Sampler(sampling, 1, CONTEXT)
    for depth in range(20):
        path = list(range(depth))
        scores = sampler.scores(logits_of(depth), path)[0].double()
        key = noise.key(noise.key(9, 0), noise.TARGET, len(CONTEXT) + depth)
        noisy = scores + noise.gumbel([key], torch.arange(V))[0]
        assert sampler.choose(logits_of(depth), path) == int(noisy.argmax())


def test_greedy_takes_the_best_processed_token_and_its_first_of_a_tie():
    logits = torch.tensor([1.0, 4.0, 4.0, 3.9])
    assert Sampler(Sampling(seed=0), 0, [0]).choose(logits, []) == 1
    assert Sampler(Sampling(repetition_penalty=2.0, seed=0), 0, [1]).choose(logits, []) == 2
    assert Sampler(Sampling(repetition_penalty=2.0, seed=0), 0, [1]).choose(logits, [2]) == 3


def test_coins_follow_their_probability_and_extremes_are_certain(oracles):
    sampler = Sampler(Sampling(temperature=1.0, seed=3), 0, [1])
    assert not any(sampler.flip(0.0) for _ in range(1000))
    assert all(sampler.flip(1.0) for _ in range(1000))
    heads = sum(sampler.flip(0.3) for _ in range(5000))
    assert oracles.chi_square_p(torch.tensor([heads, 5000 - heads]), torch.tensor([1500.0, 3500.0])) > 1e-6
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.05, 0.0], dtype=torch.float64)  # not normalised
    counts = torch.bincount(torch.tensor([sampler.draw(weights) for _ in range(5000)]), minlength=6)
    assert counts[weights == 0].sum() == 0
    assert oracles.chi_square_p(counts, weights / weights.sum() * 5000) > 1e-6
    assert sampler.draw(torch.tensor([0.0, 0.0, 1e-300, 0.0], dtype=torch.float64)) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_k": -3}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be above 0 .* and finite, .* got inf"),
        ({"temperature": float("inf")}, "temperature must be at least 0 .* and finite, got inf"),
        ({"temperature": 1e-38}, "temperature must be at least 0 .* 1e-06 or more"),
        ({"temperature": "0.7"}, "temperature must be a number, got '0.7'"),
        ({"typical_p": None}, "typical_p must be a number, got None"),
        ({"presence_penalty": 1e39}, "presence_penalty must be a finite number .* at most 1e"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty must be above 0"),
        ({"top_k": 1.5}, "top_k must be at least 1"),
        ({"processors": 3}, "processors must be a list"),
        ({"processors": [3]}, "processors must be a list"),
        ({"seed": [1, None]}, "seed must be a number, a list"),
        ({"typical_p": 0.0}, "typical_p must be above 0 and at most 1, got 0.0"),
        ({"typical_p": 1.1}, "typical_p must be above 0 and at most 1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number .* got nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be a finite number"),
        ({"bad_words_ids": [[3], []]}, r"bad_words_ids must be non-empty lists of token ids.* got \[\[3\], \[\]\]"),
        ({"bad_words_ids": [[3, -1]]}, "bad_words_ids must be non-empty lists"),
        ({"bad_words_ids": [3, 4]}, "bad_words_ids must be non-empty lists"),
        ({"bad_words_ids": ["word"]}, "bad_words_ids must be non-empty lists"),
        ({"bad_words_ids": [[1.5]]}, "bad_words_ids must be non-empty lists"),
        ({"bad_words_ids": None}, "bad_words_ids must be non-empty lists"),
        ({"prefix_allowed_tokens_fn": [1, 2]}, "prefix_allowed_tokens_fn must be a function"),
    ],
)
def test_settings_no_distribution_has_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"bad_words_ids": ((3,),)}, True),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, True),
        ({"processors": (NoRepeatNGramLogitsProcessor(2),)}, True),
    ],
    ids=name,
)
def test_context_is_needed_by_what_looks_at_it(settings, needed):
    sampling = Sampling(**settings)
    assert sampling.needs_context == needed
    assert hash(sampling) == hash(Sampling(**settings))  # also with what was cached
    assert sampling == Sampling(**settings) != Sampling(temperature=0.1)
    assert Sampler(Sampling(**settings, seed=0), 0, [2]).scores(logits_of(), [3]).shape == (1, V)


def test_seeds_are_checked_drawn_and_reported(tiny_target):
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        Sampling(seed=[1, 2]).with_seed(3)
    with pytest.raises(ValueError, match="seed must be set"):
        Sampler(Sampling(), 0, [1])
    drawn = {Sampling().with_seed(1).seed for _ in range(20)}
    assert len(drawn) == 20
    result = generate(tiny_target, [5, 6], sampling=Sampling(temperature=1.0), max_new_tokens=12, eos_ids=())
    again = generate(
        tiny_target, [5, 6], sampling=Sampling(temperature=1.0, seed=result.seed), max_new_tokens=12, eos_ids=()
    )
    assert again.token_ids == result.token_ids


def test_a_list_of_seeds_gives_each_row_the_noise_of_a_single_prompt():
    logits = logits_of(1, scale=0.5)
    seeds = [7, 1, 7]
    rows = [Sampler(Sampling(temperature=1.0, seed=seeds), r, CONTEXT) for r in range(3)]
    alone = [Sampler(Sampling(temperature=1.0, seed=seed), 0, CONTEXT) for seed in seeds]
    paths = [[1] * depth for depth in range(12)]
    texts = [[row.choose(logits, path) for path in paths] for row in [*rows, *alone]]
    assert texts[:3] == texts[3:]
    assert texts[0] == texts[2] != texts[1]
    one_seed = [Sampler(Sampling(temperature=1.0, seed=7), r, CONTEXT) for r in range(2)]
    assert [one_seed[0].choose(logits, path) for path in paths] != [one_seed[1].choose(logits, path) for path in paths]
    assert [row.seed for row in rows] == seeds
