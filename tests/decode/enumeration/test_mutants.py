"""Thirteen ways in which speculative decoding is known to go wrong, each told from the right one by the text's law.

Each is one change to how drafts are made or accepted that keeps plausible text. The right version has a distance below
1e-12 on the very models on which the wrong one is found.
"""

import itertools

import pytest
import torch

from decode import accept as shipped
from decode.accept import Rejection, Verdict, probability_ratio, residual
from decode.tree import Draws, TokenTree

SEEDS = range(6)
CHAIN, PAIR, TRIPLE = (-1, 0, 1), (-1, 0, 0, 1, 2), (-1, 0, 0, 0)
LENGTH = 3


def distances(laws, rule, propose) -> list[float]:
    """`propose` makes a way of drafting from a drafter."""
    pairs = [laws.PAIRS["random"](seed) for seed in SEEDS]
    return [laws.distance(rule, target, propose(draft), LENGTH) for target, draft in pairs]


def check_caught(laws, right, wrong) -> None:
    """Each is (rule, how to draft)."""
    assert max(distances(laws, *right)) < 1e-12
    assert max(distances(laws, *wrong)) > 1e-3


def drawn(laws, parents, kind="without_replacement"):
    return lambda draft: laws.drafts(draft, parents, kind)


def changed(propose, change):
    """Drafts whose trees are changed after they were drawn: draft -> (context, tree) -> tree."""
    return lambda draft: (
        lambda context, depth: [
            (weight, change(tree, draft, context)) for weight, tree in propose(draft)(context, depth)
        ]
    )


def relabelled(tree: TokenTree, laws_rows, *, replacement: bool = False) -> TokenTree:
    """The same tokens, said to be all drawn, from other laws."""
    size = tree.shape.size
    return TokenTree(tree.token_ids, tree.shape, Draws(laws_rows, (False, *[True] * (size - 1)), replacement))


def test_m1_residual_drawn_from_p(laws, monkeypatch):
    right = (Rejection(), drawn(laws, CHAIN))
    assert max(distances(laws, *right)) < 1e-12
    monkeypatch.setattr(shipped, "residual", lambda p, q: p)
    assert max(distances(laws, *right)) > 1e-3


def best(q, number, place):
    """The best tokens, said to be drawn."""
    tokens = tuple(sorted(range(len(q)), key=lambda token: -q[token])[:number])
    return [(1.0, tokens, (True,) * number, q)]


@pytest.mark.parametrize("parents", [CHAIN, PAIR], ids=["m2-best-token-as-if-drawn", "m5-best-tokens-as-if-drawn"])
def test_m2_and_m5_ranked_drafts_with_the_softmax_as_their_law(laws, parents):
    points = drawn(laws, parents, lambda q, n, place: [(w, t, (False,) * n, q) for w, t, _, q in best(q, n, place)])
    check_caught(laws, (Rejection(), points), (Rejection(), drawn(laws, parents, best)))


def test_m3_drawn_tokens_discarded_when_they_are_unlikely(laws):
    def cut(tree, draft, context, *, keep: bool):
        tokens = tree.token_ids.tolist()
        unlikely = [n for n in range(1, len(tokens)) if draft(context + tuple(tokens[1:n]))[tokens[n]] < 0.2]
        return tree.cut(min([n if keep else n - 1 for n in unlikely], default=len(tokens)))

    drafts = drawn(laws, CHAIN)
    right = changed(drafts, lambda *args: cut(*args, keep=True))  # to stop behind such a token is allowed
    check_caught(laws, (Rejection(), right), (Rejection(), changed(drafts, lambda *args: cut(*args, keep=False))))


def test_m4_law_at_another_temperature_than_drawn(laws):
    def cooled(tree, draft, context):
        rows = tree.draws.probs**2 if tree.draws else torch.ones(1, 4)
        return relabelled(tree, rows / rows.sum(-1, keepdim=True))

    drafts = drawn(laws, CHAIN)
    check_caught(laws, (Rejection(), drafts), (Rejection(), changed(drafts, cooled)))


@pytest.mark.parametrize("parents", [PAIR, TRIPLE], ids=["m6-of-two", "m6b-of-three"])
def test_m6_law_not_updated_after_a_draw_without_replacement(laws, parents):
    def independent(tree, draft, context):
        return tree if tree.draws is None else relabelled(tree, tree.draws.probs, replacement=True)

    drafts = drawn(laws, parents)
    check_caught(laws, (Rejection(), drafts), (Rejection(), changed(drafts, independent)))


class FinalTokenFromP(Rejection):
    def _choose_child(self, tree, tokens, node, p, row):
        child, left = super()._choose_child(tree, tokens, node, p, row)
        return child, p if child is None else left


def test_m7_final_token_from_p_after_rejected_points(laws):
    points = drawn(laws, PAIR, "points")
    check_caught(laws, (Rejection(), points), (FinalTokenFromP(), points))


