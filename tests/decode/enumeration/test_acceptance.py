"""How many drafts are accepted: the closed forms of the papers, the order of the rules, and the ends of the scale."""

import itertools

import pytest

from decode.accept import Block, Match, Rejection

CHAIN = (-1, 0, 1, 2)
SEEDS = range(6)
BLOCK_TOY = {2: 11 / 9, 3: 1.667, 4: 2.049}  # Sun et al. 2025, section 1: p = (1/3, 2/3), q = (2/3, 1/3)
TOKEN_TOY = {2: 10 / 9, 3: 1.407, 4: 1.605}


def overlap(p, q) -> float:
    return sum(map(min, p, q))


def normalised(row) -> list[float]:
    return [mass / (sum(row) or 1.0) for mass in row]


def left_of(p, q) -> list[float]:
    return normalised([max(a - b, 0.0) for a, b in zip(p, q, strict=True)])


def chain_formula(target, draft, length: int, context=()) -> float:
    """Leviathan et al. 2023: a token is drafted and accepted with min(p, q), and the chain goes on."""
    if length == 0:
        return 0.0
    p, q = target(context), draft(context)
    return sum(min(p[x], q[x]) * (1 + chain_formula(target, draft, length - 1, (*context, x))) for x in range(len(p)))


def without_replacement_formula(p, q, number: int) -> float:
    """P(one of the draws is accepted): the first one, or, for each rejected first draw, one of the others."""
    if number == 0 or sum(q) == 0:
        return 0.0
    found = overlap(p, q)
    for x, mass in enumerate(q):
        rejected = mass - min(p[x], mass)
        if rejected > 0:
            rest = normalised([0.0 if y == x else other for y, other in enumerate(q)])
            found += rejected * without_replacement_formula(left_of(p, q), rest, number - 1)
    return found


def with_replacement_formula(p, q, number: int) -> float:
    missed = 1.0
    for _ in range(number):
        missed *= 1 - overlap(p, q)
        p = left_of(p, q)
    return 1 - missed


def hybrid_formula(p, q, number: int) -> float:
    """Hu et al. 2025: the mass of the best tokens, and the overlap with the law of the drawn one."""
    best = sorted(range(len(q)), key=lambda x: -q[x])[: number - 1]
    others = normalised([0.0 if x in best else mass for x, mass in enumerate(q)])
    return sum(p[x] for x in best) + sum(min(p[x], others[x]) for x in range(len(p)) if x not in best)


def star(children: int) -> tuple[int, ...]:
    return (-1, *[0] * children)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_chain_is_accepted_as_leviathan_say(laws, seed):
    target, draft = laws.PAIRS["random"](seed)
    for length in (1, 2, 3):
        drafts = laws.drafts(draft, CHAIN, "without_replacement")
        assert laws.accepted(Rejection(), target, drafts, length) == pytest.approx(chain_formula(target, draft, length))


@pytest.mark.parametrize("pair", ["random", "zeros in draft", "zeros in target", "ties"])
@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("without_replacement", without_replacement_formula),
        ("with_replacement", with_replacement_formula),
        ("hybrid", hybrid_formula),
    ],
)
def test_siblings_are_accepted_as_their_papers_say(laws, pair, kind, formula):
    for seed, children in itertools.product(SEEDS, (1, 2, 3, 4)):
        target, draft = laws.PAIRS[pair](seed)
        found = laws.accepted(Rejection(), target, laws.drafts(draft, star(children), kind), 1)
        assert found == pytest.approx(formula(list(target(())), list(draft(())), children), abs=1e-12)


def test_fixed_trees_are_accepted_with_the_targets_probability_of_their_paths(laws):
    """No rule can do better on a fixed tree: an accepted path begins the text."""
    for seed in SEEDS:
        target, draft = laws.PAIRS["random"](seed)
        propose = laws.drafts(draft, (-1, 0, 0, 1, 1, 2), "points")
        ((_, tree),) = propose((), 2)
        paths = laws.paths_of(tree.token_ids.tolist(), tree.shape.parents)
        bound = sum(target(())[path[0]] * (target(path[:1])[path[1]] if len(path) == 2 else 1) for path in paths[1:])
        for rule in (Rejection(), Match()):
            assert laws.accepted(rule, target, propose, 2) == pytest.approx(bound)
        chain = laws.drafts(draft, (-1, 0, 1), "points")
        rates = [laws.accepted(rule, target, chain, 2) for rule in (Rejection(), Match(), Block())]
        assert rates == pytest.approx([rates[0]] * 3)


