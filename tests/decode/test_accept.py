"""Both acceptance rules, over every branch of chance with its exact probability: the emitted text has the target's law.

The rules see chance through `flip`, `draw` and `choose` only. `Branch` replays one sequence of outcomes and notes the
others, so `step_law` visits all of them, the drafts' own draws included. Tables are context-dependent, of four tokens.
"""

import itertools
from collections import defaultdict

import pytest
import torch

from decode import Match, Rejection, Sampling
from decode import accept as accept_module
from decode.tree import TokenTree, tree_shape

V = 4
ROOT = 2


class Branch:
    """One path through all outcomes: replays `script`, then takes the first outcome and notes the rest."""

    sampling = Sampling(temperature=1.0, seed=0)

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.weight = script, [], 1.0
        self.others: list[list[int]] = []
        self.target = None
        self.context: tuple[int, ...] = ()

    def outcome(self, weights: list[float]) -> int:
        if len(self.taken) < len(self.script):
            pick = self.script[len(self.taken)]
        else:
            possible = [i for i, weight in enumerate(weights) if weight > 0]
            pick = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(pick)
        self.weight *= weights[pick]
        return pick

    def probs(self, logits: torch.Tensor, path) -> torch.Tensor:
        assert torch.equal(logits, self.target(self.context + tuple(path)))  # the row of this very node
        return logits.clone()

    def choose(self, logits: torch.Tensor, path) -> int:
        return self.outcome(self.probs(logits, path).tolist())

    def flip(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return self.outcome([1 - probability, probability]) == 1

    def draw(self, weights: torch.Tensor) -> int:
        assert (weights >= 0).all()
        return self.outcome((weights / weights.sum()).tolist())


def draw_tree(branch: Branch, draft, branching: tuple[int, ...], kind: str) -> TokenTree:
    """Fill a tree whose nodes at depth d have `branching[d]` children each."""
    tokens, parents, paths, rows = [ROOT], [-1], [()], []
    for node in itertools.count():
        if node == len(tokens):
            break
        q = draft(branch.context + paths[node]).clone()
        rows.append(q.clone())
        for child in range(branching[len(paths[node])] if len(paths[node]) < len(branching) else 0):
            if kind == "points":  # fixed, in no particular order
                token = (3 * child + len(paths[node]) + sum(paths[node])) % V
            elif q.sum() > 0:
                token = branch.outcome((q / q.sum()).tolist())
            else:  # more children than tokens with a probability
                token = next(
                    t for t in range(V) if t not in [paths[n][-1] for n in range(len(tokens)) if parents[n] == node]
                )
            q[token] = 0
            tokens.append(token)
            parents.append(node)
            paths.append((*paths[node], token))
    return TokenTree(torch.tensor(tokens), tree_shape(tuple(parents)), None if kind == "points" else torch.stack(rows))


def step_law(rule, target, draft, branching, kind, context) -> dict[tuple[int, ...], float]:
    """Probability of every block that one step can emit after `context`."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        branch = Branch(scripts.pop())
        branch.target, branch.context = target, context
        tree = draw_tree(branch, draft, branching, kind)
        tokens, parents = tree.token_ids.tolist(), tree.shape.parents
        logits = []
        for node in range(len(tokens)):
            path = []
            while node:
                path.insert(0, tokens[node])
                node = parents[node]
            logits.append(target(context + tuple(path)))
        (verdict,) = rule([tree], torch.stack(logits)[None], [branch])
        assert verdict.path[0] == 0
        assert all(parents[b] == a for a, b in itertools.pairwise(verdict.path))
        law[(*(tokens[node] for node in verdict.path[1:]), verdict.next_token)] += branch.weight
        scripts += branch.others
    assert abs(sum(law.values()) - 1) < 1e-12
    return law


def text_law(rule, target, draft, branching, kind, length, context=()) -> dict[tuple[int, ...], float]:
    """Law of the first `length` tokens, by steps; trees are cut as the loop cuts them near the end."""
    if len(context) == length:
        return {context: 1.0}
    law: dict[tuple[int, ...], float] = defaultdict(float)
    steps = step_law(rule, target, draft, branching[: length - len(context) - 1], kind, context)
    for block, probability in steps.items():
        for text, rest in text_law(rule, target, draft, branching, kind, length, context + block).items():
            law[text] += probability * rest
    return law


def distance(rule, target, draft, branching, kind, length) -> float:
    """Total variation between the emitted law and the target's own."""
    law = text_law(rule, target, draft, branching, kind, length)
    total = 0.0
    for text in itertools.product(range(V), repeat=length):
        own = 1.0
        for i, token in enumerate(text):
            own *= float(target(text[:i])[token])
        total += abs(law.get(text, 0.0) - own) / 2
    return total


def table(seed: int, support=None, spread: float = 1.5):
    """A random context-dependent language model; `support(context)` lists the tokens with a probability."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}

    def probs(context: tuple[int, ...]) -> torch.Tensor:
        if context not in rows:
            number = sum((token + 1) * 5**i for i, token in enumerate(context))
            generator = torch.Generator().manual_seed(1000 * seed + number)
            row = (spread * torch.randn(V, generator=generator, dtype=torch.float64)).exp()
            for token in range(V):
                if support is not None and token not in support(context):
                    row[token] = 0
            rows[context] = row / row.sum()
        return rows[context]

    return probs


PAIRS = {
    "random": lambda seed: (table(seed), table(seed + 50)),
    "close": lambda seed: (table(seed, spread=0.3), table(seed + 50, spread=0.3)),
    "equal": lambda seed: (table(seed), table(seed)),
    "one-hot target": lambda seed: (table(seed, lambda c: [(len(c) + sum(c)) % V]), table(seed + 50)),
    "one-hot draft": lambda seed: (table(seed), table(seed + 50, lambda c: [sum(c) % V])),
    "disjoint": lambda seed: (table(seed, lambda c: [0, 3]), table(seed + 50, lambda c: [1, 2])),
    "zeros in draft": lambda seed: (table(seed), table(seed + 50, lambda c: [0, 1, 3])),
    "zeros in target": lambda seed: (table(seed, lambda c: [1, 2, 3]), table(seed + 50)),
}
SHAPES = {
    "chain 1": ((1,), 3),
    "chain 2": ((1, 1), 3),
    "chain 3": ((1, 1, 1), 4),
    "2": ((2,), 3),
    "3": ((3,), 2),
    "4": ((4,), 2),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_rejection_of_drawn_drafts_has_the_targets_law(pair, shape, seed):
    branching, length = SHAPES[shape]
    assert distance(Rejection(), *PAIRS[pair](seed), branching, "drawn", length) < 1e-12


@pytest.mark.parametrize(
    ("branching", "pair"), [((2, 2), "random"), ((3, 1), "random"), ((2, 2), "zeros in draft"), ((3, 1), "close")]
)
def test_rejection_of_trees_drawn_without_replacement_has_the_targets_law(branching, pair):
    assert distance(Rejection(), *PAIRS[pair](3), branching, "drawn", 3) < 1e-12


@pytest.mark.parametrize("rule", [Rejection(), Match()], ids=["rejection", "match"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("branching", [(1,), (2, 2), (3, 2), (4, 1), (1, 1, 1), (6,)], ids=str)
def test_trees_of_point_masses_have_the_targets_law(rule, pair, branching):
    for seed in range(6 if branching == (2, 2) else 2):
        assert distance(rule, *PAIRS[pair](seed), branching, "points", 3) < 1e-12


@pytest.mark.parametrize("branching", [(1, 1), (2,), (4,)])
def test_match_of_drawn_drafts_has_the_targets_law(branching):
    for seed in range(3):
        assert distance(Match(), table(seed), table(seed + 50), branching, "drawn", 3) < 1e-12


def accepted(rule, target, draft, branching, kind) -> float:
    return sum(
        (len(block) - 1) * weight for block, weight in step_law(rule, target, draft, branching, kind, ()).items()
    )


def test_acceptance_is_what_theory_says():
    for seed in range(6):
        target, draft = table(seed), table(seed + 50)
        p, q = target(()), draft(())
        overlap = float(torch.minimum(p, q).sum())
        assert accepted(Rejection(), target, draft, (1,), "drawn") == pytest.approx(overlap)
        points = [(3 * child) % V for child in range(2)]
        for rule in (Rejection(), Match()):
            assert accepted(rule, target, draft, (2,), "points") == pytest.approx(float(p[points].sum()))
        assert accepted(Match(), target, draft, (1,), "drawn") == pytest.approx(float((p * q).sum()))
        assert accepted(Rejection(), target, draft, (2,), "drawn") > overlap
        assert accepted(Rejection(), target, target, (1, 1, 1), "drawn") == pytest.approx(3)
        assert accepted(Rejection(), target, draft, (4,), "drawn") == pytest.approx(1)


def residual_of_p(p, q, token):
    return p, accept_module_after(p, q, token)[1]


def draft_not_updated(p, q, token):
    return accept_module_after(p, q, token)[0], q


def point_not_renormalised(p, q, token):
    residual = p.clone()
    residual[token] = 0
    return (residual, None) if q is None else accept_module_after(p, q, token)


def point_not_removed(p, q, token):
    return (p, None) if q is None else accept_module_after(p, q, token)


accept_module_after = accept_module._after_rejection
accept_module_probability = accept_module._accept_probability


def accepts_the_impossible(p, q, token):
    return max(accept_module_probability(p, q, token), 1e-6)


def forgets_q(p, q, token):
    return accept_module_probability(p, None, token)


@pytest.mark.parametrize(
    ("name", "mutant", "branching", "kind"),
    [
        ("_after_rejection", residual_of_p, (1,), "drawn"),
        ("_after_rejection", residual_of_p, (1, 1), "drawn"),
        ("_after_rejection", draft_not_updated, (2,), "drawn"),
        ("_after_rejection", draft_not_updated, (3,), "drawn"),
        ("_after_rejection", point_not_renormalised, (2,), "points"),
        ("_after_rejection", point_not_removed, (1,), "points"),
        ("_accept_probability", accepts_the_impossible, (1,), "drawn"),
        ("_accept_probability", accepts_the_impossible, (4,), "points"),
        ("_accept_probability", forgets_q, (1,), "drawn"),
    ],
)
def test_known_wrong_variants_are_caught(monkeypatch, name, mutant, branching, kind):
    pairs = [PAIRS["random"](seed) for seed in range(3)] + [PAIRS["zeros in target"](0)]
    assert max(distance(Rejection(), *pair, branching, kind, 3) for pair in pairs) < 1e-12
    monkeypatch.setattr(accept_module, name, mutant)
    assert max(distance(Rejection(), *pair, branching, kind, 3) for pair in pairs) > 1e-8


class BonusFromParent(Rejection):
    """Takes the token after a whole path from the distribution above its last node (an EAGLE bug)."""

    def __call__(self, trees, logits, rows):
        (verdict,) = super().__call__(trees, logits, rows)
        if len(verdict.path) > 1 and not trees[0].shape.children[verdict.path[-1]]:
            return [verdict._replace(next_token=rows[0].outcome(logits[0, verdict.path[-2]].tolist()))]
        return [verdict]


def test_a_bonus_from_the_wrong_node_is_caught():
    assert distance(BonusFromParent(), *PAIRS["random"](0), (1,), "drawn", 3) > 1e-2
