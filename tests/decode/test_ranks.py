"""Trees from measured ranks: counted right, as good as brute force, and simulated as decoding decodes."""

import itertools
import random

import pytest
import torch

from decode import StaticTree, generate
from decode.ranks import NOT_RANKED, Ranked, best_tree, rank_text, simulated_tokens_per_step
from heads import create_head
from heads.medusa import MedusaConfig

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


def slow_simulation(ranks: list[list[int]], paths) -> float:
    place, steps = 0, 0
    while place < len(ranks):
        depth = 0
        while depth < len(ranks[place]) and tuple(ranks[place][: depth + 1]) in set(paths):
            depth += 1
        place += depth + 1
        steps += 1
    return len(ranks) / steps


def test_the_simulation_walks_the_text_in_steps():
    for seed in range(3):
        text = random_texts(seed)[0]
        assert simulated_tokens_per_step([text], TREE) == pytest.approx(slow_simulation(text.ranks.tolist(), TREE))
    nothing = Ranked(torch.full((10, 3), NOT_RANKED))
    assert simulated_tokens_per_step([nothing], TREE) == 1
    everything = Ranked(torch.zeros(12, 3, dtype=torch.int64))
    assert simulated_tokens_per_step([everything], ((0,), (0, 0), (0, 0, 0))) == 4
    assert simulated_tokens_per_step([], TREE) == 1


@pytest.mark.parametrize("vocabulary", [False, True])
def test_ranks_are_places_in_the_drafters_sorted_logits(tiny_target, good_head, prompts, vocabulary):
    head = good_head
    if vocabulary:
        config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=3, draft_vocab_size=80)
        head = create_head("medusa", config, tiny_target).double()
        head.set_vocabulary(torch.arange(0, 320, 4))
    prompt = prompts[0]
    text = prompt + generate(tiny_target, prompt, max_new_tokens=12, eos_ids=()).token_ids
    hidden = tiny_target.encode(torch.tensor([text]), [len(text)])[0]
    ranks = rank_text(head, text, hidden, len(prompt)).ranks
    assert ranks.shape == (11, 3)
    columns = list(range(320)) if head.vocabulary is None else head.vocabulary.tolist()
    for i, root in enumerate(range(len(prompt), len(text) - 1)):
        drafter = head.drafter()
        ids = torch.tensor([text[: root + 1]])
        logits = [drafter.sync(ids, hidden[None, :root], [root])[0]]
        for _ in range(2):
            logits.append(drafter.extend(ids[:, :1], torch.zeros(1, 1, dtype=torch.int64))[0, 0])
        for k in range(3):
            place = root + 1 + k
            if place >= len(text) or text[place] not in columns:
                assert int(ranks[i, k]) == NOT_RANKED
            else:
                order = [columns[c] for c in logits[k].argsort(descending=True).tolist()]
                assert int(ranks[i, k]) == order.index(text[place])


def test_a_text_without_answer_has_no_ranks(tiny_head, tiny_target):
    hidden = tiny_target.encode(torch.tensor([[5, 6, 7]]), [3])[0]
    assert rank_text(tiny_head, [5, 6, 7], hidden, 2).ranks.shape == (0, 3)


def test_simulated_tokens_per_step_are_those_of_decoding(tiny_target, good_head, prompts):
    limit = 30
    plain = generate(tiny_target, prompts, max_new_tokens=limit, eos_ids=())
    texts = []
    for result in plain:
        whole = result.prompt_ids + result.token_ids
        hidden = tiny_target.encode(torch.tensor([whole]), [len(whole)])[0]
        texts.append(rank_text(good_head, whole, hidden, len(result.prompt_ids)))
    for paths in (TREE, best_tree(texts, 12), best_tree(texts, 3), ()):
        results = generate(
            tiny_target, prompts, head=good_head, grow=StaticTree(paths), max_new_tokens=limit, eos_ids=()
        )
        for text, result in zip(texts, results, strict=True):
            assert simulated_tokens_per_step([text], paths) == pytest.approx(result.stats.tokens_per_step)
        steps = sum(result.stats.steps for result in results)
        assert simulated_tokens_per_step(texts, paths) == pytest.approx(len(prompts) * (limit - 1) / steps)
    assert simulated_tokens_per_step(texts, best_tree(texts, 12)) > 1.3
