"""Wrong versions of block verification, of the hybrid's children and of noise, each told from the right one."""

import itertools

import pytest

from decode.accept import Block, Rejection, Verdict, probability_ratio, residual, without
from decode.tree import chain_shape

SEEDS = range(6)
CHAIN = (-1, 0, 1)
LENGTH = 3


def distances(laws, rule, kind, parents) -> list[float]:
    found = []
    for seed in SEEDS:
        target, draft = laws.PAIRS["random"](seed)
        found.append(laws.distance(rule, target, laws.drafts(draft, parents, kind), LENGTH))
    return found


class SpelledOut(Block):
    """Sun et al. 2025, algorithm 2, in its own order; `mistake` names one to make."""

    mistake = ""

    def _walk(self, tree, logits, row):
        tokens = tree.token_ids.tolist()
        length = len(tokens) - 1
        p = [row.probs(logits[node], tokens[1 : node + 1]) for node in range(length + 1)]
        q = [tree.draws.probs[node] for node in range(length)] if length else []
        ratios = [1.0]
        for i in range(length):
            ratio = ratios[-1] * probability_ratio(p[i], q[i], tokens[i + 1])
            ratios.append(ratio if self.mistake == "ratio above 1" else min(1.0, ratio))
        accepted = 0
        for i in range(1, length + 1):
            if row.flip(self._chance(p, q, ratios, i)):
                accepted = i
                if self.mistake == "first success":
                    break
            elif self.mistake == "first failure":
                break
        if accepted == length:
            return Verdict.of(tokens, range(length + 1), row.draw(p[length]))
        ratio = 1.0 if self.mistake == "residual of ratio 1" else ratios[accepted]
        return Verdict.of(tokens, range(accepted + 1), row.draw(residual(ratio * p[accepted], q[accepted])))

    def _chance(self, p, q, ratios, i):
        if i == len(q):
            return 1.0 if self.mistake == "last always" else min(1.0, ratios[i])
        mass = float((ratios[i] * p[i] - q[i]).clamp(min=0).sum())
        missing = 0.0 if self.mistake == "nothing missing" else max(0.0, 1 - ratios[i])
        return mass / (mass + missing) if mass + missing > 0 else 1.0


def test_the_papers_order_gives_the_same_law_as_ours(laws):
    target, draft = laws.PAIRS["random"](0)
    propose = laws.drafts(draft, (-1, 0, 1, 2), "without_replacement")
    ours, papers = (laws.step_law(rule, target, propose, (), 3) for rule in (Block(), SpelledOut()))
    for block in {*ours, *papers}:
        assert ours[block] == pytest.approx(papers[block], abs=1e-12)


@pytest.mark.parametrize(
    "mistake",
    ["nothing missing", "first success", "first failure", "residual of ratio 1", "last always", "ratio above 1"],
)
def test_wrong_blocks_are_caught(laws, mistake):
    rule = SpelledOut()
    assert max(distances(laws, rule, "without_replacement", CHAIN)) < 1e-12
    object.__setattr__(rule, "mistake", mistake)
    assert max(distances(laws, rule, "without_replacement", CHAIN)) > 1e-3


class PointsFirst(Rejection):
    """Exact too, with fewer accepted drafts, if the drawn child's law is normalised."""

    normalise = True

    def _choose_child(self, tree, tokens, node, p, row):
        children = tree.shape.children[node]
        q = None if tree.draws is None else tree.draws.probs[node].clone()
        for child in children[:-1]:
            if row.flip(float(p[tokens[child]])):
                return child, p
            p = without(p, tokens[child])
            q = without(q, tokens[child]) if self.normalise else q.index_fill(0, tree.token_ids[child], 0.0)
        for child in children[-1:]:
            if row.flip(min(1.0, probability_ratio(p, q, tokens[child]))):
                return child, p
            p = residual(p, q)
        return None, p


class PointsFirstNotNormalised(PointsFirst):
    normalise = False


def hybrid(laws, *, carry: str, draw: str):
    """The hybrid's children, drawn from one law (all tokens or the others) and said to be from another."""

    def choose(q, number, place):
        right = laws.hybrid(q, number, place)
        points, others = right[0][1][:-1], right[0][3]
        kinds = {"all": q, "others": others}
        kinds["not normalised"] = tuple(0.0 if token in points else mass for token, mass in enumerate(q))
        return [
            (weight, points + tokens, right[0][2], kinds[carry])
            for weight, tokens in laws.sequences(kinds[draw], 1, replacement=False)
        ]

    return choose


@pytest.mark.parametrize("parents", [(-1, 0, 0), (-1, 0, 0, 0)], ids=["of-two", "of-three"])
def test_points_first_is_right_only_with_a_normalised_law(laws, parents):
    kind = hybrid(laws, carry="all", draw="others")
    assert max(distances(laws, PointsFirst(), kind, parents)) < 1e-12
    assert max(distances(laws, PointsFirstNotNormalised(), kind, parents)) > 1e-3
    target, draft = laws.PAIRS["random"](0)
    first, last = (
        laws.accepted(rule, target, laws.drafts(draft, parents, "hybrid"), 1) for rule in (PointsFirst(), Rejection())
    )
    assert first < last


@pytest.mark.parametrize("parents", [(-1, 0, 0), (-1, 0, 0, 1, 1, 2, 2)], ids=["one-level", "two-levels"])
@pytest.mark.parametrize(("carry", "draw"), [("others", "all"), ("all", "others"), ("not normalised", "others")])
def test_hybrids_drawn_from_another_law_than_they_carry_are_caught(laws, parents, carry, draw):
    for law in ("others", "all"):  # all tokens is exact as well, if it is what was drawn from
        assert max(distances(laws, Rejection(), hybrid(laws, carry=law, draw=law), parents)) < 1e-12
    assert max(distances(laws, Rejection(), hybrid(laws, carry=carry, draw=draw), parents)) > 1e-3


def positional(laws, rule, target, draft, width: int) -> float:
    """Distance if the draft of a position is one draw, however often the position is drafted (a Medusa head's law)."""
    total: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(4), repeat=LENGTH - 1):
        weight = 1.0
        for position, token in enumerate(tokens):
            weight *= draft((0,) * position)[token]
        laws_of = [draft((0,) * position) for position in range(LENGTH)]

        def propose(context, depth, tokens=tokens, laws_of=laws_of):
            start, size = len(context), min(depth, width) + 1
            chain = [laws.ROOT, *tokens[start : start + size - 1]]
            tree = laws.make_tree(
                chain_shape(size), chain, [False] + [True] * (size - 1), laws_of[start:][:size], False
            )
            return [(1.0, tree)]

        for text, probability in laws.text_law(rule, target, propose, LENGTH).items():
            total[text] = total.get(text, 0.0) + weight * probability
    distance = 0.0
    for text in itertools.product(range(4), repeat=LENGTH):
        own = target(())[text[0]] * target(text[:1])[text[1]] * target(text[:2])[text[2]]
        distance += abs(total.get(text, 0.0) - own) / 2
    return distance


def test_a_block_may_not_meet_the_noise_of_drafts_it_dropped(laws):
    """Drafts drawn anew for each position, not for each step: token by token that is exact, for blocks it is not."""
    pairs = [laws.PAIRS["random"](seed) for seed in SEEDS]
    assert max(positional(laws, Rejection(), *pair, 2) for pair in pairs) < 1e-12
    assert max(positional(laws, Block(), *pair, 1) for pair in pairs) < 1e-12  # nothing is looked at and dropped
    assert max(positional(laws, Block(), *pair, 2) for pair in pairs) > 1e-3
