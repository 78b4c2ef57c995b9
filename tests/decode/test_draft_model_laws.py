"""With drafts drawn from a small model, `Rejection` and `Block` keep the target's law through the whole loop."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import Chain, DraftModel, Sampling, StaticTree, Target, accept, generate

V, PROMPT, DRAWS, ROWS = 4, [1, 2, 3, 1], 800, 400
TREE = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1)))
CASES = {
    "chain": ("rejection", Chain(2, draw="without_replacement")),
    "warm chain": ("rejection", Chain(3, draw="without_replacement", temperature=3.0)),
    "tree": ("rejection", replace(TREE, draw="without_replacement")),
    "independent draws": ("rejection", replace(TREE, draw="with_replacement")),
    "hybrid": ("rejection", replace(TREE, draw="hybrid", temperature=1.0)),
    "block": ("block", Chain(2, draw="without_replacement")),
    "cool block": ("block", Chain(3, draw="with_replacement", temperature=0.8)),
}
SAMPLING = Sampling(temperature=1.3)


def make_model(vocab_size: int, seed: int) -> Target:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    return Target(LlamaForCausalLM(config).double())


@pytest.fixture(scope="module")
def target() -> Target:
    return make_model(V, 0)


@pytest.fixture(scope="module")
def draft(target) -> DraftModel:
    """Neither the target nor independent of it: half-way to another model."""
    model, other = make_model(V, 0), make_model(V, 1)
    with torch.no_grad():
        for mine, foreign in zip(model.model.parameters(), other.model.parameters(), strict=True):
            mine.lerp_(foreign, 0.6)
    return DraftModel(model, target)


@pytest.fixture(scope="module")
def law(target) -> dict[tuple[int, ...], float]:
    """Probability of every text of three tokens, from full forwards."""
    law = {(): 1.0}
    for _ in range(3):
        texts = torch.tensor([[*PROMPT, *text] for text in law])
        with torch.no_grad():
            probs = (target.model(texts, use_cache=False).logits[:, -1] / 1.3).softmax(-1).tolist()
        law = {
            (*text, token): before * p
            for (text, before), row in zip(law.items(), probs, strict=True)
            for token, p in enumerate(row)
        }
    return law


@pytest.mark.parametrize("name", CASES)
def test_the_first_three_tokens_have_the_targets_law(target, draft, law, oracles, name):
    """Five are decoded: a tree is not grown deeper than what may still be emitted."""
    rule, grow = CASES[name]
    counts = dict.fromkeys(law, 0)
    accepted = offered = 0
    for seed in range(DRAWS // ROWS):
        results = generate(
            target, [PROMPT] * ROWS, draft_model=draft, grow=grow, accept=rule,
            sampling=replace(SAMPLING, seed=seed), max_new_tokens=5, eos_ids=(),
        )  # fmt: skip
        for result in results:
            counts[tuple(result.token_ids[:3])] += 1
            accepted += sum(result.stats.accepted)
            offered += sum(result.stats.offered)
    assert 0.1 < accepted / offered < 0.9  # both ways through the rule are taken
    observed = torch.tensor(list(counts.values()))
    assert oracles.chi_square_p(observed, torch.tensor(list(law.values())) * DRAWS) > 1e-6


@pytest.mark.parametrize("factor", [0.6, 1.8])
def test_the_test_sees_drafts_that_are_kept_too_rarely_or_too_often(target, draft, law, oracles, monkeypatch, factor):
    ratio = accept.probability_ratio
    monkeypatch.setattr(accept, "probability_ratio", lambda p, q, token: factor * ratio(p, q, token))
    with pytest.raises(AssertionError, match="1e-06"):
        test_the_first_three_tokens_have_the_targets_law(target, draft, law, oracles, "warm chain")


def test_the_test_sees_drafts_that_carry_the_law_of_another_node(target, draft, law, oracles, monkeypatch):
    make = StaticTree._draws
    roots = [0, 0, 2]
    monkeypatch.setattr(StaticTree, "_draws", lambda self, shape, probs, row: make(self, shape, probs[:, roots], row))
    with pytest.raises(AssertionError, match="1e-06"):
        test_the_first_three_tokens_have_the_targets_law(target, draft, law, oracles, "chain")
