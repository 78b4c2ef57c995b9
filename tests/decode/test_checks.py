"""`check=True` is silent on sound state and names what is broken in every other."""

from dataclasses import replace

import pytest
import torch

import decode.session
from decode import Chain, DraftModel, PromptLookup, Sampling, StaticTree, Target, generate, stream
from decode.checks import StateError, assert_close
from decode.draft_model import DraftModelDrafter
from decode.lookup import _LookupState
from decode.session import Session
from heads.cache import TreeCache
from heads.medusa import MedusaDrafter

LIMIT = 10
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
DRAWN = replace(TREE, draw="hybrid")
PROPOSERS = ["plain", "lookup", "head", "head tree", "draft model", "draft model tree", "self draft"]


@pytest.fixture(scope="module")
def draft(tiny_target, make_tiny_llama) -> DraftModel:
    """Right about half of the time."""
    return DraftModel(Target(make_tiny_llama().bfloat16().double(), tiny_target.tokenizer), tiny_target)


@pytest.fixture(scope="module")
def proposers(tiny_target, good_head, draft) -> dict[str, dict[str, object]]:
    """Arguments of `generate` for each proposer."""
    return {
        "plain": {},
        "lookup": {"proposer": PromptLookup(length=4)},
        "head": {"head": good_head},
        "head tree": {"head": good_head, "grow": TREE},
        "draft model": {"draft_model": draft},
        "draft model tree": {"draft_model": draft, "grow": TREE},
        "self draft": {"draft_model": DraftModel(tiny_target, tiny_target), "grow": Chain(3)},
    }


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalty"])
def test_sound_state_passes_and_the_text_stays(tiny_target, proposers, prompts, samplings, proposer, name):
    options = {"sampling": replace(samplings[name], seed=4), "max_new_tokens": LIMIT}
    for some, eos_ids in ((prompts, None), (prompts, (5, 17, 107, 214)), (prompts[:1], ())):
        plain = generate(tiny_target, some, eos_ids=eos_ids, **options)
        checked = generate(tiny_target, some, eos_ids=eos_ids, check=True, **proposers[proposer], **options)
        assert [result.token_ids for result in checked] == [result.token_ids for result in plain]
    deltas = stream(tiny_target, prompts[0], check=True, eos_ids=(), **proposers[proposer], **options)
    assert [token for delta in deltas for token in delta.token_ids] == checked[0].token_ids


@pytest.mark.parametrize("accept", ["rejection", "block", "typical"])
def test_sound_state_passes_under_every_rule(tiny_target, good_head, draft, prompts, accept):
    for source in ({"head": good_head}, {"draft_model": draft}):
        grow = Chain(3, draw="with_replacement") if accept == "block" else DRAWN
        options = {**source, "grow": grow, "accept": accept, "sampling": Sampling(temperature=1.2, seed=1)}
        checked = generate(tiny_target, prompts, check=True, max_new_tokens=LIMIT, **options)
        usual = generate(tiny_target, prompts, max_new_tokens=LIMIT, **options)
        assert [result.token_ids for result in checked] == [result.token_ids for result in usual]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_passes(tiny_tokenizer, make_tiny_llama, prompts, dtype):
    target = Target(make_tiny_llama(dtype=dtype), tiny_tokenizer)
    draft = DraftModel(target, target)
    for options in ({}, {"draft_model": draft, "grow": TREE}, {"proposer": PromptLookup()}):
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
            generate(target, prompts, sampling=sampling, max_new_tokens=20, eos_ids=(), check=True, **options)


@pytest.fixture
def breaks(monkeypatch):
    """Run `harm(session)` after a session's n-th commit of accepted paths."""

    def install(harm, after: int = 3) -> None:
        commit, seen = Session.commit, []

        def harmful(self, paths):
            commit(self, paths)
            seen.append(self)
            if len(seen) == after:
                harm(self)

        monkeypatch.setattr(Session, "commit", torch.inference_mode()(harmful))

    return install


def swap_rows(session: Session) -> None:
    for block in (*session.cache._keys, *session.cache._values):
        block[[0, 1]] = block[[1, 0]]


def spoil_a_value(session: Session) -> None:
    session.cache._values[0][1, 1, 2, 3] += 1e-4


def spoil_a_key(session: Session) -> None:
    session.cache._keys[1][1, 0, session.lengths[1] - 1] *= 1.001


def drop_a_token(session: Session) -> None:
    session.cache.lengths[1] -= 1


def add_a_token(session: Session) -> None:
    session.cache.lengths[1] += 1


HARMS = {
    "row order": (swap_rows, r"row 0, layer 0: cached keys against a fresh prefill"),
    "a value": (spoil_a_value, r"row 1, layer 0: cached values against a fresh prefill: differs by \S+ of the largest"),
    "the last key": (spoil_a_key, r"row 1, layer 1: cached keys"),
    "a length too short": (drop_a_token, r"the cache holds \[8, 7\] tokens, but .* have \[8, 8\]"),
    "a length too long": (add_a_token, r"the cache holds \[8, 9\] tokens, but .* have \[8, 8\]"),
}


@pytest.mark.parametrize("name", HARMS)
@pytest.mark.parametrize("check", [True, False])
def test_a_broken_target_cache_is_named(tiny_target, breaks, name, check):
    harm, message = HARMS[name]
    breaks(harm)
    prompts = [[40, 41, 42, 43, 44], [7, 8, 9, 7, 8]]
    if check:
        with pytest.raises(StateError, match=message):
            generate(tiny_target, prompts, max_new_tokens=LIMIT, eos_ids=(), check=True)
    else:
        generate(tiny_target, prompts, max_new_tokens=LIMIT, eos_ids=())  # goes on as if nothing had happened


