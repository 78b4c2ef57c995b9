"""Enumeration takes outcomes of chance for independent; here it is seen that real runs draw them so.

All noise comes from `noise.gumbel` and `noise.uniform`, so their keys are recorded: none may be used for two decisions,
and the target's own is a function of row and position.
"""

import pytest

from decode import Chain, Sampling, StaticTree, generate, noise
from decode.accept import Block, Match, Rejection
from decode.children import Children
from decode.sampling import Sampler
from decode.typical import Typical

PROMPTS = [[40, 41, 42, 43], [300, 5], [7]]
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DRAWS = ["without_replacement", "with_replacement", "hybrid"]


@pytest.fixture
def used(monkeypatch) -> list[int]:
    """Keys of all noise, in order."""
    keys: list[int] = []
    gumbel, uniform = noise.gumbel, noise.uniform

    def record_gumbel(parts, token_ids):
        keys.extend(parts)
        return gumbel(parts, token_ids)

    def record_uniform(part):
        keys.append(part)
        return uniform(part)

    monkeypatch.setattr(noise, "gumbel", record_gumbel)
    monkeypatch.setattr(noise, "uniform", record_uniform)
    return keys


def run(target, head, rule, grow):
    options = {"sampling": Sampling(temperature=2.0, seed=4), "max_new_tokens": 24, "eos_ids": ()}
    return generate(target, PROMPTS, head=head, grow=grow, accept=rule, **options)


@pytest.mark.parametrize("rule", [Match(), Rejection(), Typical()], ids=["match", "rejection", "typical"])
@pytest.mark.parametrize("draw", DRAWS)
def test_no_noise_is_used_twice_in_drawn_trees(tiny_target, good_head, used, rule, draw):
    run(tiny_target, good_head, rule, StaticTree(TREE, draw=draw))
    assert len(used) > 100
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("draw", DRAWS)
def test_no_noise_is_used_twice_in_drawn_blocks(tiny_target, good_head, used, draw):
    results = run(tiny_target, good_head, Block(), Chain(3, draw=draw))
    assert sum(result.stats.steps for result in results) < 3 * 23  # something was accepted
    assert len(used) > 100
    assert len(set(used)) == len(used)


def test_drafts_keyed_by_position_alone_meet_their_noise_again(tiny_target, good_head, used, monkeypatch):
    """What a block looked at and dropped; `test_mutants_of_blocks_and_hybrids` shows that it changes the law."""

    def by_position(self, rows, purpose, depth, rank=0):
        keys = [row.key(purpose, len(row.context) + depth - 1) for row in rows]
        return noise.gumbel(keys, self.columns)[:, None]

    monkeypatch.setattr(Children, "_noise", by_position)
    run(tiny_target, good_head, Block(), Chain(3, draw="without_replacement"))
    assert len(set(used)) < len(used)


def test_independent_siblings_need_noise_of_their_own(tiny_target, good_head, used, monkeypatch):
    own = Children._noise
    monkeypatch.setattr(Children, "_noise", lambda self, rows, purpose, depth, rank=0: own(self, rows, purpose, depth))
    run(tiny_target, good_head, Rejection(), StaticTree(TREE, draw="with_replacement"))
    assert len(set(used)) < len(used)


def target_noise(target, used, monkeypatch, **drafts) -> tuple[dict, list]:
    """(row, position of the token) -> keys that chose it; and the texts."""
    chosen: dict[tuple[int, int], set[int]] = {}
    choose = Sampler.choose

    def record(self, logits, path):
        place = (self.context[0], len(self.context) + len(path))
        start = len(used)
        token = choose(self, logits, path)
        chosen.setdefault(place, set()).update(used[start:])
        return token

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", record)
        results = generate(
            target, PROMPTS, sampling=Sampling(temperature=2.0, seed=4), max_new_tokens=24, eos_ids=(), **drafts
        )
    return chosen, [result.token_ids for result in results]


def is_keyed_by_position(target, head, used, monkeypatch) -> bool:
    """The target's noise: one key for each row and position, another for each, the same whatever is drafted."""
    plain, texts = target_noise(target, used, monkeypatch)
    good = all(len(keys) == 1 for keys in plain.values()) and len(plain) == 3 * 24
    good &= len(set().union(*plain.values())) == len(plain)
    for grow in (StaticTree(TREE), Chain(3), StaticTree(TREE, draw="hybrid")):
        drafted, same = target_noise(target, used, monkeypatch, head=head, grow=grow)
        good &= all(drafted.get(place) == keys for place, keys in plain.items()) and same == texts
    return good


def test_the_targets_noise_is_a_function_of_row_and_position(tiny_target, good_head, used, monkeypatch):
    assert is_keyed_by_position(tiny_target, good_head, used, monkeypatch)


def noise_of_target_and_drafts(target, head, used, monkeypatch, rule, draw) -> tuple[set, set]:
    chosen, _ = target_noise(target, used, monkeypatch)
    used.clear()
    run(target, head, rule, StaticTree(TREE, draw=draw))
    return set().union(*chosen.values()), set(used)


def test_drafts_have_noise_of_their_own_unless_it_is_to_be_shared(tiny_target, good_head, used, monkeypatch):
    arguments = (tiny_target, good_head, used, monkeypatch)
    target, other = noise_of_target_and_drafts(*arguments, Rejection(), "without_replacement")
    assert not target & other
    target, ranked = noise_of_target_and_drafts(*arguments, Match(), "none")
    assert target <= ranked  # of the very positions that drafts are for


@pytest.mark.parametrize("mistake", ["step", "two positions", "rows"])
def test_wrong_keys_of_the_targets_noise_are_found(tiny_target, good_head, used, monkeypatch, mistake):
    right = Sampler.key
    wrong = {
        "step": lambda self, purpose, position: right(self, purpose, len(self.context)),
        "two positions": lambda self, purpose, position: right(self, purpose, position // 2),
        "rows": lambda self, purpose, position: noise.key(self.seed, purpose, position),
    }
    monkeypatch.setattr(Sampler, "key", wrong[mistake])
    assert not is_keyed_by_position(tiny_target, good_head, used, monkeypatch)


def test_one_purpose_for_all_noise_is_found(tiny_target, good_head, used, monkeypatch):
    right = Sampler.key
    monkeypatch.setattr(Sampler, "key", lambda self, purpose, position: right(self, noise.TARGET, position))
    arguments = (tiny_target, good_head, used, monkeypatch)
    target, other = noise_of_target_and_drafts(*arguments, Rejection(), "without_replacement")
    assert target & other  # coins
