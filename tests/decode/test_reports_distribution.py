"""Public reports of wrong distributions that enumeration does not cover: certainty, temperature, precision."""

import random

import pytest
import torch
from transformers import LogitsProcessor

from decode import Block, Chain, DraftModel, Match, Rejection, Sampling, Typical, generate, noise
from decode.children import Children
from decode.sampling import Sampler
from decode.tree import Draws, TokenTree, chain_shape

V = 4
LAW = [0.4, 0.3, 0.2, 0.1]
RULES = [Match(), Rejection(), Block(), Typical()]
EXACT = RULES[:3]


def name_of(value: object) -> str:
    return type(value).__name__.lower()


class Says(LogitsProcessor):
    """Makes the target's law the same everywhere: `logits` at these tokens, nothing elsewhere."""

    def __init__(self, logits: dict[int, float]) -> None:
        self.logits = logits

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = list(self.logits)
        return torch.full_like(scores, -torch.inf).index_copy(
            1, torch.tensor(tokens), scores.new_tensor([[self.logits[token] for token in tokens]])
        )


def chain(tokens: list[int], *, drawn: bool) -> TokenTree:
    """A chain below root 0, looked up, or drawn from a law that has all tokens."""
    law = torch.tensor(LAW, dtype=torch.float64)
    draws = Draws(law.expand(len(tokens) + 1, -1), (False, *[True] * len(tokens))) if drawn else None
    return TokenTree(torch.tensor([0, *tokens]), chain_shape(len(tokens) + 1), draws)


@pytest.mark.parametrize("rule", RULES, ids=name_of)
@pytest.mark.parametrize("drawn", [False, True], ids=["looked-up", "drawn"])
@pytest.mark.parametrize(("draft", "accepted"), [([2, 1, 1], 0), ([1, 2, 1], 1), ([1, 1, 3], 2), ([1, 1, 1], 3)])
def test_a_certain_token_is_emitted_and_nothing_behind_another(rule, drawn, draft, accepted):
    logits = torch.full((1, 4, V), -1e5, dtype=torch.float64)
    logits[..., 1] = 0.0
    for seed in range(25):
        row = Sampler(Sampling(temperature=1.0, seed=seed), 0, [0])
        assert rule([chain(draft, drawn=drawn)], logits, [row]) == [(tuple(range(accepted + 1)), (1,) * (accepted + 1))]


@pytest.fixture(scope="module")
def drafts(tiny_target, good_head, oracles):
    """Arguments of `generate`: a wrong token looked up in every place, and drafts drawn from a head and a model."""
    drawn = Chain(3, draw="without_replacement")
    return {
        "looked-up": {"proposer": oracles.Scripted(lambda text: [60, 60, 60])},
        "head": {"head": good_head, "grow": drawn},
        "model": {"draft_model": DraftModel(tiny_target, tiny_target), "grow": drawn},
    }


@pytest.mark.parametrize("rule", EXACT, ids=name_of)
@pytest.mark.parametrize("drawn", [False, True], ids=["looked-up", "drawn"])
def test_of_two_equal_tokens_both_are_emitted(rule, drawn):
    """A verifier that is greedy at any temperature emits one of them, one that takes every draft the other."""
    logits = torch.full((1, 2, V), -1e5, dtype=torch.float64)
    logits[..., 1:3] = 2.0
    emitted = []
    for seed in range(64):
        token = random.Random(seed).choices(range(V), weights=LAW)[0] if drawn else 2
        ((path, (*_, following)),) = rule(
            [chain([token], drawn=drawn)], logits, [Sampler(Sampling(temperature=1.0, seed=seed), 0, [0])]
        )
        emitted.append(token if len(path) == 2 else following)
    assert set(emitted) == {1, 2}
    assert 20 <= emitted.count(1) <= 44


@pytest.mark.parametrize("draft", ["looked-up", "head", "model"])
def test_two_equal_tokens_share_a_text(tiny_target, drafts, draft):
    sampling = Sampling(temperature=1.0, seed=3, processors=[Says({50: 2.0, 60: 2.0})])
    for rule in (Match(), Rejection()):
        result = generate(
            tiny_target, [7, 8], **drafts[draft], accept=rule, sampling=sampling, max_new_tokens=64, eos_ids=()
        )
        assert set(result.token_ids) == {50, 60}
        assert 20 <= result.token_ids.count(50) <= 44


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=name_of)
@pytest.mark.parametrize("draft", ["looked-up", "head", "model"])
def test_the_rows_own_temperature_decides_between_close_tokens(tiny_target, drafts, rule, draft):
    """At 0.01 the second token has a probability of e^-20, at the default of 1 it would be 45 %."""
    sampling = Sampling(temperature=0.01, seed=3, processors=[Says({50: 1.0, 60: 0.8})])
    result = generate(
        tiny_target, [7, 8], **drafts[draft], accept=rule, sampling=sampling, max_new_tokens=40, eos_ids=()
    )
    assert result.token_ids == [50] * 40


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("draw", ["without_replacement", "with_replacement", "hybrid"])
def test_tokens_are_drawn_from_the_very_law_that_is_reported(dtype, draw, monkeypatch):
    """Two tokens nearer than a half-precision step; noise between them turns a draw in half precision around."""
    near = 1e-4
    assert torch.tensor(1.0).bfloat16() == torch.tensor(1.0 + near).bfloat16()
    logits = torch.tensor([[[1.0, 1.0 + near, -3.0, -4.0]]], dtype=dtype)
    chance = torch.tensor([near / 2, 0.0, 0.0, 0.0], dtype=torch.float64)
    monkeypatch.setattr(noise, "gumbel", lambda keys, tokens: chance[tokens].expand(len(keys), -1))
    rows = [Sampler(Sampling(temperature=1.0, seed=0), 0, [0])]
    children = Children(draw, 1.0, False, torch.arange(4))
    columns, law = children.choose(logits, 1, torch.tensor([1]), rows, 1)
    assert columns.tolist() == [[[1]]]
    assert float(law[0, 0, 1] / law[0, 0, 0]) == pytest.approx(1 + near, abs=1e-6)
    torch.testing.assert_close(law[0, 0], logits[0, 0].double().softmax(-1))