def test_a_mask_that_shows_a_dropped_slot_is_named(tiny_target, monkeypatch):
    """What lies behind a row is overwritten after every step, so that it cannot be read unnoticed."""
    visible = decode.session.tree_visible

    def one_too_many(shapes, lengths, device, **options):
        mask = visible(shapes, lengths, device, **options)
        mask[0, :, lengths[0] + 1] = True
        return mask

    monkeypatch.setattr(decode.session, "tree_visible", one_too_many)
    with pytest.raises(StateError, match=r"row 0, layer 1: cached keys .* differs by"):
        generate(tiny_target, [[5], [7, 8, 9, 7, 8]], max_new_tokens=LIMIT, eos_ids=(), check=True)


def test_a_fault_in_the_last_layer_alone_is_named(tiny_tokenizer, make_tiny_llama, monkeypatch):
    """No K/V depend on the last layer, only the states and logits of the step: a model of one layer has no other."""
    model = make_tiny_llama()
    del model.model.layers[1]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 1
    target = Target(model, tiny_tokenizer)
    visible = decode.session.tree_visible

    def one_too_few(shapes, lengths, device, **options):
        mask = visible(shapes, lengths, device, **options)
        mask[0, :, 0] = False
        return mask

    monkeypatch.setattr(decode.session, "tree_visible", one_too_few)
    with pytest.raises(StateError, match="row 0"):
        generate(target, [5, 6, 7], max_new_tokens=LIMIT, eos_ids=(), check=True)


def test_a_slot_that_was_not_written_is_read_as_nan(tiny_target, monkeypatch):
    write = TreeCache.write

    def forgetful(self, layer, keys, values):
        stale = self._keys[layer][:, :, : self.used].clone() if layer < len(self._keys) else None
        seen, others = write(self, layer, keys, values)
        if stale is not None and bool(stale.isnan().any()):  # in the session that is checked, not in a fresh one
            seen[:, :, -1] = stale[:, :, -1]
        return seen, others

    monkeypatch.setattr(TreeCache, "write", forgetful)
    with pytest.raises(StateError, match=r"row 0, layer 0: cached keys .* differs by nan"):
        generate(tiny_target, [5, 6], max_new_tokens=LIMIT, eos_ids=(), check=True)


def test_a_drafter_that_is_one_token_behind_is_named(tiny_target, good_head, draft, monkeypatch):
    for drafter, options in ((MedusaDrafter, {"head": good_head}), (DraftModelDrafter, {"draft_model": draft})):
        sync, last = drafter.sync, {}

        def late(self, token_ids, hidden, lengths, features=None, sync=sync, last=last):
            logits = sync(self, token_ids, hidden, lengths)
            before, last[self] = last.get(self, logits), logits
            return before

        with monkeypatch.context() as patch:
            patch.setattr(drafter, "sync", late)
            with pytest.raises(StateError, match=r"row 0: the drafter's logits after the root against a fresh"):
                generate(tiny_target, [5, 6, 7], max_new_tokens=LIMIT, eos_ids=(), check=True, **options)


@pytest.mark.parametrize("grow", [Chain(3), TREE])
def test_a_stale_slot_in_the_draft_models_cache_is_named(tiny_target, draft, monkeypatch, grow):
    """Of two rows the second has an accepted token's K/V replaced by its neighbour's."""
    advance, calls = DraftModelDrafter._advance, []

    def harmful(self, session, token_ids, lengths):
        logits = advance(self, session, token_ids, lengths)
        calls.append(self)
        if len(calls) == 2:
            with torch.inference_mode():
                session.cache._values[0][1, :, 1] = session.cache._values[0][1, :, 2]
        return logits

    monkeypatch.setattr(DraftModelDrafter, "_advance", harmful)
    with pytest.raises(StateError, match=r"row 1: the drafter's logits .* differs by"):
        generate(
            tiny_target, [[5, 6], [7, 8, 9]], draft_model=draft, grow=grow, max_new_tokens=20, eos_ids=(), check=True
        )


@pytest.mark.parametrize("harm", ["lost", "stale"])
def test_a_stale_index_of_n_grams_is_named(tiny_target, prompts, monkeypatch, harm):
    propose = _LookupState.propose

    def harmful(self, roots, rows):
        trees = propose(self, roots, rows)
        for ends in self._index.ends[1:]:
            ends.update(dict.fromkeys(ends, 1)) if harm == "stale" else ends.clear()
        return trees

    monkeypatch.setattr(_LookupState, "propose", harmful)
    with pytest.raises(StateError, match=r"row 1: the index of n-grams finds \[.*\], a fresh one \[.*\]"):
        generate(tiny_target, [[5], prompts[3]], proposer=PromptLookup(), max_new_tokens=40, eos_ids=(), check=True)


def test_closeness_is_relative_to_the_largest_entry_and_sees_shapes_and_nan():
    large = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert_close(large, large + 1e-4, "a")
    assert_close(torch.empty(2, 0), torch.empty(2, 0), "a")
    with pytest.raises(StateError, match=r"a: differs by 2e-06 of the largest entry \(allowed 1e-09\)"):
        assert_close(large, large + torch.tensor([0.0, 2.0]), "a")
    for bad in (torch.nan, torch.inf):
        with pytest.raises(StateError, match="differs by"):
            assert_close(torch.tensor([bad, 0.0]), torch.zeros(2), "a")
    with pytest.raises(StateError, match=r"shape \(2,\) instead of \(2, 1\)"):
        assert_close(large, large[:, None], "a")
