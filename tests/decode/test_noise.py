"""Noise is a function of its key, finite, Gumbel, and unrelated between keys."""

import itertools
import math

import pytest
import torch

from decode import noise

MASK = (1 << 64) - 1
EULER = 0.5772156649015329


def splitmix(state: int) -> int:
    """SplitMix64's finaliser as Steele, Lea and Flood print it."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_mixing_function_is_splitmix64():
    # the published first outputs of SplitMix64 with seed 1234567
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(splitmix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert noise.key(1234567) == outputs[0]
    assert noise.key(1, 2) != noise.key(2, 1) != noise.key(1, 2, 0)


@pytest.mark.parametrize("key", [0, 1, 1 << 63, MASK, noise.key(3, 1, 4)])
def test_tensor_noise_equals_python_integers(key):
    tokens = [0, 1, 2, 77, 49151, 151935, (1 << 31) + 5]
    found = noise.gumbel([key], torch.tensor(tokens))[0].tolist()
    for token, value in zip(tokens, found, strict=True):
        bits = splitmix((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK)
        uniform = ((bits >> 12) + 0.5) / 2**52
        assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12, abs=1e-12)


def test_uniform_maps_a_key_to_the_open_interval():
    values = [noise.uniform(noise.key(i)) for i in range(20000)]
    assert 0 < min(values) < max(values) < 1
    assert all(value == noise.uniform(noise.key(i)) for i, value in enumerate(values[:50]))
    assert kolmogorov(torch.tensor(values, dtype=torch.float64)) < 1e-2
    for extreme in (0, 1, MASK, 1 << 63):
        assert 0 < noise.uniform(extreme) < 1


def test_values_do_not_depend_on_batch_or_on_other_tokens():
    keys = [noise.key(5, r, noise.TARGET, 9) for r in range(6)]
    tokens = torch.arange(1000)
    whole = noise.gumbel(keys, tokens)
    assert whole.shape == (6, 1000)
    assert whole.dtype == torch.float64
    assert torch.equal(whole, noise.gumbel(keys, tokens))
    for r, key in enumerate(keys):
        assert torch.equal(noise.gumbel([key], tokens)[0], whole[r])
    some = torch.tensor([999, 3, 500, 3])
    assert torch.equal(noise.gumbel([keys[4], keys[1]], some), whole[[4, 1]][:, some])


def test_every_value_is_finite_for_many_keys_and_large_vocabularies():
    keys = [noise.key(seed, 0, noise.TARGET, position) for seed in range(4) for position in range(5)]
    values = noise.gumbel([*keys, 0, MASK, 1 << 63], torch.arange(256_000))
    assert values.isfinite().all()
    assert values[:, 0].unique().numel() == 23
    # 53-bit uniforms: no two of 256,000 tokens of a position tie at the top, as float32's 2^-24 grid would have it
    assert all(len(row.topk(50).values.unique()) == 50 for row in values)


def kolmogorov(uniforms: torch.Tensor) -> float:
    """Largest distance of the empirical distribution function to the uniform one."""
    ordered = uniforms.sort().values
    n = len(ordered)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((steps[1:] - ordered).abs(), (ordered - steps[:-1]).abs()).max())


@pytest.mark.parametrize("across", ["tokens", "positions", "rows", "seeds"])
def test_noise_is_standard_gumbel(across):
    n = 20000
    if across == "tokens":
        values = noise.gumbel([noise.key(0, 0, noise.TARGET, 17)], torch.arange(n))[0]
    else:
        place = {"positions": 3, "rows": 1, "seeds": 0}[across]
        keys = []
        for i in range(n):
            parts = [11, 0, noise.TARGET, 17]
            parts[place] = i
            keys.append(noise.key(noise.key(parts[0], parts[1]), *parts[2:]))
        values = noise.gumbel(keys, torch.tensor([0]))[:, 0]
    # six standard errors
    assert float(values.mean()) == pytest.approx(EULER, abs=6 * math.pi / math.sqrt(6 * n))
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=6 * math.sqrt(4.4 / n) * math.pi**2 / 6)
    # Kolmogorov's limit law puts 3 / sqrt(n) beyond a probability of 1e-7
    assert kolmogorov(torch.exp(-torch.exp(-values))) < 3 / math.sqrt(n)


def test_neighbouring_seeds_rows_purposes_and_positions_are_uncorrelated():
    tokens = torch.arange(20000)
    streams = [noise.key(seed, row) for seed in (0, 1) for row in (0, 1)]
    keys = [
        noise.key(s, p, n) for s in streams for p in (noise.TARGET, noise.DRAFT, noise.COIN) for n in (0, 1, 2, 100)
    ]
    assert len(set(keys)) == len(keys)
    values = noise.gumbel(keys, tokens)
    correlation = torch.corrcoef(values) - torch.eye(len(keys))
    assert float(correlation.abs().max()) < 6 / math.sqrt(len(tokens))
    # the next token at one position may not be this token at the next
    shifted = torch.corrcoef(torch.cat([values[:, 1:], values[:, :-1]]))[: len(keys), len(keys) :]
    assert float(shifted.abs().max()) < 6 / math.sqrt(len(tokens))


def test_keys_do_not_collide():
    parts = itertools.product(range(20), range(5), (1, 2, 3), range(60))
    keys = [noise.key(noise.key(seed, row), purpose, position) for seed, row, purpose, position in parts]
    assert len(set(keys)) == len(keys) == 18000
    assert all(0 <= key <= MASK for key in keys)


def test_negative_and_huge_seeds_have_keys():
    values = {noise.key(seed, 0) for seed in (-1, -2, 2**63, 2**64 - 2, 7)}
    assert len(values) == 4  # -2 and 2**64 - 2 are one 64-bit number
