"""Trees from measured ranks: counted right, as good as brute force, and simulated as decoding decodes."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from decode import Drafting, Sampling, StaticTree, generate, noise
from decode.ranks import DEPTH, NOT_RANKED, Ranked, acceptance, best_tree, rank_texts, simulated_tokens_per_step
from decode.replay import Known, replay, write_texts

TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0))


def closed_trees(paths: list[tuple[int, ...]], size: int):
    """All sets of `size - 1` paths that hold each path's parent and elder sibling."""
    for chosen in itertools.combinations(paths, size - 1):
        known = {(), *chosen}
        if all(p[:-1] in known and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in known) for p in chosen):
            yield chosen


def accepted_everywhere(texts: list[Ranked], paths) -> int:
    """Nodes that would be accepted if a step started at every place: the sum of the values."""
    return sum(tuple(row[: len(p)]) == p for text in texts for row in text.ranks.tolist() for p in paths)


def random_texts(seed: int, *, places: int = 400, depth: int = 3) -> list[Ranked]:
    """Ranks whose frequencies fall with the rank, as those of a trained head do."""
    chance = random.Random(seed)
    texts = []
    for _ in range(2):
        rows = []
        for _ in range(places // 2):
            hard = chance.random() < 0.4
            rows.append([min(int(chance.expovariate(0.4 if hard else 1.6)), 9) for _ in range(depth)])
        texts.append(Ranked(torch.tensor(rows)))
    return texts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", range(2, 8))
def test_the_tree_of_one_round_is_the_best_of_all_trees_of_its_size(seed, size):
    texts = random_texts(seed)
    candidates = [p for depth in (1, 2, 3) for p in itertools.product(range(3 if depth > 1 else 5), repeat=depth)][:30]
    best = max(accepted_everywhere(texts, paths) for paths in closed_trees(candidates[:17], size))
    found = best_tree(texts, size, rounds=1)
    assert len(found) == size - 1
    StaticTree(found)  # closed
    assert accepted_everywhere(texts, found) >= best


def test_trees_of_one_round_are_nested():
    texts = random_texts(7)
    trees = [set(best_tree(texts, size, rounds=1)) for size in range(1, 40)]
    assert all(small < large for small, large in itertools.pairwise(trees))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [4, 8, 16])
def test_more_rounds_are_not_much_worse_and_deeper_than_the_head_is_nothing(seed, size):
    texts = random_texts(seed)
    one, four = (simulated_tokens_per_step(texts, best_tree(texts, size, rounds=rounds)) for rounds in (1, 4))
    assert four > 0.97 * one
    assert max(map(len, best_tree(texts, size))) <= 3
    assert max(max(path) for path in best_tree(texts, size, max_rank=2)) < 2


def slow_starts(ranks: list[list[int]], paths) -> list[int]:
    """The places at which decoding with a tree starts a step."""
    place, places = 0, []
    while place < len(ranks):
        places.append(place)
        depth = 0
        while depth < len(ranks[place]) and tuple(ranks[place][: depth + 1]) in set(paths):
            depth += 1
        place += depth + 1
    return places


@pytest.mark.parametrize("size", [4, 9])
def test_further_rounds_count_the_places_where_the_last_tree_starts_a_step(size):
    changed = 0
    for seed in range(6):
        texts = random_texts(seed, places=60)
        paths = best_tree(texts, size, rounds=1)
        for rounds in (2, 3, 4):
            started = [Ranked(text.ranks[slow_starts(text.ranks.tolist(), paths)]) for text in texts]
            paths = best_tree(started, size, rounds=1)
            assert best_tree(texts, size, rounds=rounds) == paths
        assert best_tree(texts, size) == paths
        changed += paths != best_tree(texts, size, rounds=1)
    assert changed


def test_the_simulation_walks_the_text_in_steps():
    for seed in range(3):
        text = random_texts(seed)[0]
        steps = len(slow_starts(text.ranks.tolist(), TREE))
        assert simulated_tokens_per_step([text], TREE) == pytest.approx(len(text.ranks) / steps)
    nothing = Ranked(torch.full((10, 3), NOT_RANKED))
    assert simulated_tokens_per_step([nothing], TREE) == 1
    everything = Ranked(torch.zeros(12, 3, dtype=torch.int64))
    assert simulated_tokens_per_step([everything], ((0,), (0, 0), (0, 0, 0))) == 4
    assert simulated_tokens_per_step([], TREE) == 1


PROMPTS = [[4, 5, 6, 7, 4, 5], [9], [3, 8], [2, 14, 10], [6, 6]]
SAMPLINGS = {"greedy": Sampling(seed=7), "sampled": Sampling(temperature=0.8, seed=7)}
LIMIT = 12


@pytest.fixture(scope="module", params=SAMPLINGS)
def sampling(request) -> Sampling:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def texts(any_drafts, small_target, sampling) -> list[Known]:
    """Texts of different lengths, one of two tokens."""
    layers = any_drafts.feature_layers
    long = write_texts(small_target, PROMPTS, sampling=sampling, max_new_tokens=LIMIT, feature_layers=layers)
    last = replace(sampling, seed=sampling.seed + 50)
    texts = [*long, *write_texts(small_target, [[3]], sampling=last, max_new_tokens=2, feature_layers=layers)]
    assert len({len(text.token_ids) for text in texts}) > 2
    return texts


