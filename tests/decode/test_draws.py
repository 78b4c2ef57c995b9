"""Drafts are drawn from what their tree says, independently where it says so; thousands of seeds, one call."""

import itertools

import pytest
import torch

from decode import Chain, Sampling, StaticTree
from decode.children import Children
from decode.sampling import Sampler

V = 5
DRAWS = 4000
LOGITS = torch.tensor([0.0, 1.2, -0.7, 0.4, -1.5], dtype=torch.float64)
VOCABULARY = torch.tensor([1, 4, 6, 7, 11])
RANDOM = ["without_replacement", "with_replacement", "hybrid"]


class FixedDrafter:
    """The same logits at every node, but turned by one token at each depth."""

    max_depth = 3

    def __init__(self, rows: int, vocabulary: torch.Tensor | None = None) -> None:
        self.rows, self.vocabulary = rows, vocabulary
        self.vocab_size = V if vocabulary is None else 13
        self.depth = 0

    def extend(self, token_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        self.depth += 1
        return LOGITS.roll(self.depth).expand(self.rows, 1, V)


def grown(grow: StaticTree, *, context=(1,), temperature: float = 1.0, vocabulary=None, rows=None, shared=False):
    """Trees of `DRAWS` seeds."""
    if rows is None:
        rows = [Sampler(Sampling(temperature=temperature, seed=seed), 0, context) for seed in range(DRAWS)]
    roots = torch.full((len(rows),), 1)
    return grow(FixedDrafter(len(rows), vocabulary), LOGITS.expand(len(rows), V), roots, rows, shared_noise=shared)


def tokens_of(trees) -> torch.Tensor:
    return torch.stack([tree.token_ids[1:] for tree in trees])


def law(depth: int = 1, temperature: float = 1.0) -> torch.Tensor:
    return (LOGITS.roll(depth - 1) / temperature).softmax(0)


def check_joint(oracles, first: torch.Tensor, second: torch.Tensor, expected: torch.Tensor) -> None:
    """Pairs of tokens against their joint law [V, V]."""
    counts = torch.zeros(V, V).index_put((first, second), torch.ones(len(first)), accumulate=True)
    assert counts[expected == 0].sum() == 0
    assert oracles.chi_square_p(counts.flatten(), expected.flatten() * len(first)) > 1e-6


def test_draws_without_replacement_leave_out_those_before(oracles):
    tokens = tokens_of(grown(StaticTree(((0,), (1,), (2,)), draw="without_replacement")))
    p = law()
    pairs, later = torch.zeros(V, V, dtype=torch.float64), torch.zeros(V, V, dtype=torch.float64)
    for a, b, c in itertools.permutations(range(V), 3):
        weight = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
        pairs[a, b] += weight
        later[b, c] += weight
    check_joint(oracles, tokens[:, 0], tokens[:, 1], pairs)
    check_joint(oracles, tokens[:, 1], tokens[:, 2], later)


def test_draws_with_replacement_are_independent_and_may_repeat(oracles):
    tokens = tokens_of(grown(StaticTree(((0,), (1,), (2,)), draw="with_replacement")))
    for first, second in itertools.combinations(range(3), 2):
        check_joint(oracles, tokens[:, first], tokens[:, second], torch.outer(law(), law()))
    assert (tokens[:, 0] == tokens[:, 1]).float().mean() > 0.2


def test_the_hybrid_is_the_best_and_one_drawn_from_the_others(oracles):
    trees = grown(StaticTree(((0,), (1,), (2,)), draw="hybrid"))
    tokens = tokens_of(trees)
    assert (tokens[:, :2] == torch.tensor([1, 3])).all()
    others = law()
    others[[1, 3]] = 0
    others /= others.sum()
    assert oracles.chi_square_p(tokens[:, 2].bincount(minlength=V), others * DRAWS) > 1e-6
    assert trees[0].draws.drawn == (False, False, False, True)
    torch.testing.assert_close(trees[0].draws.probs[0], others)
    assert not trees[0].draws.probs[0, [1, 3]].any()


def test_nodes_of_a_level_with_fewer_children_draw_from_more_tokens(oracles):
    """The hybrid's last child: the first node has two children, the second one."""
    trees = grown(StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), draw="hybrid"))
    tokens, below = tokens_of(trees), law(2)
    best = int(below.argmax())
    assert (tokens[:, 2] == best).all()
    others = below.clone()
    others[best] = 0
    assert oracles.chi_square_p(tokens[:, 3].bincount(minlength=V), others / others.sum() * DRAWS) > 1e-6
    assert oracles.chi_square_p(tokens[:, 4].bincount(minlength=V), below * DRAWS) > 1e-6
    assert trees[0].draws.drawn == (False, False, True, False, True, True)


@pytest.mark.parametrize("draw", RANDOM)
def test_a_chain_draws_independently_at_each_depth(oracles, draw):
    tokens = tokens_of(grown(Chain(3, draw=draw)))
    for a, b in itertools.combinations(range(3), 2):
        check_joint(oracles, tokens[:, a], tokens[:, b], torch.outer(law(a + 1), law(b + 1)))


