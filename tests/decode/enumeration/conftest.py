"""The oracle of exactness: all outcomes of chance are visited, each with its probability, and make the text's law.

Rules see chance through `flip`, `draw` and `choose` only, so `Branch` can replay one sequence of outcomes and note the
others. Drafts are enumerated too: a way of drafting is a function (context, depth) -> [(probability, tree)]. Targets
and drafters are context-dependent tables of four tokens.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from decode import Sampling
from decode.sampling import Sampler
from decode.tree import Draws, TokenTree, tree_shape

ROOT = 2
Table = Callable[[tuple[int, ...]], tuple[float, ...]]
Propose = Callable[[tuple[int, ...], int], list[tuple[float, TokenTree]]]


def table(seed: int, support=None, *, spread: float = 1.5, vocab_size: int = 4, ties: bool = False) -> Table:
    """A random language model; `support(context, row)` lists the tokens that keep their probability."""

    @cache
    def probs(context: tuple[int, ...]) -> tuple[float, ...]:
        number = sum((token + 1) * (vocab_size + 1) ** i for i, token in enumerate(context))
        generator = torch.Generator().manual_seed(1000 * seed + number)
        row = (spread * torch.randn(vocab_size, generator=generator, dtype=torch.float64)).exp()
        if ties:
            row = torch.randint(1, 3, (vocab_size,), generator=generator).double()
        if support is not None:
            row[[token for token in range(vocab_size) if token not in support(context, row)]] = 0
        return tuple((row / row.sum()).tolist())

    return probs


def best(context, row) -> list[int]:
    return [int(row.argmax())]


PAIRS: dict[str, Callable[[int], tuple[Table, Table]]] = {
    "random": lambda seed: (table(seed), table(seed + 50)),
    "close": lambda seed: (table(seed, spread=0.3), table(seed + 50, spread=0.3)),
    "equal": lambda seed: (table(seed), table(seed)),
    "one-hot target": lambda seed: (table(seed, lambda c, _: [(len(c) + sum(c)) % 4]), table(seed + 50)),
    "one-hot draft": lambda seed: (table(seed), table(seed + 50, lambda c, _: [sum(c) % 4])),
    "disjoint": lambda seed: (table(seed, lambda *_: [0, 3]), table(seed + 50, lambda *_: [1, 2])),
    "zeros in draft": lambda seed: (table(seed), table(seed + 50, lambda *_: [0, 1, 3])),
    "zeros in target": lambda seed: (table(seed, lambda *_: [1, 2, 3]), table(seed + 50)),
    "top-1": lambda seed: (table(seed, best), table(seed, best)),
    "top-1 target": lambda seed: (table(seed, best), table(seed)),
    "ties": lambda seed: (table(seed, ties=True), table(seed + 50, ties=True)),
}


@cache
def as_tensor(row: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(row, dtype=torch.float64)


class Branch:
    """One path through all outcomes: replays `script`, then takes the first outcome and notes the rest."""

    sampling = Sampling(temperature=1.0, seed=0)

    def __init__(self, script: list[int], target: Table, context: tuple[int, ...]) -> None:
        self.script, self.taken, self.weight = script, [], 1.0
        self.others: list[list[int]] = []
        self.target, self.context = target, context

    def outcome(self, weights: Sequence[float]) -> int:
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
        assert tuple(logits.tolist()) == self.target(self.context + tuple(path))  # the row of this very node
        return logits.clone()

    def choose(self, logits: torch.Tensor, path) -> int:
        return self.outcome(self.probs(logits, path).tolist())

    def flip(self, probability: float) -> bool:
        assert 0 <= probability <= 1 + 1e-12
        probability = min(probability, 1.0)
        return self.outcome([1 - probability, probability]) == 1

    def draw(self, weights: torch.Tensor) -> int:
        row = weights.tolist()
        total = sum(row)
        assert min(row) >= 0
        assert total > 0
        return self.outcome([weight / total for weight in row])


class Given(Sampler):
    """The shipped source of chance with given uniforms; `as_probs` takes logits for the law itself."""

    def __init__(self, uniforms: Sequence[float], *, as_probs: bool = False, **settings) -> None:
        super().__init__(Sampling(**{"temperature": 1.0, "seed": 0, **settings}), 0, [ROOT])
        self.uniforms, self.as_probs = uniforms, as_probs

    def probs(self, logits: torch.Tensor, path) -> torch.Tensor:
        return logits.double() if self.as_probs else super().probs(logits, path)

    def choose(self, logits: torch.Tensor, path) -> int:
        return self.draw(self.probs(logits, path))

    def _coin(self) -> float:
        self._coins += 1
        return self.uniforms[self._coins - 1]


Family = tuple[float, tuple[int, ...], tuple[bool, ...], tuple[float, ...]]
"""A node's children: probability, tokens, which of them were drawn, and the law the tree says they were drawn from."""


