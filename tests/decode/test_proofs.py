"""Each check of `decode.prove` passes what is right and fails what it is for."""

import copy

import pytest
import torch

from decode import Chain, DraftModel, PromptLookup, Sampling, StaticTree, Target, generate
from decode.draft_model import DraftModelDrafter
from decode.proofs import Check, Settings, prove, prove_law, prove_seeds, prove_state, prove_texts
from decode.prove import check_lines, verdict_lines
from decode.sampling import Sampler
from decode.session import Session
from heads import create_head, head_class
from heads.cache import TreeCache
from heads.medusa import MedusaDrafter
from train.new_head import target_sizes

QUICK = Settings(max_new_tokens=8, samples=50)
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)))


def perturbed(model, size: float):
    """A model that often agrees."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(size * parameter.std() * noise)
    return model


@pytest.fixture(scope="module")
def draft_model(tiny_target) -> DraftModel:
    return DraftModel(Target(perturbed(tiny_target.model, 0.05), tiny_target.tokenizer, name="draft"), tiny_target)


def outcomes(checks: list[Check]) -> list[bool | None]:
    return [check.passed for check in checks]


def test_a_draft_cache_that_is_one_token_short_fails_the_state_check_alone(
    tiny_target, draft_model, prompts, monkeypatch
):
    advance = DraftModelDrafter._advance

    def short(self, session, token_ids, lengths):
        logits = advance(self, session, token_ids, lengths)
        session.cache.lengths = [length - 1 for length in session.cache.lengths]
        return logits

    monkeypatch.setattr(DraftModelDrafter, "_advance", short)
    checks = list(prove(tiny_target, prompts[:2], {"draft_model": draft_model}, QUICK))
    assert outcomes(checks) == [True, True, False, True]
    assert [line.split(":")[0] for line in checks[2].details] == ["greedy", "sampled"]
    assert "drafter's logits" in checks[2].details[0]


class StaleDrafter(MedusaDrafter):
    """Drafts from the states of the step before."""

    previous = None

    def sync(self, token_ids, hidden, lengths, features=None):
        current = super().sync(token_ids, hidden, lengths), self._logits
        old, self.previous = self.previous or current, current
        self._logits = old[1]
        return old[0]


def test_a_stale_head_fails_the_state_check_alone(tiny_target, good_head, prompts, monkeypatch):
    monkeypatch.setattr(type(good_head), "drafter", lambda self: StaleDrafter(self))
    checks = list(prove(tiny_target, prompts[:2], {"head": good_head, "grow": TREE}, QUICK))
    assert outcomes(checks) == [True, True, False, True]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda path: path[::-1], True),  # attention does not see the order of slots
        (lambda path: (*path[:-1], 0), False),
    ],
    ids=["reversed", "last dropped"],
)
def test_a_commit_of_the_wrong_nodes_fails_the_state_check(tiny_target, draft_model, prompts, monkeypatch, wrong, text):
    commit = TreeCache.commit

    def commit_wrongly(self, paths):
        commit(self, [wrong(path) if isinstance(path, tuple) and len(path) > 1 else path for path in paths])

    monkeypatch.setattr(TreeCache, "commit", commit_wrongly)
    drafts = {"draft_model": draft_model}
    assert prove_texts("greedy text", tiny_target, prompts[:2], drafts, Sampling(), QUICK).passed == text
    state = prove_state(tiny_target, prompts[:2], drafts, QUICK)
    assert not state.passed
    assert "against a fresh prefill" in state.details[0]


def test_positions_by_slot_instead_of_depth_fail_text_and_state(tiny_target, good_head, prompts, monkeypatch):
    forward = Target.forward

    def by_slot(self, token_ids, positions, *rest):
        return forward(self, token_ids, positions[:, :1] + torch.arange(positions.shape[1]), *rest)

    monkeypatch.setattr(Target, "forward", by_slot)
    drafts = {"head": good_head, "grow": TREE}
    greedy = prove_texts("greedy text", tiny_target, prompts[:3], drafts, Sampling(), QUICK)
    assert not greedy.passed
    assert greedy.counts["failures"] == len(greedy.details) > 0
    assert "NOT a tie" in greedy.details[0]
    assert not prove_state(tiny_target, prompts[:2], drafts, QUICK).passed


def test_noise_by_step_instead_of_position_fails_the_text_of_a_seed(tiny_target, draft_model, prompts, monkeypatch):
    choose = Sampler.choose

    def by_step(self, logits, path):
        kept, self.context = self.context, [*self.context, *[0] * len(path)]
        self.context = kept[: len(kept) - len(path)] if path else kept
        token = choose(self, logits, path)
        self.context = kept
        return token

    monkeypatch.setattr(Sampler, "choose", by_step)
    drafts = {"draft_model": draft_model}
    assert prove_texts("greedy text", tiny_target, prompts[:2], drafts, Sampling(), QUICK).passed
    assert prove_seeds(tiny_target, prompts[:2], drafts, QUICK.sampling, QUICK).passed is False


WRONG_RULES = {
    "rejection, all drafts accepted": ("decode.sampling.Sampler.flip", lambda self, probability: True),
    "rejection, residual is p": ("decode.accept.residual", lambda p, q: p),
    "block, residual is p": ("decode.accept.residual", lambda p, q: p / p.sum()),
}


@pytest.mark.parametrize("case", ["rejection", "block", *WRONG_RULES])
def test_a_rule_with_another_law_fails_the_law_check(make_tiny_llama, prompts, monkeypatch, case):
    """Of eight tokens, so that drafts of a model with its own law are often possible and often refused."""
    target, other = (Target(make_tiny_llama(vocab_size=8, seed=seed)) for seed in (0, 2))
    if case in WRONG_RULES:
        monkeypatch.setattr(*WRONG_RULES[case])
    accept = case.split(",")[0]
    grow = Chain(2, draw="without_replacement")
    drafts = {"draft_model": DraftModel(other, target), "grow": grow, "accept": accept}
    check = prove_law(target, [5, 3, 1, 7], drafts, Settings(accept=accept, samples=350))
    assert check.passed == (case not in WRONG_RULES), check
    assert check.counts["accepted"] > 400


def test_a_text_of_probability_zero_fails_whatever_its_frequency(tiny_target, prompts, monkeypatch):
    choose = Sampler.choose

    def rarely_worst(self, logits, path):
        unlucky = self.key(9, len(self.context)) % 60 == 0
        return int(logits.argmin()) if unlucky else choose(self, logits, path)

    monkeypatch.setattr(Sampler, "choose", rarely_worst)
    check = prove_law(tiny_target, prompts[0], {}, QUICK)
    assert check.passed is False
    assert 0 < check.counts["impossible"] < 10
    assert "came 1 times" in check.details[-1]
    assert "have probability 0" in check.summary


def test_a_law_of_one_text_is_not_tested_and_few_samples_prove_little(tiny_target, prompts):
    cold = prove_law(tiny_target, prompts[0], {}, Settings(temperature=0.001, samples=50))
    assert cold.passed is None
    assert "not tested" in cold.summary
    assert cold.warnings
    few = prove_law(tiny_target, prompts[0], {}, Settings(samples=50))
    assert few.passed
    assert few.counts["distance"] > 0.3
    assert "gross errors" in few.warnings[0]


def test_a_near_tie_is_shown_and_counted_and_not_failed(make_tiny_llama, prompts, monkeypatch):
    """Two tokens have one row of the lm_head, and passes over drafts round the second of them up."""
    model = make_tiny_llama(dtype=torch.float32)
    plain = generate(Target(model, pack=False), prompts[0], max_new_tokens=4, eos_ids=()).token_ids
    first, second = plain[2], 319
    model.lm_head.weight.data[second] = model.lm_head.weight.data[first]
    target = Target(model, pack=False)
    score = Session.score

    def rounded(self, trees):
        out = score(self, trees)
        if trees[0].shape.size > 1:
            out.logits[..., second] += bump
        return out

    monkeypatch.setattr(Session, "score", rounded)
    drafts = {"draft_model": DraftModel(target, target)}
    bump = 1e-5
    check = prove_texts("greedy text", target, prompts[:1], drafts, Sampling(), QUICK)
    assert check.passed
    assert (check.counts["identical"], check.counts["near_ties"], check.counts["failures"]) == (0, 2, 0)
    assert [line.split(":")[0] for line in check.details] == ["prompt 0 alone", "prompt 0 in the batch"]
    assert f"{first} or {second}" in check.details[0]
    assert "near tie" in check.details[0]
    assert "0 of 2 texts identical, 2 near ties" in check_lines(check)[0]
    bump = 50.0
    assert not prove_texts("greedy text", target, prompts[:1], drafts, Sampling(), QUICK).passed


def test_where_nothing_is_drafted_nothing_is_proved(tiny_target, prompts):
    never = PromptLookup(max_ngram=30, min_ngram=30)
    checks = list(prove(tiny_target, prompts[:2], {"proposer": never}, Settings(max_new_tokens=4, samples=50)))
    assert outcomes(checks) == [None, None, None, None]
    assert all(check.summary.startswith("not tested: nothing was drafted in ") for check in checks)
    assert verdict_lines(checks, 1e-6)[1].startswith("NOTHING PROVED")


def test_drafts_that_are_never_accepted_are_warned_of(tiny_target, prompts, oracles, monkeypatch):
    unlikely = oracles.Scripted(lambda text: [317], 2)
    state = type(unlikely.begin(1, shared_noise=True))
    monkeypatch.setattr(state, "check", lambda *arguments: None, raising=False)
    checks = list(prove(tiny_target, prompts[:2], {"proposer": unlikely}, Settings(max_new_tokens=4, samples=50)))
    assert outcomes(checks) == [True, True, True, True]
    assert all("no draft was accepted" in check.warnings[-1] for check in checks)
    lines = [*(line for check in checks for line in check_lines(check)), *verdict_lines(checks, 1e-6)]
    assert sum("warning: no draft was accepted" in line for line in lines) == 4
    assert "Mind the warnings" in lines[-2]


@pytest.mark.parametrize(("accept", "seed"), [("match", 2), ("block", 0)])
def test_float16_passes_the_state_check(make_tiny_llama, prompts, accept, seed):
    target = Target(make_tiny_llama(dtype=torch.float16, seed=1))
    drafts = {"draft_model": DraftModel(Target(perturbed(target.model, 0.05)), target), "accept": accept}
    check = prove_state(target, prompts, drafts, Settings(accept=accept, max_new_tokens=32, seed=seed))
    assert check.passed, check.details


def test_bfloat16_has_near_ties_and_passes(make_tiny_llama, prompts):
    target = Target(make_tiny_llama(dtype=torch.bfloat16))
    drafts = {"draft_model": DraftModel(Target(perturbed(target.model, 0.05)), target)}
    settings = Settings(max_new_tokens=32, samples=100, batch=5)
    checks = list(prove(target, prompts, drafts, settings))
    assert outcomes(checks) == [True, True, True, True], checks


@pytest.mark.parametrize("size", [2, 3])
def test_texts_in_batches_are_compared_with_plain_batches(tiny_target, draft_model, prompts, size):
    settings = Settings(max_new_tokens=8, batch=size)
    penalty = Sampling(temperature=1.2, repetition_penalty=1.3)
    check = prove_seeds(tiny_target, prompts, {"draft_model": draft_model}, penalty, settings)
    alone = prove_seeds(tiny_target, prompts, {"draft_model": draft_model}, penalty, QUICK)
    assert check.passed
    assert check.counts["identical"] == check.counts["texts"] == len(prompts)
    assert alone.counts["identical"] == alone.counts["texts"] == 2 * len(prompts)
    assert 2 * check.counts["tokens"] == alone.counts["tokens"]
    assert check.summary.endswith("temperature 1.2, repetition penalty 1.3")


def test_a_float32_head_on_a_float64_target_passes_the_state_check(tiny_target, good_head, prompts):
    drafts = {"head": copy.deepcopy(good_head).float(), "grow": TREE}
    check = prove_state(tiny_target, prompts[:2], drafts, QUICK)
    assert check.passed, check.details


def test_a_float32_head_on_a_bfloat16_target_passes_the_state_check(make_tiny_llama, prompts):
    target = Target(make_tiny_llama(dtype=torch.bfloat16))
    config = head_class("eagle3").Config
    torch.manual_seed(0)
    head = create_head("eagle3", config(**target_sizes(target, config), feature_layers=(1, 2)), target)
    check = prove_state(target, prompts[:2], {"head": head.eval(), "grow": TREE}, QUICK)
    assert check.passed, check.details
