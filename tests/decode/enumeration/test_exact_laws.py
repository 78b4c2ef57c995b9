"""Whatever was drafted and however: under the exact rules the text has the target's law, to rounding."""

import pytest

from decode.accept import Block, Match, Rejection

SHAPES = {  # parents, and the length of the texts
    "chain 1": ((-1, 0), 3),
    "chain 2": ((-1, 0, 1), 3),
    "chain 3": ((-1, 0, 1, 2), 4),
    "2": ((-1, 0, 0), 3),
    "3": ((-1, 0, 0, 0), 3),
    "4": ((-1, 0, 0, 0, 0), 2),
    "below the second": ((-1, 0, 0, 2, 2), 3),
    "2+1": ((-1, 0, 0, 1, 2), 3),
}
WIDE = {  # hundreds to thousands of drafted trees for each pair
    "2+2": ((-1, 0, 0, 1, 1, 2, 2), 3),
    "3+1": ((-1, 0, 0, 0, 1, 2, 3), 3),
    "2 deep": ((-1, 0, 0, 1, 2, 2, 4), 4),
}
CHAINS = ["chain 1", "chain 2", "chain 3"]
CORNERS = ["close", "equal", "one-hot target", "one-hot draft", "disjoint", "zeros in draft", "zeros in target"]
CORNERS += ["top-1", "top-1 target", "ties"]
KINDS = ["without_replacement", "with_replacement", "hybrid", "points", "mixed_siblings", "mixed_nodes"]
ALIKE = {"with_replacement", "hybrid", "mixed_siblings"}  # to the first kind where no node has siblings
DRAFTS = [(kind, shape) for kind in KINDS for shape in SHAPES if shape not in CHAINS or kind not in ALIKE]


def check(laws, rule, kind, parents, length, pairs, **options) -> None:
    found = {}
    for name, seed in pairs:
        target, draft = laws.PAIRS[name](seed)
        found[name, seed] = laws.distance(rule, target, laws.drafts(draft, parents, kind, **options), length)
    assert max(found.values()) < 1e-12, found


def short(corners=CORNERS) -> list[tuple[str, int]]:
    return [("random", seed) for seed in range(6)] + [(name, 0) for name in corners]


def test_all_corner_laws_and_kinds_of_drafts_are_listed(laws):
    assert {"random", *CORNERS} == set(laws.PAIRS)
    assert set(KINDS) == set(laws.KINDS)


@pytest.mark.parametrize(("kind", "shape"), DRAFTS)
def test_rejection_has_the_targets_law(laws, kind, shape):
    check(laws, Rejection(), kind, *SHAPES[shape], short())


@pytest.mark.parametrize(("kind", "shape"), DRAFTS)
def test_match_has_the_targets_law(laws, kind, shape):
    check(laws, Match(), kind, *SHAPES[shape], [("random", 0), ("one-hot draft", 1), ("zeros in target", 2)])


@pytest.mark.parametrize("kind", ["without_replacement", "points", "mixed_nodes"])
@pytest.mark.parametrize("shape", CHAINS)
def test_block_has_the_targets_law(laws, kind, shape):
    check(laws, Block(), kind, *SHAPES[shape], short())


def test_block_refuses_branches(laws):
    target, draft = laws.PAIRS["random"](0)
    for parents in ((-1, 0, 0), (-1, 0, 1, 1)):
        with pytest.raises(ValueError, match="block verification is for chains"):
            laws.step_law(Block(), target, laws.drafts(draft, parents, "points"), (), 3)


@pytest.mark.parametrize("kind", ["hybrid", "points", "mixed_siblings"])
def test_rejection_of_wide_trees_has_the_targets_law(laws, kind):
    check(laws, Rejection(), kind, *WIDE["2+2"], short(["close", "one-hot target", "zeros in draft", "ties"]))


@pytest.mark.parametrize("kind", ["without_replacement", "with_replacement"])
def test_rejection_of_wide_drawn_trees_has_the_targets_law(laws, kind):
    check(laws, Rejection(), kind, *WIDE["2+2"], [("random", 0)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["2+2", "3+1"])
def test_draws_shared_by_all_nodes_of_a_depth_do_no_harm(laws, kind, shape):
    pairs = [("random", 0), ("random", 1), ("zeros in draft", 2)]
    check(laws, Rejection(), kind, *WIDE[shape], pairs, shared=True)
    check(laws, Match(), kind, *WIDE[shape], pairs[:1], shared=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_law_that_holds_for_trees_holds_for_the_same_trees_cut(laws, kind):
    """`TokenTree.cut` of whole trees, as the loop uses it near the end of a text."""
    for rule, parents in ((Rejection(), (-1, 0, 0, 2)), (Match(), (-1, 0, 0, 2)), (Block(), (-1, 0, 1))):
        target, draft = laws.PAIRS["random"](1)
        whole = laws.drafts(draft, parents, kind)

        def cut(context, depth, whole=whole):
            return [(weight, tree.cut(depth)) for weight, tree in whole(context, 2)]

        assert laws.distance(rule, target, cut, 3) < 1e-12


def test_drafts_may_stop_at_a_token_that_is_kept(laws):
    """Whether to draft on may depend on what was drafted so far (a confidence bound), if the last token is kept."""

    def stopped(context, depth, draft, whole):
        for weight, tree in whole(context, depth):
            tokens, end = tree.token_ids.tolist(), 1
            while end < len(tokens) and draft(context + tuple(tokens[1:end]))[tokens[end]] > 0.3:
                end += 1
            yield weight, tree.cut(end)

    for seed in range(6):
        target, draft = laws.PAIRS["random"](seed)
        whole = laws.drafts(draft, (-1, 0, 1, 2), "without_replacement")
        for rule in (Rejection(), Block()):
            steps = laws.distance(
                rule, target, lambda c, d, draft=draft, whole=whole: list(stopped(c, d, draft, whole)), 4
            )
            assert steps < 1e-12


def all_pairs(seeds: int) -> list[tuple[str, int]]:
    return [("random", seed) for seed in range(6)] + [(name, seed) for name in CORNERS for seed in range(seeds)]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", {**SHAPES, **WIDE})
@pytest.mark.parametrize("rule", [Rejection(), Match()], ids=["rejection", "match"])
def test_trees_have_the_targets_law_for_all_seeds_and_pairs(laws, rule, kind, shape):
    check(laws, rule, kind, *{**SHAPES, **WIDE}[shape], all_pairs(2 if shape in WIDE else 6))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["without_replacement", "with_replacement", "points", "mixed_nodes"])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_blocks_have_the_targets_law_for_all_seeds_and_pairs(laws, kind, length):
    check(laws, Block(), kind, tuple(range(-1, length)), min(length + 2, 5), all_pairs(6))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_the_widest_trees_have_the_targets_law(laws, kind):
    parents = (-1, 0, 0, 0, 1, 1, 2, 2) if kind.startswith("with") else (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    check(laws, Rejection(), kind, parents, 3, [("random", 0), ("zeros in draft", 1)])