def test_a_position_is_drafted_anew_in_every_step(oracles):
    """The second token ahead of one step takes the position of the first token ahead of the next."""
    grow = Chain(2, draw="without_replacement")
    now, then = tokens_of(grown(grow, context=(1, 2))), tokens_of(grown(grow, context=(1, 2, 3)))
    check_joint(oracles, now[:, 1], then[:, 0], torch.outer(law(2), law(1)))


def test_rows_of_one_seed_draw_independently(oracles):
    rows = [Sampler(Sampling(temperature=1.0, seed=seed), row, (1,)) for seed in range(DRAWS) for row in range(2)]
    tokens = tokens_of(grown(Chain(1, draw="without_replacement"), rows=rows)).reshape(-1, 2)
    check_joint(oracles, tokens[:, 0], tokens[:, 1], torch.outer(law(), law()))


@pytest.mark.parametrize("draw", RANDOM)
@pytest.mark.parametrize(("own", "used"), [(None, 0.5), (1.0, 1.0), (2.5, 2.5)])
def test_drafts_have_a_temperature_of_their_own(oracles, draw, own, used):
    trees = grown(Chain(1, draw=draw, temperature=own), temperature=0.5)
    torch.testing.assert_close(trees[0].draws.probs[0], law(temperature=used))
    counts = tokens_of(trees)[:, 0].bincount(minlength=V)
    assert oracles.chi_square_p(counts, law(temperature=used) * DRAWS) > 1e-6


@pytest.mark.parametrize("draw", RANDOM)
def test_the_draft_vocabulary_alone_is_drawn(oracles, draw):
    trees = grown(Chain(2, draw=draw), vocabulary=VOCABULARY)
    for depth in (1, 2):
        full = torch.zeros(13, dtype=torch.float64)
        full[VOCABULARY] = law(depth)
        torch.testing.assert_close(trees[0].draws.probs[depth - 1], full)
        assert oracles.chi_square_p(tokens_of(trees)[:, depth - 1].bincount(minlength=13), full * DRAWS) > 1e-6


@pytest.mark.parametrize("draw", [*RANDOM, "none"])
@pytest.mark.parametrize(
    ("options", "temperature"), [({"temperature": 0}, 1.0), ({}, 0.0), ({"temperature": 1.0}, 0.0)], ids=str
)
def test_at_temperature_0_of_drafts_or_target_the_best_are_taken(draw, options, temperature):
    rows = [Sampler(Sampling(temperature=temperature, seed=seed), 0, (1,)) for seed in range(20)]
    trees = grown(StaticTree(((0,), (1,), (0, 0)), draw=draw, **options), rows=rows, shared=True)
    assert all(tree.token_ids.tolist() == [1, 1, 3, 2] for tree in trees)
    assert all(tree.draws is None for tree in trees)


def test_ranks_by_shared_noise_are_taken_at_the_drafts_temperature(oracles):
    """The best of logits / temperature + Gumbel noise is a draw at that temperature."""
    for own, used in ((None, 0.5), (2.5, 2.5)):
        trees = grown(Chain(1, temperature=own), temperature=0.5, shared=True)
        assert trees[0].draws is None
        counts = tokens_of(trees)[:, 0].bincount(minlength=V)
        assert oracles.chi_square_p(counts, law(temperature=used) * DRAWS) > 1e-6


@pytest.mark.parametrize("draw", RANDOM)
def test_all_children_a_vocabulary_can_give(draw):
    trees = grown(StaticTree(tuple((rank,) for rank in range(V)), draw=draw))
    assert all(tree.draws.probs[0].isfinite().all() for tree in trees[:50])
    tokens = tokens_of(trees)
    if draw != "with_replacement":
        assert (tokens.sort(dim=1).values == torch.arange(V)).all()
    if draw == "hybrid":
        assert (tokens == LOGITS.argsort(descending=True)).all()


@pytest.mark.parametrize("draw", ["sampled", "", True, None])
def test_unknown_ways_to_draw_are_refused(draw):
    with pytest.raises(ValueError, match="draw must be one of none, without_replacement, with_replacement, hybrid"):
        StaticTree(((0,),), draw=draw)


@pytest.mark.parametrize("temperature", [-0.1, float("nan")])
def test_temperatures_below_0_are_refused(temperature):
    with pytest.raises(ValueError, match="drafts' temperature must be at least 0"):
        Chain(1, temperature=temperature)


def test_a_hybrid_has_no_law_where_nothing_is_left_to_draw():
    children = Children("hybrid", 1.0, False, torch.arange(2))
    rows = [Sampler(Sampling(temperature=1.0, seed=0), 0, [1])]
    _, law = children.choose(torch.tensor([[[0.0, -torch.inf]]]), 2, torch.tensor([2]), rows, 1)
    assert law.tolist() == [[[0.0, 0.0]]]