def sequences(q: Sequence[float], number: int, *, replacement: bool) -> list[tuple[float, tuple[int, ...]]]:
    """All draws of `number` tokens with their probabilities; what follows an exhausted law is arbitrary."""
    if number == 0 or sum(q) == 0:
        return [(1.0, tuple(range(number)))]
    found = []
    for token, mass in enumerate(q):
        if mass > 0:
            left = q if replacement else (*q[:token], 0.0, *q[token + 1 :])
            rest = sequences(left, number - 1, replacement=replacement)
            found += [(mass / sum(q) * weight, (token, *tokens)) for weight, tokens in rest]
    return found


def without_replacement(q, number: int, place) -> list[Family]:
    return [(weight, tokens, (True,) * number, q) for weight, tokens in sequences(q, number, replacement=False)]


def with_replacement(q, number: int, place) -> list[Family]:
    return [(weight, tokens, (True,) * number, q) for weight, tokens in sequences(q, number, replacement=True)]


def hybrid(q, number: int, place) -> list[Family]:
    """The best tokens as points and, last, one drawn from the others."""
    points = tuple(sorted(range(len(q)), key=lambda token: (-q[token], token))[: number - 1])
    others = [0.0 if token in points else mass for token, mass in enumerate(q)]
    law = tuple(mass / (sum(others) or 1.0) for mass in others)
    flags = (False,) * (number - 1) + (True,)
    return [(weight, (*points, *tokens), flags, law) for weight, tokens in sequences(law, 1, replacement=False)]


def points(q, number: int, place) -> list[Family]:
    """Looked up, in no particular order; the row of the law is not theirs."""
    return [(1.0, tuple((3 * rank + len(place) + sum(place)) % len(q) for rank in range(number)), (False,) * number, q)]