def slow_ranks(drafts, text: Known, temperature: float, depth: int) -> list[list[int]]:
    """Ranks by a fresh drafter for every place and by sorting."""
    ids = torch.tensor([[*text.prompt_ids, *text.token_ids]])
    length = ids.shape[1]
    found = []
    for root in range(len(text.prompt_ids), length - 1):
        drafter = drafts.drafter()
        columns = list(range(drafter.vocab_size)) if drafter.vocabulary is None else drafter.vocabulary.tolist()
        features = None if text.features is None else text.features[None, :root]
        logits = drafter.sync(ids[:, : root + 1], text.hidden[None, :root], [root], features)[0]
        row = []
        for place in range(root + 1, min(root + 1 + depth, length)):
            key = noise.key(noise.key(text.seed, 0), noise.TARGET, place)
            scores = logits.double() + temperature * noise.gumbel([key], torch.tensor(columns))[0]
            order = [columns[column] for column in scores.argsort(descending=True).tolist()]
            token = int(ids[0, place])
            row.append(order.index(token) if token in columns else NOT_RANKED)
            if len(row) < depth:
                logits = drafter.extend(ids[:, place, None], torch.tensor([[place - root - 1]]))[0, 0]
        found.append(row + [NOT_RANKED] * (depth - len(row)))
    return found


def test_ranks_are_places_in_the_drafters_sorted_guesses(any_drafts, texts, sampling):
    depth = min(4, any_drafts.drafter().max_depth)
    expected = [slow_ranks(any_drafts, text, sampling.temperature, depth) for text in texts]
    for rows in (1, 4, 16):
        ranked = rank_texts(any_drafts, texts, sampling=sampling, depth=4, rows=rows)
        assert [text.ranks.tolist() for text in ranked] == expected
    assert len(expected[-1]) == 1  # of two tokens: one follows a root
    assert [len(text.ranks) for text in ranked] == [len(text.token_ids) - 1 for text in texts]


def test_guesses_are_ranked_as_deep_as_the_drafter_drafts(any_drafts, texts, sampling):
    ranked = rank_texts(any_drafts, texts[:1], sampling=sampling)
    assert ranked[0].ranks.shape[1] == min(DEPTH, any_drafts.drafter().max_depth)


def test_texts_without_a_token_behind_a_root_have_no_ranks(any_drafts, texts, sampling):
    short = replace(texts[0], token_ids=texts[0].token_ids[:1])
    ranked = rank_texts(any_drafts, [short, texts[1], short], sampling=sampling)
    depth = min(DEPTH, any_drafts.drafter().max_depth)
    assert [tuple(text.ranks.shape) for text in ranked] == [
        (0, depth),
        (len(texts[1].token_ids) - 1, depth),
        (0, depth),
    ]
    assert torch.equal(ranked[1].ranks, rank_texts(any_drafts, texts[1:2], sampling=sampling)[0].ranks)
    assert rank_texts(any_drafts, [short], sampling=sampling)[0].ranks.shape == (0, depth)


@pytest.mark.parametrize("size", [3, 8])
def test_simulated_tokens_per_step_are_those_of_decoding(any_drafts, small_target, texts, sampling, size):
    ranked = rank_texts(any_drafts, texts, sampling=sampling)
    paths = best_tree(ranked, size)
    assert len(paths) > 1
    proposer = Drafting(any_drafts, StaticTree(paths))
    replayed = replay(small_target, texts, proposer, sampling=sampling)
    for text, known, stats in zip(ranked, texts, replayed.by_text, strict=True):
        own = replace(sampling, seed=[known.seed])
        limit = len(known.token_ids)
        real = generate(small_target, [known.prompt_ids], proposer=proposer, sampling=own, max_new_tokens=limit)[0]
        assert simulated_tokens_per_step([text], paths) == pytest.approx(real.stats.tokens_per_step)
        assert simulated_tokens_per_step([text], paths) == pytest.approx(stats.tokens_per_step)
    assert simulated_tokens_per_step(ranked, paths) == pytest.approx(replayed.stats.tokens_per_step)
    assert replayed.stats.tokens_per_step > 1


def slow_acceptance(texts: list[Ranked], width: int) -> list[list[float]]:
    """Shares of ranks among places that have a token so deep and drafts above it."""
    table = []
    for depth in range(texts[0].ranks.shape[1]):
        seen = []
        for text in texts:
            rows = text.ranks.tolist()
            for place, row in enumerate(rows):
                if place + depth < len(rows) and all(rank < width for rank in row[:depth]):
                    seen.append(row[depth])
        if seen:
            table.append([seen.count(rank) / len(seen) for rank in range(width)])
    return table


@pytest.mark.parametrize("width", [1, 2, 4])
def test_acceptance_is_counted_where_all_above_was_drafted(any_drafts, texts, sampling, width):
    for ranked in (random_texts(1), random_texts(2, places=8), rank_texts(any_drafts, texts, sampling=sampling)):
        table = acceptance(ranked, width=width)
        expected = slow_acceptance(ranked, width)
        assert len(table) == len(expected)
        assert [share for row in table for share in row] == pytest.approx([s for row in expected for s in row])


def test_acceptance_of_what_was_always_or_never_drafted():
    always = Ranked(torch.tensor([[0, 0, 0], [0, 0, NOT_RANKED], [0, NOT_RANKED, NOT_RANKED]]))
    assert acceptance([always], width=2) == [[1.0, 0.0]] * 3  # ends of texts are no failures
    never = Ranked(torch.full((5, 3), NOT_RANKED))
    assert acceptance([never]) == [[0.0] * 4]