def test_m8_points_removed_without_renormalising(laws, monkeypatch):
    points = (Rejection(), drawn(laws, PAIR, "points"))
    assert max(distances(laws, *points)) < 1e-12
    monkeypatch.setattr(shipped, "without", lambda p, token: p.index_fill(0, torch.tensor(token), 0.0))
    assert max(distances(laws, *points)) > 1e-3


@pytest.mark.parametrize("keep", [2, 3])
def test_m9_drawn_siblings_reordered_or_chosen_by_their_own_law(laws, keep):
    def reranked(q, number, place):
        families = laws.without_replacement(q, keep, place)
        return [
            (weight, tuple(sorted(tokens, key=lambda token: -q[token]))[:number], flags[:number], law)
            for weight, tokens, flags, law in families
        ]

    parents = (-1, 0, 0)
    check_caught(laws, (Rejection(), drawn(laws, parents)), (Rejection(), drawn(laws, parents, reranked)))


class OwnDrawForEachPath(Rejection):
    """The longest match wins, where the target draws anew for each root-to-leaf path (Medusa's nucleus sampling)."""

    shared = False

    def _walk(self, tree, logits, row):
        tokens, found, known = tree.token_ids.tolist(), [], {}
        for leaf in range(len(tokens)):
            if tree.shape.children[leaf]:
                continue
            path = [node for node in range(len(tokens)) if tree.shape.ancestors[leaf, node]]
            for here, below in itertools.pairwise([*path, None]):
                token = (
                    known[here]
                    if here in known
                    else row.choose(logits[here], [tokens[n] for n in path[1 : path.index(here) + 1]])
                )
                if self.shared:
                    known[here] = token
                if below is None or tokens[below] != token:
                    found.append(Verdict.of(tokens, path[: path.index(here) + 1], token))
                    break
        return max(found, key=lambda verdict: len(verdict.path))


class OneDrawForEachNode(OwnDrawForEachPath):
    shared = True


def test_m10_own_draw_for_each_path(laws):
    points = drawn(laws, (-1, 0, 0, 1, 1), "points")
    check_caught(laws, (OneDrawForEachNode(), points), (OwnDrawForEachPath(), points))


class BonusFromParent(Rejection):
    """All drafts accepted, the last one after a sibling was rejected: the bonus is from what the parent had left."""

    def _walk(self, tree, logits, row):
        tokens, path = tree.token_ids.tolist(), [0]
        while True:
            p = row.probs(logits[path[-1]], [tokens[node] for node in path[1:]])
            child, left = self._choose_child(tree, tokens, path[-1], p, row)
            if child is None:
                return Verdict.of(tokens, path, row.draw(left))
            if not tree.shape.children[child] and child != tree.shape.children[path[-1]][0]:
                return Verdict.of(tokens, (*path, child), row.draw(left))
            path.append(child)


@pytest.mark.parametrize("kind", ["without_replacement", "points"])
def test_m11_bonus_from_what_the_parent_has_left(laws, kind):
    drafts = drawn(laws, PAIR, kind)
    check_caught(laws, (Rejection(), drafts), (BonusFromParent(), drafts))


class OneCoin(Rejection):
    """The coin that rejected a draft also draws from the residual, by inversion; its whole interval is enumerated."""

    def _walk(self, tree, logits, row):
        tokens = tree.token_ids.tolist()
        for node, token in enumerate(tokens[1:]):
            p, q = row.probs(logits[node], tokens[1 : node + 1]), tree.draws.probs[node]
            accept = min(1.0, probability_ratio(p, q, token))
            ends = residual(p, q).cumsum(0).tolist()
            parts = [max(0.0, end - max(accept, start)) for start, end in itertools.pairwise([0.0, *ends])]
            pick = row.outcome([accept, *parts])
            if pick:
                return Verdict.of(tokens, range(node + 1), pick - 1)
        return Verdict.of(tokens, range(len(tokens)), row.draw(row.probs(logits[len(tokens) - 1], tokens[1:])))


def test_m12_one_coin_for_acceptance_and_residual(laws):
    check_caught(laws, (Rejection(), drawn(laws, CHAIN)), (OneCoin(), drawn(laws, CHAIN)))


@pytest.mark.parametrize("mutant", ["the impossible", "without q"])
def test_other_wrong_probabilities_of_acceptance(laws, monkeypatch, mutant):
    """A floor below the ratio keeps tokens the target never says; p alone forgets what was drawn."""
    target, draft = laws.PAIRS["zeros in target"](0)
    propose = laws.drafts(draft, CHAIN, "without_replacement")
    assert laws.distance(Rejection(), target, propose, LENGTH) < 1e-12
    right = shipped.probability_ratio
    wrong = {"the impossible": lambda *args: max(right(*args), 1e-6), "without q": lambda p, q, token: float(p[token])}
    monkeypatch.setattr(shipped, "probability_ratio", wrong[mutant])
    assert laws.distance(Rejection(), target, propose, LENGTH) > 1e-8