def test_matching_a_drawn_token_wastes_what_its_law_could_say(laws):
    for seed in SEEDS:
        target, draft = laws.PAIRS["random"](seed)
        drafts = laws.drafts(draft, (-1, 0), "without_replacement")
        match = laws.accepted(Match(), target, drafts, 1)
        assert match == pytest.approx(sum(p * q for p, q in zip(target(()), draft(()), strict=True)))
        assert match < laws.accepted(Rejection(), target, drafts, 1)


@pytest.mark.parametrize("pair", ["random", "close", "zeros in draft", "zeros in target", "disjoint", "ties"])
@pytest.mark.parametrize("kind", ["without_replacement", "mixed_nodes"])
def test_a_block_accepts_no_fewer_tokens_and_as_many_of_one(laws, pair, kind):
    gained = 0.0
    for seed, length in itertools.product(SEEDS, (1, 2, 3)):
        target, draft = laws.PAIRS[pair](seed)
        block, token = (
            laws.accepted(rule, target, laws.drafts(draft, CHAIN, kind), length) for rule in (Block(), Rejection())
        )
        assert block >= token - 1e-12
        if length == 1:
            assert block == pytest.approx(token)
        gained = max(gained, block - token)
    assert gained > 0.02 or pair == "disjoint"


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_block_accepts_what_its_paper_says_of_its_toy(laws, length):
    def target(context):
        return (1 / 3, 2 / 3)

    drafts = laws.drafts(lambda context: (2 / 3, 1 / 3), tuple(range(-1, length)), "without_replacement")
    assert laws.accepted(Block(), target, drafts, length) == pytest.approx(BLOCK_TOY[length], abs=5e-4)
    assert laws.accepted(Rejection(), target, drafts, length) == pytest.approx(TOKEN_TOY[length], abs=5e-4)
    assert laws.distance(Block(), target, drafts, length + 1) < 1e-12


@pytest.mark.parametrize("pair", ["equal", "top-1"])
@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=["rejection", "block"])
@pytest.mark.parametrize("kind", ["without_replacement", "with_replacement", "hybrid"])
def test_drafts_of_the_target_itself_are_all_accepted(laws, pair, rule, kind):
    for seed in SEEDS:
        target, draft = laws.PAIRS[pair](seed)
        assert laws.accepted(rule, target, laws.drafts(draft, CHAIN, kind), 3) == pytest.approx(3, abs=1e-12)


@pytest.mark.parametrize("pair", ["random", "close", "zeros in target", "one-hot target", "ties"])
def test_all_tokens_without_replacement_are_always_enough(laws, pair):
    for seed in SEEDS:
        target, draft = laws.PAIRS[pair](seed)
        drafts = laws.drafts(draft, star(4), "without_replacement")
        assert laws.accepted(Rejection(), target, drafts, 1) == pytest.approx(1, abs=1e-12)
        assert laws.accepted(Rejection(), target, laws.drafts(draft, star(4), "hybrid"), 1) == pytest.approx(1)


def test_disjoint_drafts_are_never_accepted(laws):
    target, draft = laws.PAIRS["disjoint"](0)
    for rule, kind in ((Rejection(), "without_replacement"), (Rejection(), "hybrid"), (Block(), "without_replacement")):
        parents = (-1, 0) if rule == Block() else star(2)
        assert laws.accepted(rule, target, laws.drafts(draft, parents, kind), 1) == 0


def test_the_hybrid_accepts_most_of_the_ways_to_draft_siblings(laws):
    """On average, as Hu et al. 2025 report; the order is why the hybrid is there."""
    rates = {}
    for kind in ("hybrid", "without_replacement", "with_replacement"):
        pairs = [laws.PAIRS["random"](seed) for seed in range(20)]
        rates[kind] = sum(laws.accepted(Rejection(), t, laws.drafts(d, star(2), kind), 1) for t, d in pairs)
    assert rates["hybrid"] > rates["without_replacement"] > rates["with_replacement"]
