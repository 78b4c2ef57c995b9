"""The rules on tensors decide what the papers' algorithms decide, written slowly for lists, given the same uniforms.

The slow versions share no code with the rules and work on floats and on fractions alike. A decision within rounding of
its threshold is noted (`closest`), and such cases are counted, not compared.
"""

import math
import random
from fractions import Fraction

import pytest
import torch

from decode.accept import Block, Match, Rejection, Verdict
from decode.tree import Draws, TokenTree, tree_shape

SMALLEST, LARGEST = 2.0**-53, 1 - 2.0**-53  # of the numbers that `noise.uniform` gives


class Coins:
    """The same uniforms for the slow versions."""

    def __init__(self, uniforms, number=float) -> None:
        self.uniforms = [number(u) for u in uniforms]
        self.used, self.closest = 0, math.inf

    def flip(self, threshold) -> bool:
        u = self.uniforms[self.used]
        self.used += 1
        self.closest = min(self.closest, abs(float(u - threshold)))
        return u < threshold

    def draw(self, weights) -> int:
        """The first token whose cumulative weight exceeds the uniform's share of the total."""
        total = sum(weights)
        share = self.uniforms[self.used] * total
        self.used += 1
        below, found = 0, None
        last = max(token for token, weight in enumerate(weights) if weight > 0)
        for token, weight in enumerate(weights):
            below += weight
            if token < last and below > 0:
                self.closest = min(self.closest, abs(float((below - share) / total)))
            if found is None and below > share:
                found = token
        return last if found is None else found


def normalise(weights):
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else list(weights)


def left_of(p, q):
    left = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    return normalise(left) if sum(left) > 0 else p


class Case:
    """A tree, its laws, and the uniforms that decide it."""

    def __init__(self, tokens, parents, drawn, p, q, uniforms, *, replacement: bool) -> None:
        self.tokens, self.parents, self.drawn = tokens, parents, drawn
        self.p, self.q, self.uniforms, self.replacement = p, q, uniforms, replacement
        self.children = [[c for c, parent in enumerate(parents) if parent == node] for node in range(len(tokens))]

    def tree(self) -> TokenTree:
        probs = torch.tensor([[float(mass) for mass in row] for row in self.q], dtype=torch.float64)
        draws = Draws(probs, tuple(self.drawn), self.replacement) if any(self.drawn) else None
        return TokenTree(torch.tensor(self.tokens), tree_shape(tuple(self.parents)), draws)


def slow_rejection(case: Case, coins: Coins) -> Verdict:
    """Leviathan et al., Miao et al., Jeon et al.; children that were not drawn have q = 1 at their token."""
    path = [0]
    while True:
        p, q, accepted = case.p[path[-1]], list(case.q[path[-1]]), None
        order = sorted(case.children[path[-1]], key=lambda child: not case.drawn[child])
        for child in order:
            token = case.tokens[child]
            law = q if case.drawn[child] else [int(other == token) for other in range(len(p))]
            if coins.flip(p[token] / law[token] if law[token] > 0 else 0):
                accepted = child
                break
            p = left_of(p, law)
            if case.drawn[child] and not case.replacement:
                q = normalise([0 if other == token else mass for other, mass in enumerate(q)])
        if accepted is None:
            return Verdict.of(case.tokens, path, coins.draw(p))
        path.append(accepted)


def slow_block(case: Case, coins: Coins) -> Verdict:
    """Sun et al., algorithm 2: all lengths are tried, the largest success counts; the largest has the first uniform.

    Lengths behind a token of ratio 0 could not succeed and have none.
    """
    length = len(case.tokens) - 1
    laws = []
    for node in range(length):
        point = [int(other == case.tokens[node + 1]) for other in range(len(case.p[0]))]
        laws.append(case.q[node] if case.drawn[node + 1] else point)
    ratios, chances = [1], {}
    for i in range(1, length + 1):
        token = case.tokens[i]
        ratio = case.p[i - 1][token] / laws[i - 1][token] if laws[i - 1][token] > 0 else 0
        ratios.append(min(1, ratios[-1] * ratio))
        if i == length:
            chances[i] = ratios[i]
        else:
            mass = sum(max(ratios[i] * a - b, 0) for a, b in zip(case.p[i], laws[i], strict=True))
            chances[i] = mass / (mass + (1 - ratios[i])) if mass + (1 - ratios[i]) > 0 else 1
    longest = next((i for i in range(1, length + 1) if ratios[i] == 0), length)
    accepted = next((i for i in range(longest, 0, -1) if coins.flip(chances[i])), 0)
    if accepted == length:
        return Verdict.of(case.tokens, range(length + 1), coins.draw(case.p[length]))
    scaled = [ratios[accepted] * mass for mass in case.p[accepted]]
    return Verdict.of(case.tokens, range(accepted + 1), coins.draw(left_of(scaled, laws[accepted])))


def slow_match(case: Case, coins: Coins) -> Verdict:
    path = [0]
    while True:
        token = coins.draw(case.p[path[-1]])
        fitting = [child for child in case.children[path[-1]] if case.tokens[child] == token]
        if not fitting:
            return Verdict.of(case.tokens, path, token)
        path.append(fitting[0])


