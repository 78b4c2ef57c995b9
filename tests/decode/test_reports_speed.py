"""Public reports of leaks, hidden passes and numbers that flatter: counted, not timed."""

import gc
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from decode import Chain, DraftModel, PromptLookup, Sampling, StaticTree, Target, generate, stream

PROMPT = [40, 41, 42]
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))


@pytest.fixture
def held() -> Iterator[Callable[[], tuple[int, int]]]:
    """A function that counts the tensors, and their bytes, that were made in this test and are alive."""

    def count() -> tuple[int, int]:
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return len(tensors), sum(storages.values())

    gc.collect()
    gc.freeze()  # what was there before is not looked at: there are a million objects
    yield count
    gc.unfreeze()


@pytest.fixture(scope="module")
def long_target(make_tiny_llama) -> Target:
    model = make_tiny_llama()
    model.config.max_position_embeddings = 4096
    return Target(model)  # without a tokenizer, which would decode the whole text for each piece of a stream


def options_for(name: str, target, head) -> dict:
    model = DraftModel(Target(target.model, target.tokenizer), target)
    return {
        "plain": {},
        "lookup": {"proposer": PromptLookup(length=3)},
        "head": {"head": head, "grow": TREE},
        "model": {"draft_model": model, "grow": Chain(1)},
    }[name]


@pytest.mark.parametrize(("draft", "steps"), [("wrong", 2000), ("lookup", 300), ("head", 300), ("model", 300)])
def test_memory_is_flat_over_a_long_text(long_target, good_head, oracles, held, draft, steps):
    wrong = {"proposer": oracles.Scripted(lambda text: [(text[-1] + 7) % 320])}  # nearly a step for each token
    options = wrong if draft == "wrong" else options_for(draft, long_target, good_head)
    sampling = Sampling(temperature=1.5 * (draft != "wrong"), seed=1)
    counts = []
    pieces = stream(long_target, PROMPT, **options, sampling=sampling, max_new_tokens=2 * steps, eos_ids=())
    for number, _ in enumerate(pieces):
        if number in (steps // 10, steps // 2, steps):
            counts.append(held())
        if number == steps:
            break
    (tensors, size), (_, later), (_, last) = counts
    assert tensors >= 4  # keys and values of two layers
    assert [count for count, _ in counts] == [tensors] * 3
    if draft == "model":  # its cache doubles where it is full: at most twice what the text needs
        slot = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, size, bytes
        assert last - size <= slot * 2 * 2 * steps
    else:
        assert size == later == last


@pytest.mark.parametrize("draft", ["plain", "lookup", "head", "model"])
def test_a_hundred_calls_leave_nothing_behind(tiny_target, good_head, held, draft):
    options = {**options_for(draft, tiny_target, good_head), "max_new_tokens": 3, "eos_ids": ()}
    for prompt in ([5, 6, 7], [8], [[5, 6], [7]]):
        generate(tiny_target, prompt, **options)  # fills the caches of shapes
    before = held()
    for number in range(100):
        generate(tiny_target, [[5, 6, 7], [8], [[5, 6], [7]]][number % 3], **options)
        if number % 10 == 0:
            next(stream(tiny_target, [5, 6, 7], **options))  # left midway
    assert held() == before


@pytest.fixture
def passes(monkeypatch) -> list[Target]:
    """The model of each pass: the target, or a draft model."""
    made: list[Target] = []
    forward = Target.forward

    def record(self, *args):
        made.append(self)
        return forward(self, *args)

    monkeypatch.setattr(Target, "forward", record)
    return made


@pytest.mark.parametrize("draft", ["plain", "lookup", "head", "model"])
def test_a_step_is_one_pass_of_the_target(tiny_target, good_head, prompts, passes, draft):
    options = options_for(draft, tiny_target, good_head)
    passes.clear()
    results = generate(tiny_target, prompts, **options, max_new_tokens=12, eos_ids=())
    assert passes.count(tiny_target) == 1 + max(result.stats.steps for result in results)
    assert (len(passes) > passes.count(tiny_target)) == (draft == "model")


@pytest.mark.parametrize(("wrong", "offered"), [(False, [8, 8]), (True, [16, 8])])
def test_an_acceptance_of_all_drafts_does_not_hide_that_few_were_made(tiny_target, oracles, wrong, offered):
    """Right drafts in every fourth step only, and wrong ones in another: offers, rates and tokens per step tell."""
    answer = oracles.slow_decode(tiny_target, PROMPT, Sampling(), 50)
    right, bad = oracles.self_draft([PROMPT + answer], 2), oracles.anti_draft([PROMPT + answer], 2)
    turns = itertools.count(1)

    def propose(text: list[int]) -> list[int]:
        turn = next(turns) % 4
        return right.propose(text) if turn == 0 else bad.propose(text) if turn == 2 and wrong else []

    result = generate(tiny_target, PROMPT, proposer=oracles.Scripted(propose), max_new_tokens=49, eos_ids=())
    stats = result.stats
    assert (stats.steps, stats.offered, stats.accepted) == (32, offered, [8, 8])
    assert stats.accept_rates == [0.5 if wrong else 1.0, 1.0]
    assert stats.tokens_per_step == 48 / 32
