"""Rules, drafts and trees that do not go together are refused by name before anything is decoded."""

import pytest
from transformers import LogitsProcessor

from decode import (
    Block,
    Chain,
    Drafting,
    DraftModel,
    PromptLookup,
    Sampling,
    StaticTree,
    Target,
    Typical,
    generate,
    stream,
)
from decode.adaptive import Adaptive, Arm
from decode.session import Session

GOOD = [5, 6, 7]
TREE = StaticTree(((0,), (1,), (0, 0)))


class Nothing(LogitsProcessor):
    """Changes nothing."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture
def no_pass(monkeypatch):
    """Fail when anything is decoded."""
    monkeypatch.setattr(Session, "prefill", lambda *_: pytest.fail("a pass was made"))


@pytest.fixture(scope="module")
def draft(tiny_target, make_tiny_llama) -> DraftModel:
    return DraftModel(Target(make_tiny_llama(seed=5), tiny_target.tokenizer), tiny_target)


CHAINS = "block verification is for chains, but the drafts are a tree in which a node has 2 children; give grow=Chain"
STATE = r"asks logits processors about drafts that it then drops.*use accept='match' or 'rejection'"
SEVERAL = "give one of head, draft_model and proposer, not several"
BAD = {
    "block on a draft model's tree": ({"accept": "block", "draft_model": "DRAFT", "grow": TREE}, CHAINS),
    "block on a head's tree": ({"accept": "block", "head": "HEAD", "grow": TREE}, CHAINS),
    "block on the head's own tree": ({"accept": "block", "head": "TREE HEAD"}, CHAINS),
    "block on a drafting's tree": ({"accept": Block(), "proposer": "DRAFTING"}, CHAINS),
    "block on one of a controller's trees": ({"accept": "block", "proposer": "ADAPTIVE"}, CHAINS),
    "block and a processor": ({"accept": "block", "sampling": Sampling(processors=[Nothing()])}, f"Block {STATE}"),
    "typical and a processor": (
        {"accept": "typical", "sampling": Sampling(processors=[Nothing()])},
        f"Typical {STATE}",
    ),
    "an unknown rule": ({"accept": "typicall"}, r"accept must be one of \['block', 'match', 'rejection', 'typical'\]"),
    "head and draft model": ({"head": "HEAD", "draft_model": "DRAFT"}, SEVERAL),
    "proposer and draft model": ({"proposer": PromptLookup(), "draft_model": "DRAFT"}, SEVERAL),
    "head and proposer": ({"head": "HEAD", "proposer": PromptLookup()}, SEVERAL),
    "all three": ({"head": "HEAD", "proposer": PromptLookup(), "draft_model": "DRAFT"}, SEVERAL),
    "grow alone": ({"grow": Chain(2)}, "grow shapes the drafts of a head or a draft model, but neither was given"),
    "grow and proposer": ({"grow": Chain(2), "proposer": PromptLookup()}, "grow shapes the drafts"),
    "a tree too wide": (
        {"draft_model": "DRAFT", "grow": StaticTree(tuple((rank,) for rank in range(321)))},
        "a node has 321 children, but the .*vocabulary has 320 tokens",
    ),
    "a draft model as head": ({"head": "DRAFT"}, "head is a draft model; pass it as draft_model"),
    "a class of rules": ({"accept": Block}, "accept must be one of"),
    "no rule": ({"accept": None}, "accept must be one of"),
    "a chain too deep": ({"draft_model": "DRAFT", "grow": Chain(257)}, "257 deep, but the head drafts 256 tokens"),
}


@pytest.mark.parametrize("verb", [generate, stream])
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_go_together_is_refused_before_any_pass(tiny_target, tiny_head, draft, no_pass, name, verb):
    arguments, message = BAD[name]
    tree_head = type(tiny_head)(tiny_head.config, tiny_target)
    tree_head.tree = [[0], [1], [0, 0]]
    made = {"HEAD": tiny_head, "TREE HEAD": tree_head, "DRAFT": draft, "DRAFTING": Drafting(draft, TREE)}
    made["ADAPTIVE"] = Adaptive(draft, (Arm(Chain(2), {1: 1.1}, (0.5,)), Arm(TREE, {1: 1.2}, (0.6,))))
    arguments = {key: made.get(value, value) if isinstance(value, str) else value for key, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        verb(tiny_target, GOOD, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Typical(epsilon=0.0), "0 < epsilon < 1 and delta > 0, got 0.0 and 0.3"),
        (lambda: Typical(epsilon=1.0), "0 < epsilon < 1"),
        (lambda: Typical(epsilon=float("nan")), "0 < epsilon < 1"),
        (lambda: Typical(delta=0.0), "delta > 0, got 0.09 and 0.0"),
        (lambda: Typical(delta=float("nan")), "delta > 0"),
        (lambda: Chain(3, draw="best"), "draw must be one of none, .*hybrid, got 'best'"),
        (lambda: Chain(0), "at least 1 token and at most 1024, got 0"),
        (lambda: Chain(100_000), "at most 1024, got 100000"),
        (lambda: Chain(3, temperature=1e-320), "temperature must be at least 0 .* 1e-06 or more"),
        (lambda: Chain(3, temperature="a"), "temperature must be at least 0 .*, got a"),
        (lambda: Chain(3, temperature=-0.1), "temperature must be at least 0 .*, got -0.1"),
        (lambda: StaticTree(((0,),), temperature=float("nan")), "temperature must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("accept", ["block", "typical"])
def test_a_rule_works_with_every_source_of_chains_and_with_penalties(tiny_target, tiny_head, draft, accept):
    """At temperature 0 the text is that of plain decoding; parameters without a state are no hindrance."""
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, bad_words_ids=[[7]])
    plain = generate(tiny_target, GOOD, sampling=sampling, max_new_tokens=10, eos_ids=())
    chains = Adaptive(tiny_head, (Arm(Chain(1), {1: 0.2}, (0.5,)), Arm(Chain(3), {1: 0.2}, (0.5, 0.1))))
    for source in ({}, {"head": tiny_head}, {"draft_model": draft}, {"proposer": PromptLookup()}, {"proposer": chains}):
        result = generate(tiny_target, GOOD, accept=accept, sampling=sampling, max_new_tokens=10, eos_ids=(), **source)
        assert result.token_ids == plain.token_ids


def test_a_block_rule_meets_a_foreign_proposers_tree_with_an_error(tiny_target, oracles):
    forked = oracles.Scripted(lambda text: ([8, 9], (-1, 0, 0)))
    with pytest.raises(ValueError, match="block verification is for chains"):
        generate(tiny_target, GOOD, proposer=forked, accept="block", max_new_tokens=5)


def test_a_draft_model_of_another_target_is_refused(tiny_target, make_tiny_llama, draft, monkeypatch):
    """Its vocabulary and device were checked against that target, not against this one."""
    other = Target(make_tiny_llama(vocab_size=340), tiny_target.tokenizer)
    monkeypatch.setattr(Session, "prefill", lambda *_: pytest.fail("a pass was made"))
    for options in ({"draft_model": draft}, {"proposer": Drafting(draft, Chain(2))}):
        with pytest.raises(ValueError, match="target"):
            generate(other, GOOD, **options)


def test_typical_keeps_more_drafts_the_lower_its_bound_and_says_that_it_is_not_exact(tiny_target, draft):
    assert not Typical().exact
    options = {"draft_model": draft, "grow": Chain(3), "max_new_tokens": 61, "eos_ids": ()}
    lowest, usual, highest = (
        generate(tiny_target, GOOD, accept=rule, sampling=Sampling(temperature=1.5, seed=0), **options)
        for rule in (Typical(1e-9, 1e-9), "typical", Typical(0.9, 9.0))
    )
    assert lowest.stats.tokens_per_step == 4.0
    assert 4.0 > usual.stats.tokens_per_step >= highest.stats.tokens_per_step
