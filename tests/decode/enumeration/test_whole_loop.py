"""The same laws through all of decoding: a model, a head, the loop, real noise; many seeds against the model."""

from dataclasses import replace

import pytest
import torch

from decode import Chain, DynamicTree, Sampling, StaticTree, Target, generate
from decode.accept import Block, Match, Rejection
from heads import create_head
from heads.medusa import MedusaConfig

PROMPT = [3, 0, 2]
LENGTH = 4
VOCAB_SIZE = 4
SETTINGS = Sampling(temperature=1.5)
TREE = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
WAYS = {
    "block": (Block(), Chain(3, draw="without_replacement", temperature=0.7)),
    "hybrid": (Rejection(), StaticTree(TREE, draw="hybrid", temperature=0.7)),
    "with replacement": (Rejection(), StaticTree(TREE, draw="with_replacement")),
    "without replacement": (Rejection(), StaticTree(TREE, draw="without_replacement")),
    "points": (Rejection(), StaticTree(TREE)),
    "block of points": (Block(), Chain(3)),
    "dynamic tree": (Rejection(), DynamicTree(3, 3, 7, confidence=0.02)),
    "match": (Match(), StaticTree(TREE, draw="hybrid")),
}


@pytest.fixture(scope="module")
def target(make_tiny_llama) -> Target:
    return Target(make_tiny_llama(vocab_size=VOCAB_SIZE), None, name="four tokens")


@pytest.fixture(scope="module")
def head(target):
    """Untrained: with four tokens its drafts are right often enough."""
    config = MedusaConfig(hidden_size=32, vocab_size=VOCAB_SIZE, num_heads=3)
    head = create_head("medusa", config, target).double()
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.fixture(scope="module")
def own_law(target) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts of `LENGTH` tokens."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(law)
        with torch.no_grad():
            ids = torch.tensor([PROMPT + list(text) for text in texts])
            logits = target.model(ids, use_cache=False).logits[:, -1]
        rows = (logits / SETTINGS.temperature).softmax(-1).tolist()
        law = {
            (*text, token): law[text] * p for text, row in zip(texts, rows, strict=True) for token, p in enumerate(row)
        }
    return law


def check(target, head, oracles, law, way: str, draws: int) -> None:
    rule, grow = WAYS[way]
    counts = dict.fromkeys(law, 0)
    rows, steps = 100, 0
    for start in range(0, draws, rows):
        sampling = replace(SETTINGS, seed=list(range(start, start + rows)))
        options = {"head": head, "grow": grow, "accept": rule, "sampling": sampling, "eos_ids": ()}
        # longer than what is counted, so that steps draft as deep as they can
        for result in generate(target, [PROMPT] * rows, max_new_tokens=LENGTH + 2, **options):
            counts[tuple(result.token_ids[:LENGTH])] += 1
            steps += result.stats.steps
    assert steps < 0.8 * draws * (LENGTH + 1)  # drafts were accepted
    assert oracles.chi_square_p(torch.tensor(list(counts.values())), torch.tensor(list(law.values())) * draws) > 1e-6


@pytest.mark.parametrize("way", ["block", "hybrid", "dynamic tree"])
def test_texts_of_many_seeds_follow_the_models_law(target, head, oracles, own_law, way):
    check(target, head, oracles, own_law, way, 1000)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_texts_of_very_many_seeds_follow_the_models_law(target, head, oracles, own_law, way):
    check(target, head, oracles, own_law, way, 20_000)