RULES = {"rejection": (Rejection(), slow_rejection), "block": (Block(), slow_block), "match": (Match(), slow_match)}


def random_parents(chance: random.Random, rule: str, size: int) -> list[int]:
    return [-1, *(node if rule == "block" else chance.randrange(node + 1) for node in range(size - 1))]


def agree(rule: str, case: Case, logits: torch.Tensor, row, number=float) -> bool:
    """Compare the verdict and the number of uniforms used; False if rounding may decide."""
    shipped, slow = RULES[rule]
    coins = Coins(case.uniforms, number)
    expected = slow(case, coins)
    (found,) = shipped([case.tree()], logits[None], [row])
    assert float(case.p[found.path[-1]][found.next_token]) > 0
    if coins.closest < 1e-12:
        return False
    assert found == expected
    assert row._coins == coins.used
    return True


def dyadic(chance: random.Random, size: int) -> list[Fraction]:
    """A law of 64ths, with zeros."""
    cuts = sorted(chance.randrange(65) for _ in range(size - 1))
    return [Fraction(b - a, 64) for a, b in zip([0, *cuts], [*cuts, 64], strict=True)]


@pytest.mark.parametrize("rule", RULES)
def test_rules_decide_as_fractions_do_to_both_ends_of_the_uniforms(laws, rule):
    chance = random.Random(rule)
    compared = 0
    for _ in range(1500):
        size, vocab_size = chance.randint(1, 6), chance.randint(2, 6)
        p = [dyadic(chance, vocab_size) for _ in range(size)]
        q = [chance.choice([dyadic(chance, vocab_size), row]) for row in p]
        uniforms = [
            chance.choice([0.0, SMALLEST, LARGEST, *[(2 * chance.randrange(2**29) + 1) / 2**30] * 5]) for _ in range(20)
        ]
        case = Case(
            [chance.randrange(vocab_size) for _ in range(size)],
            random_parents(chance, rule, size),
            [False, *(chance.random() < 0.7 for _ in range(size - 1))],
            p, q, uniforms,
            replacement=chance.random() < 0.5,
        )  # fmt: skip
        law = torch.tensor([[float(mass) for mass in row] for row in p], dtype=torch.float64)
        compared += agree(rule, case, law, laws.Given(uniforms, as_probs=True), Fraction)
    assert compared > 1200


def softmax(row: list[float], temperature: float) -> list[float]:
    best = max(row)
    masses = [math.exp((x - best) / temperature) for x in row]
    total = math.fsum(masses)
    return [mass / total for mass in masses]


def logits_case(chance: random.Random, rule: str, vocab_size: int, size: int, dtype, temperature: float):
    """Logits of this type, some of them -inf; drafts drawn from a law that is near the target's, or the same."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    logits = (2 * torch.randn(size, vocab_size, generator=generator)).to(dtype)
    logits[torch.rand(size, vocab_size, generator=generator) < 0.2] = -torch.inf
    logits[:, 0] = 1.0  # something is left
    drafted = logits.float() + chance.choice([0.0, 0.5]) * torch.randn(size, vocab_size, generator=generator)
    drafted[torch.rand(size, vocab_size, generator=generator) < 0.1] = -torch.inf
    drafted[:, 0] = 0.5
    p = [softmax(row, temperature) for row in logits.double().tolist()]
    q = [softmax(row, temperature) for row in drafted.double().tolist()]
    parents = random_parents(chance, rule, size)
    tokens = [0, *(chance.choices(range(vocab_size), weights=q[parent])[0] for parent in parents[1:])]
    drawn = [False, *(chance.random() < 0.7 for _ in range(size - 1))]
    uniforms = [chance.random() for _ in range(20)]
    return logits, Case(tokens, parents, drawn, p, q, uniforms, replacement=chance.random() < 0.5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rules_on_logits_of_any_precision_decide_as_lists_do(laws, rule, dtype):
    chance = random.Random(f"{rule}{dtype}")
    compared, accepted = 0, 0
    for _ in range(400):
        temperature = chance.choice([0.5, 1.0, 2.0])
        logits, case = logits_case(chance, rule, chance.randint(2, 12), chance.randint(2, 7), dtype, temperature)
        compared += agree(rule, case, logits, laws.Given(case.uniforms, temperature=temperature))
        accepted += len(RULES[rule][1](case, Coins(case.uniforms)).path) > 1
    assert compared > 392
    assert 80 < accepted < 360


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rules_on_a_vocabulary_of_50000_decide_as_lists_do(laws, rule, dtype):
    chance = random.Random(f"{rule}{dtype}")
    for _ in range(1 + (dtype == torch.bfloat16)):
        logits, case = logits_case(chance, rule, 50_000, 4, dtype, 1.0)
        assert agree(rule, case, logits, laws.Given(case.uniforms))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rules_on_large_vocabularies_decide_as_lists_do_many_times(laws, rule, dtype):
    chance = random.Random(f"long{rule}{dtype}")
    for _ in range(30):
        logits, case = logits_case(chance, rule, chance.choice([8_000, 50_000]), chance.randint(2, 8), dtype, 1.0)
        assert agree(rule, case, logits, laws.Given(case.uniforms))
