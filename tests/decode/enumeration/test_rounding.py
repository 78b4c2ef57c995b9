"""Where rounding could decide: equal laws, tiny residuals, half precision, and laws that underflow."""

import math
import random
from fractions import Fraction

import pytest
import torch

from decode.accept import Block, Rejection, residual
from decode.tree import Draws, TokenTree, chain_shape, tree_shape

LARGEST = 1 - 2.0**-53  # of the numbers that `noise.uniform` gives
RULES = {"rejection": Rejection(), "block": Block()}


def chain(tokens: list[int], q: torch.Tensor) -> TokenTree:
    return TokenTree(torch.tensor(tokens), chain_shape(len(tokens)), Draws(q, (False, *[True] * (len(tokens) - 1))))


@pytest.mark.parametrize("rule", RULES)
def test_drafts_from_the_targets_own_logits_pass_10000_coins_near_1(laws, rule):
    """p and q are equal to the last bit; top-k leaves tokens that may never be emitted."""
    logits = (2 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0))).bfloat16()
    p = torch.stack([laws.Given([], top_k=9).probs(row, []) for row in logits])
    tree = chain([0, int(p[0].argmax()), int(p[1].topk(9).indices[-1])], p.clone())
    for k in range(1, 10_001):
        row = laws.Given([1 - k * 2.0**-53] * 4, as_probs=True)
        ((path, (*_, token)),) = RULES[rule]([tree], p[None], [row])
        assert path == (0, 1, 2)
        assert p[2, token] > 0