def mixed_siblings(q, number: int, place) -> list[Family]:
    """Every second one looked up, which may be a token that another sibling drew."""
    flags = tuple(rank % 2 == 0 for rank in range(number))
    found = []
    for weight, drawn in sequences(q, sum(flags), replacement=False):
        tokens = (drawn[rank // 2] if rank % 2 == 0 else (rank + sum(place)) % len(q) for rank in range(number))
        found.append((weight, tuple(tokens), flags, q))
    return found


def mixed_nodes(q, number: int, place) -> list[Family]:
    return (points if (len(place) + sum(place)) % 2 else without_replacement)(q, number, place)


KINDS = {f.__name__: f for f in (without_replacement, with_replacement, hybrid, points, mixed_siblings, mixed_nodes)}


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def make_tree(shape, tokens, drawn, laws, replacement: bool) -> TokenTree:
    draws = Draws(torch.tensor(laws, dtype=torch.float64), tuple(drawn), replacement) if any(drawn) else None
    return TokenTree(torch.tensor(tokens), shape, draws)


def drafts(draft: Table, parents: tuple[int, ...], kind, *, shared: bool = False) -> Propose:
    """Draft trees of one shape (nodes in order of depth and parent), each node from the law of its own context.

    Args:
        draft: The drafter.
        parents: The shape; deeper nodes than a step may use are left out.
        kind: How a node's children are chosen: one of `KINDS`, or a function like them.
        shared: All nodes of a depth have one law and one set of draws, as with Medusa's heads.
    """
    choose = KINDS.get(kind, kind)
    replacement = choose is with_replacement

    def propose(context: tuple[int, ...], depth: int) -> list[tuple[float, TokenTree]]:
        shape = tree_shape(parents).prefix(depth)
        found = [(1.0, (ROOT,), (False,), (), {})]  # probability, tokens, drawn, laws, what each depth has drawn
        for node, children in enumerate(shape.children):
            grown = []
            for weight, tokens, drawn, laws, known in found:
                place = shape.depths[node] * (0,) if shared else paths_of(tokens, parents[: len(tokens)])[node]
                law = draft(context + place)
                if not children:
                    families = [(1.0, (), (), law)]
                else:
                    families = [known[place]] if place in known else choose(law, len(children), place)
                for family in families:
                    probability, new, flags, carried = family
                    seen = {**known, place: (1.0, *family[1:])} if shared and children else known
                    grown.append((weight * probability, tokens + new, drawn + flags, (*laws, carried), seen))
            found = grown
        return [(weight, make_tree(shape, *rest, replacement)) for weight, *rest, _ in found]

    return propose


def verdicts(rule, tree: TokenTree, target: Table, context: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All blocks that a rule may emit for this tree, with their probabilities."""
    tokens, parents = tree.token_ids.tolist(), tree.shape.parents
    logits = torch.stack([as_tensor(target(context + path)) for path in paths_of(tokens, parents)])
    scripts: list[list[int]] = [[]]
    while scripts:
        branch = Branch(scripts.pop(), target, context)
        ((path, (*_, token)),) = rule([tree], logits[None], [branch])
        assert path[0] == 0
        assert all(parents[b] == a for a, b in itertools.pairwise(path))
        yield branch.weight, (*(tokens[node] for node in path[1:]), token)
        scripts += branch.others


def step_law(rule, target: Table, propose: Propose, context: tuple[int, ...], depth: int) -> dict:
    """Probability of every block that one step can emit after `context`."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, tree in propose(context, depth):
        for probability, block in verdicts(rule, tree, target, context):
            law[block] += weight * probability
    assert abs(sum(law.values()) - 1) < 1e-12
    return law


def text_law(rule, target: Table, propose: Propose, length: int) -> dict:
    """Law of the first `length` tokens, by steps; like the loop, a step never drafts beyond the end."""
    reached: list[dict] = [defaultdict(float) for _ in range(length + 1)]
    reached[0][()] = 1.0
    for start in range(length):
        for context, weight in reached[start].items():
            for block, probability in step_law(rule, target, propose, context, length - start - 1).items():
                reached[start + len(block)][context + block] += weight * probability
    return reached[length]


def distance(rule, target: Table, propose: Propose, length: int) -> float:
    """Total variation between the emitted law and the target's own."""
    law = text_law(rule, target, propose, length)
    total = 0.0
    for text in itertools.product(range(len(target(()))), repeat=length):
        own = 1.0
        for i, token in enumerate(text):
            own *= target(text[:i])[token]
        total += abs(law.get(text, 0.0) - own) / 2
    return total


def accepted(rule, target: Table, propose: Propose, depth: int) -> float:
    """Expected number of accepted tokens of one step."""
    law = step_law(rule, target, propose, (), depth)
    return sum((len(block) - 1) * weight for block, weight in law.items())


@pytest.fixture(scope="session")
def laws() -> SimpleNamespace:
    """The functions above, for test files (test folders are no packages)."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if name.isidentifier()})
