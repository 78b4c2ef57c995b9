"""Typical acceptance is Medusa's rule, greedy at temperature 0, and, as its label says, not exact."""

import random

import pytest
import torch

from decode import Chain, Sampling, StaticTree, generate
from decode.accept import Block, Match, Rejection
from decode.sampling import Sampler
from decode.tree import TokenTree, tree_shape
from decode.typical import Typical

PEAKED = (0.5, 0.3, 0.15, 0.05)
FLAT = (0.25, 0.25, 0.25, 0.25)


def kept(laws, rule, tokens, parents, target) -> tuple[int, ...]:
    """The tokens that are kept, which are the same whatever the target draws behind them."""
    tree = TokenTree(torch.tensor([laws.ROOT, *tokens]), tree_shape(parents))
    blocks = [block for _, block in laws.verdicts(rule, tree, target, ())]
    assert len({block[:-1] for block in blocks}) == 1
    return blocks[0][:-1]


@pytest.mark.parametrize(
    ("law", "bound"),
    [
        # entropy in nats and 0.3 * exp(-entropy), by hand
        ((0.9, 0.08, 0.02, 0.0), 0.09),  # 0.3751, 0.2062: epsilon is less
        ((0.88, 0.1, 0.02, 0.0), 0.09),  # 0.4210, 0.1969
        ((0.7, 0.1, 0.1, 0.1), 0.09),  # 0.9404, 0.1171
        (FLAT, 0.075),  # ln 4, 0.3 / 4
        ((0.4, 0.3, 0.22, 0.08), 0.0845),  # 1.2629, 0.0848
        ((0.4, 0.3, 0.21, 0.09), 0.0838),  # 1.2722, 0.0841
        ((1.0, 0.0, 0.0, 0.0), 0.09),
    ],
)
def test_tokens_above_the_lesser_of_epsilon_and_the_entropy_bound_are_kept(laws, law, bound):
    for token, probability in enumerate(law):
        assert abs(probability - bound) > 1e-3  # the hand's digits decide
        tokens = kept(laws, Typical(), [token], (-1, 0), lambda context: law)
        assert tokens == ((token,) if probability > bound else ())


def test_the_bound_itself_is_not_kept_and_settings_count(laws):
    assert kept(laws, Typical(epsilon=0.25, delta=9.0), [1], (-1, 0), lambda context: FLAT) == ()
    assert kept(laws, Typical(epsilon=0.2499, delta=9.0), [1], (-1, 0), lambda context: FLAT) == (1,)
    assert kept(laws, Typical(epsilon=0.9, delta=1.01), [1], (-1, 0), lambda context: FLAT) == ()
    assert kept(laws, Typical(epsilon=0.9, delta=0.99), [1], (-1, 0), lambda context: FLAT) == (1,)


@pytest.mark.parametrize(
    ("tokens", "parents", "expected"),
    [
        ([0, 2, 2], (-1, 0, 0, 2), (2, 2)),  # longest, though unlikely
        ([2, 0, 1, 0], (-1, 0, 0, 2, 2), (0, 0)),  # of two as long as another, the likelier, though it comes last
        ([0, 1, 2, 1], (-1, 0, 0, 1, 1), (0, 1)),
        ([2, 0, 0, 1], (-1, 0, 0, 1, 2), (0, 1)),  # 0.5 * 0.3 above 0.15 * 0.5: the whole path counts
        ([1, 0, 0, 2], (-1, 0, 0, 1, 2), (1, 0)),
        ([0, 1, 3], (-1, 0, 0, 1), (0,)),  # 3 is too unlikely
        ([3, 0], (-1, 0, 1), ()),  # and so is all below it
        ([0, 0], (-1, 0, 0), (0,)),
    ],
)
def test_the_longest_kept_path_wins_and_among_equals_the_likelier(laws, tokens, parents, expected):
    assert kept(laws, Typical(), tokens, parents, lambda context: PEAKED) == expected


def test_the_target_draws_behind_the_kept_path(laws):
    """Its own law at the last kept node, also where drafts were turned down."""
    law = laws.step_law(
        Typical(),
        lambda c: PEAKED,
        lambda *_: [(1.0, laws.make_tree(tree_shape((-1, 0, 1)), [2, 0, 3], [], [], False))],
        (),
        2,
    )
    assert law == pytest.approx({(0, token): probability for token, probability in enumerate(PEAKED)})


def test_it_is_not_exact_and_says_so(laws):
    assert not Typical().exact
    assert all(rule.exact for rule in (Match(), Rejection(), Block()))
    assert not Typical().shares_noise
    for seed in range(6):
        target, draft = laws.PAIRS["random"](seed)
        for kind in ("points", "without_replacement", "hybrid"):
            assert laws.distance(Typical(), target, laws.drafts(draft, (-1, 0, 0, 1), kind), 3) > 0.05


def test_at_temperature_0_only_the_targets_best_tokens_are_kept(laws):
    """Siblings may repeat: of two nodes with one text, it may take the one below which the text goes on."""
    chance, target = random.Random(0), laws.table(3, vocab_size=3)
    deepest = 0
    for _ in range(200):
        size = chance.randint(1, 9)
        parents = (-1, *(chance.randrange(node + 1) for node in range(size - 1)))
        tree = TokenTree(torch.tensor([chance.randrange(3) for _ in range(size)]), tree_shape(parents))
        paths = laws.paths_of(tree.token_ids.tolist(), parents)
        logits = torch.stack([laws.as_tensor(target(path)).log() for path in paths])[None]
        (greedy,), (typical,) = (
            rule([tree], logits, [Sampler(Sampling(seed=0), 0, [1])]) for rule in (Match(), Typical())
        )
        text = (*paths[typical.path[-1]], typical.next_token)
        assert all(token == max(range(3), key=target(text[:i]).__getitem__) for i, token in enumerate(text))
        assert len(typical.path) >= len(greedy.path)
        deepest = max(deepest, len(typical.path))
    assert deepest > 3


@pytest.mark.parametrize("grow", [Chain(3), StaticTree(((0,), (1,), (0, 0), (1, 0)))], ids=["chain", "tree"])
def test_at_temperature_0_the_text_is_that_of_greedy_decoding(tiny_target, good_head, prompts, grow):
    greedy = generate(tiny_target, prompts, max_new_tokens=24)
    typical = generate(tiny_target, prompts, head=good_head, grow=grow, accept=Typical(), max_new_tokens=24)
    assert [row.token_ids for row in typical] == [row.token_ids for row in greedy]
    assert sum(row.stats.steps for row in typical) < sum(row.stats.steps for row in greedy)


def test_above_temperature_0_it_accepts_more_than_the_exact_rules(tiny_target, good_head, prompts):
    steps = {}
    for rule in (Match(), Rejection(), Typical()):
        sampling = Sampling(temperature=0.7, seed=1)
        rows = generate(
            tiny_target, prompts, head=good_head, accept=rule, sampling=sampling, max_new_tokens=48, eos_ids=()
        )
        steps[type(rule).__name__] = sum(row.stats.steps for row in rows)
    assert steps["Typical"] < min(steps["Match"], steps["Rejection"])


@pytest.mark.parametrize(
    "options", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"epsilon": -1.0}, {"delta": 0.0}, {"delta": -0.3}]
)
def test_bounds_that_no_probability_is_measured_by_are_refused(options):
    with pytest.raises(ValueError, match="0 < epsilon < 1 and delta > 0, got"):
        Typical(**options)