@pytest.mark.parametrize("rule", RULES)
def test_drafts_from_almost_the_targets_law_never_give_what_the_target_cannot_say(laws, rule):
    """q is p in float32: coins near 1 now and then reject, and the residual is rounding."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(1)
    p = torch.randn(3, 40, generator=generator, dtype=torch.float64).mul(2)
    p[:, ::3] = -torch.inf
    p = p.softmax(-1)
    rejected = 0
    for _ in range(3000):
        q = p.float().double()
        q = q / q.sum(-1, keepdim=True)
        tokens = [0, *(chance.choices(range(40), weights=row.tolist())[0] for row in q[:2])]
        row = laws.Given([1 - chance.random() * 3e-8 for _ in range(2)] + [chance.random(), LARGEST], as_probs=True)
        ((path, (*_, token)),) = RULES[rule]([chain(tokens, q)], p[None], [row])
        assert p[path[-1], token] > 0
        rejected += len(path) < 3
    assert 30 < rejected < 2400


def test_a_residual_is_finite_and_lies_in_the_targets_support():
    generator = torch.Generator().manual_seed(2)
    for trial in range(300):
        p = torch.randn(30, generator=generator, dtype=torch.float64).mul(trial % 40).softmax(0)
        p[torch.rand(30, generator=generator) < 0.3] = 0
        p = p / p.sum() if p.sum() > 0 else torch.eye(30, dtype=torch.float64)[0]
        for q in (p, p * (1 + 1e-16), p * (1 + 1e-15), p.float().double(), p.roll(1), torch.eye(30)[3].double()):
            left = residual(p, q)
            assert left.isfinite().all()
            assert float(left.sum()) == pytest.approx(1, abs=1e-12)
            assert not left[p == 0].any()


def test_a_block_does_not_lose_a_residual_mass_as_small_as_what_is_missing(laws):
    """S + 1 - r, from left to right, is (1 + 2^-53) - r, which forgets S."""
    tiny = Fraction(1, 2**53)
    p = torch.tensor([[0.5, 0.5]] * 3, dtype=torch.float64)
    rows = [[Fraction(1, 2) + k * tiny, Fraction(1, 2) - k * tiny] for k in (1, 2, 0)]
    ratio = Fraction(1, 2) / rows[0][0]
    mass = ratio / 2 - rows[1][1]
    chance = float(mass / (mass + 1 - ratio))
    assert chance == pytest.approx(1 / 3)
    tree = chain([0, 0, 0], torch.tensor([[float(mass) for mass in row] for row in rows], dtype=torch.float64))
    for coin, path in ((chance - 1e-9, (0, 1)), (chance + 1e-9, (0,))):
        row = laws.Given([LARGEST, coin, 0.5], as_probs=True)  # the largest uniform alone rejects the whole block
        assert Block()([tree], p[None], [row])[0].path == path


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=["rejection", "block"])
def test_what_half_precision_would_round_to_nothing_is_drawn(laws, rule):
    """The draft has 1 - 2^-11 of the mass, 49,999 tokens share the rest: 1e-8 each, below the least float16."""
    logits = torch.zeros(2, 50_000, dtype=torch.float16)
    logits[:, 7] = math.log(2047 * 49_999)
    p = logits.double().softmax(-1)
    assert float(1 - p[0, 7]) == pytest.approx(2.0**-11, rel=0.01)
    assert not p[0, 8].half()
    tree = TokenTree(torch.tensor([0, 7]), chain_shape(2))
    kept = laws.Given([float(p[0, 7]) - 1e-6, 0.5])
    assert rule([tree], logits[None], [kept])[0] == ((0, 1), (7, 7))
    rest = [token for token in range(50_000) if token != 7]
    for share in (0.0, 1e-4, 0.3, 0.77777, 1 - 1e-6, LARGEST):
        row = laws.Given([float(p[0, 7]) + 1e-6, share])
        ((path, (*_, token)),) = rule([tree], logits[None], [row])
        assert path == (0,)
        assert token == rest[int(share * 49_999)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_points_that_hold_all_the_mass_are_accepted_and_nothing_is_drawn_from_an_empty_law(laws, dtype):
    logits = torch.full((3, 6), -torch.inf, dtype=dtype)
    logits[:, 2], logits[:, 4] = 9.0, -3.0
    tree = TokenTree(torch.tensor([0, 2, 4]), tree_shape((-1, 0, 0)))
    for coins in ([LARGEST, LARGEST, LARGEST], [0.5, 0.5], [LARGEST, 0.0, 0.0]):
        ((path, (*_, token)),) = Rejection()([tree], logits[None], [laws.Given(coins)])
        assert path in ((0, 1), (0, 2))
        assert token in (2, 4)


def test_zero_is_a_coin_that_accepts_nothing_of_probability_0(laws):
    """Strictly below: with <=, a coin of 0 would keep a token the target never says."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    for rule in (Rejection(), Block()):
        for tree in (chain([1, 0], q), TokenTree(torch.tensor([1, 0]), chain_shape(2))):
            assert rule([tree], p[None], [laws.Given([0.0, 0.0], as_probs=True)])[0] == ((0,), (1,))


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=["rejection", "block"])
def test_the_target_is_not_asked_behind_a_token_that_it_forbids(laws, rule):
    asked = []

    class Asked(laws.Given):
        def probs(self, logits, path):
            asked.append(list(path))
            return super().probs(logits, path)

    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    tree = chain([0, 0, 1, 2], torch.full((4, 3), 1 / 3, dtype=torch.float64))
    assert rule([tree], p[None], [Asked([0.0] * 4, as_probs=True)])[0].path == (0, 1)
    assert asked == [[], [0]]


def test_draws_whose_law_underflows_after_others_were_taken_stay_exact(laws):
    """Without replacement: once token 0 is drawn, e^-744 and e^-745 are left, of which float64 keeps one or two bits.

    The second child is drawn from what the scores say, by noise, whatever their probabilities round to.
    """
    scores = torch.tensor([0.0, -744.0, -745.0], dtype=torch.float64)
    draws = Draws(scores.softmax(0).expand(3, 3), (False, True, True))
    trees = [TokenTree(torch.tensor([laws.ROOT, 0, token]), tree_shape((-1, 0, 0)), draws) for token in (1, 2)]
    second = scores[1:].softmax(0).tolist()

    def propose(context, depth):
        return [(weight, tree.cut(depth)) for weight, tree in zip(second, trees, strict=True)]

    assert laws.distance(Rejection(), lambda context: (0.0, 0.5, 0.5), propose, 2) < 1e-12
