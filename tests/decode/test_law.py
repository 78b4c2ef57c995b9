"""The exact law of a few tokens, and what its test finds and does not find."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from decode.law import LENGTH, POWER, TOP_K, choose_law, detectable, exact_law, p_value, pool, survival

TOKEN_LAW = torch.tensor([0.45, 0.3, 0.15, 0.1], dtype=torch.float64)
ALPHA = 1e-6


def table_target(rows: list[list[float]], dtype=torch.float64) -> SimpleNamespace:
    """A model whose logits depend on the last token only."""
    table = torch.tensor(rows, dtype=dtype)
    return SimpleNamespace(
        model=lambda input_ids, use_cache: SimpleNamespace(logits=table[input_ids]),
        dtype=dtype,
        device=torch.device("cpu"),
    )


def six_tokens(seed: int) -> list[list[float]]:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def text_law() -> list[float]:
    return [math.prod(float(TOKEN_LAW[t]) for t in text) for text in itertools.product(range(4), repeat=LENGTH)]


def draw(law: torch.Tensor, samples: int, generator: torch.Generator) -> list[int]:
    return torch.bincount(law.multinomial(samples, replacement=True, generator=generator), minlength=len(law)).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_law_is_the_product_of_the_softmaxes_of_the_best_tokens(temperature):
    rows = six_tokens(0)
    law = exact_law(table_target(rows), [2, 5], temperature)
    expected = {}
    for text in itertools.product(range(6), repeat=LENGTH):
        mass = 1.0
        for before, token in itertools.pairwise((5, *text)):
            best = sorted(rows[before])[-TOP_K:]
            weights = [math.exp(logit / temperature) * (logit in best) for logit in rows[before]]
            mass *= weights[token] / sum(weights)
        if mass > 0:
            expected[text] = mass
    assert len(law.probs) == TOP_K**LENGTH
    assert law.probs == pytest.approx(expected, rel=1e-12)
    assert law.rounding == 0.0


def test_texts_are_counted_in_their_cells_and_those_of_probability_zero_apart():
    rows = six_tokens(0)
    law = exact_law(table_target(rows), [5], 1.0)
    worst = min(range(6), key=lambda token: rows[5][token])
    first = next(iter(law.probs))
    counts, impossible = law.count([[*first, 3, 3], list(first), [worst, 0, 0, 1], [worst, 0, 0, 2]])
    assert counts[first] == 2
    assert sum(counts.values()) == 2
    assert dict(impossible) == {(worst, 0, 0): 2}


def test_a_cell_ends_where_rounding_may_decide_which_tokens_are_kept():
    """In float32 the fourth and fifth best of token 0 are 5e-5 apart; in float64 that is no tie."""
    rows = six_tokens(1)
    rows[0] = [5.0, 4.0, 3.0, 2.0, 2.0 - 5e-5, 0.0]
    assert () in exact_law(table_target(rows, torch.float32), [0], 1.0).probs
    assert len(exact_law(table_target(rows), [0], 1.0).probs) == TOP_K**LENGTH
    law = exact_law(table_target(rows, torch.float32), [1], 1.0)
    short = [cell for cell in law.probs if len(cell) < LENGTH]
    assert short
    assert all(cell[-1] == 0 and 0 not in cell[:-1] for cell in short)
    assert sum(law.probs.values()) == pytest.approx(1.0, abs=1e-6)
    counts, impossible = law.count([[*short[0], 4, 4], [*short[0], 3, 3]])
    assert counts[short[0]] == 2
    assert not impossible
    assert 0 < law.rounding < 1e-8


def test_a_prompt_whose_end_cannot_be_tested_is_cut():
    rows = six_tokens(2)
    rows[0] = [50.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # certain: one cell
    target = table_target(rows)
    assert choose_law(target, [1, 2, 3, 0, 0], 1.0, 1000).context == [1, 2, 3]
    assert choose_law(target, [0, 0], 1.0, 1000).context == [0, 0]
    assert len(choose_law(target, [1] * 40, 1.0, 1000).context) == 16


def test_rare_cells_are_pooled_until_every_group_expects_five():
    probs = [0.6, 0.004, 0.39, 0.003, 0.003]
    assert pool(probs, 1000) == [[3, 4, 1], [2], [0]]
    assert pool([0.5, 0.48, 0.02], 100) == [[2, 1], [0]]
    assert pool([1.0], 100) == [[0]]
    law = text_law()
    for samples in (10, 100, 1000, 10000):
        groups = pool(law, samples)
        assert sorted(itertools.chain(*groups)) == list(range(64))
        assert all(samples * sum(law[cell] for cell in group) >= 5 for group in groups)


@pytest.mark.parametrize(
    ("statistic", "freedom", "noncentrality", "expected"),
    [(3.841458820694124, 1, 0.0, 0.05), (37.56623478662507, 20, 0.0, 0.01), (0.0, 5, 3.0, 1.0)],
)
def test_tails_are_those_of_the_tables(statistic, freedom, noncentrality, expected):
    assert survival(statistic, freedom, noncentrality) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("noncentrality", [0.5, 40.0, 3000.0])
def test_the_noncentral_tail_is_that_of_shifted_normals(noncentrality):
    normals = torch.randn(50_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normals[:, 0] += math.sqrt(noncentrality)
    sums = normals.square().sum(1)
    for quantile in (0.1, 0.5, 0.99):
        tail = survival(float(sums.quantile(quantile)), 4, noncentrality)
        assert tail == pytest.approx(1 - quantile, abs=4 * math.sqrt(quantile * (1 - quantile) / 50_000))


@pytest.mark.parametrize("samples", [300, 1000])
def test_a_right_law_is_not_accused(samples):
    law, generator = text_law(), torch.Generator().manual_seed(samples)
    tensor = torch.tensor(law, dtype=torch.float64)
    found = torch.tensor([p_value(draw(tensor, samples, generator), law) for _ in range(200)])
    assert found.min() > ALPHA
    for level in (0.05, 0.5):
        assert abs(float((found < level).double().mean()) - level) < 4 * math.sqrt(level * (1 - level) / 200)


def test_the_p_value_is_that_of_the_corrected_likelihood_ratio():
    """Sixty heads of a hundred tosses, by hand."""
    ratio = 2 * (60 * math.log(60 / 50) + 40 * math.log(40 / 50))
    corrected = ratio / (1 + (2 + 2 - 1) / (6 * 100))
    assert p_value([60, 40], [0.5, 0.5]) == pytest.approx(math.erfc(math.sqrt(corrected / 2)), rel=1e-9)
    assert p_value([100, 0], [1.0, 0.0]) == 1.0


def test_a_cell_that_expects_little_does_not_accuse_by_one_sample():
    """One draw of a cell that expects 0.02 is no news; as a cell of its own it would be a p-value of 1e-11."""
    law = [0.5, 0.49998, 0.00002]
    assert p_value([500, 499, 1], law) > 0.5


@pytest.mark.parametrize("samples", [300, 1000, 3000])
def test_an_error_of_the_stated_size_shows_in_its_least_visible_direction(samples):
    law = torch.tensor(text_law(), dtype=torch.float64)
    law = torch.stack([law[group].sum() for group in pool(law.tolist(), samples)])
    distance = detectable(samples, len(law), ALPHA)
    up = torch.zeros(len(law), dtype=torch.bool)
    for cell in law.argsort(descending=True).tolist():  # halves of about equal mass
        up[cell] = law[up].sum() < law.cumsum(0)[-1] / 2
    wrong = torch.where(up, law * (1 + distance / law[up].sum()), law * (1 - distance / law[~up].sum()))
    assert float((wrong - law).abs().sum()) / 2 == pytest.approx(distance)
    generator = torch.Generator().manual_seed(samples)
    found = [p_value(draw(wrong, samples, generator), law.tolist()) < ALPHA for _ in range(200)]
    assert sum(found) >= 0.99 * len(found)
    # and the statement is not so weak that half of the error would show as surely
    half = law + (wrong - law) / 2
    found = [p_value(draw(half, samples, generator), law.tolist()) < ALPHA for _ in range(100)]
    assert sum(found) < 0.9 * len(found)


def test_more_samples_show_smaller_errors_and_rounding_hides_some():
    distances = [detectable(samples, 40, ALPHA) for samples in (100, 1000, 10_000)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] / distances[2] == pytest.approx(10)
    assert detectable(10_000, 40, ALPHA, rounding=0.01) > 1.3 * distances[2]
    assert detectable(3, 40, ALPHA) == 1.0
    assert detectable(1000, 1, ALPHA) == 1.0
    assert POWER == 0.999


def test_rounding_of_half_precision_is_not_accused_but_errors_beyond_it_are():
    """Scores off by s = 0.1 in each of three tokens."""
    law = torch.tensor(text_law(), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    slack = LENGTH * 0.1**2
    factors = torch.randn(3, 4, generator=generator, dtype=torch.float64).mul(0.1).exp() * TOKEN_LAW
    first, second, third = factors / factors.sum(-1, keepdim=True)
    rounded = torch.einsum("a,b,c->abc", first, second, third).flatten()
    counts = draw(rounded, 30_000, generator)
    assert p_value(counts, law.tolist()) < ALPHA
    assert p_value(counts, law.tolist(), rounding=slack) > 0.01
    wrong = 0.7 * law + 0.3 * law.flip(0)
    assert p_value(draw(wrong, 30_000, generator), law.tolist(), rounding=slack) < ALPHA
