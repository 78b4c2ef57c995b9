"""Dynamic trees change the speed, not the text: with heads and draft models, alone and in batches, adaptive or not."""

from dataclasses import dataclass, replace

import pytest

from decode import Drafting, DraftModel, DynamicTree, Sampling, Target, generate
from decode.methods import our_ways
from heads import HeadNotes, load_head, save_head

TREES = {
    "tree": DynamicTree(3, 4, 9),
    "adaptive tree": DynamicTree(3, 3, 12, confidence=0.05),
    "adaptive chain": DynamicTree(3, 1, 4, confidence=0.2),
    "own temperature": DynamicTree(2, 2, 5, temperature=0.3),
}


@pytest.fixture(scope="module")
def plain(tiny_target, prompts, samplings):
    """Texts of plain decoding."""
    return {
        name: [
            out.token_ids for out in generate(tiny_target, prompts, sampling=sampling, max_new_tokens=20, eos_ids=())
        ]
        for name, sampling in seeded(samplings).items()
    }


@pytest.fixture(scope="module")
def draft(tiny_target, make_tiny_llama, tiny_tokenizer) -> DraftModel:
    """A draft model that is right now and then: the target's weights and some noise."""
    model = make_tiny_llama()
    for parameter in model.parameters():
        parameter.data.mul_(1.02)
    return DraftModel(Target(model, tiny_tokenizer, name="nearly"), tiny_target)


def seeded(samplings) -> dict[str, Sampling]:
    chosen = ("greedy", "sampled", "penalty", "processor")
    return {name: replace(samplings[name], seed=4) for name in chosen}


@pytest.mark.parametrize("grow", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalty", "processor"])
def test_with_a_head_the_text_is_plain_decodings(tiny_target, good_head, prompts, samplings, plain, grow, name):
    out = generate(
        tiny_target, prompts, head=good_head, grow=grow, sampling=seeded(samplings)[name], max_new_tokens=20, eos_ids=()
    )
    assert [result.token_ids for result in out] == plain[name]
    accepted = sum(sum(result.stats.accepted) for result in out)
    assert accepted > 0


@pytest.mark.parametrize("grow", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_with_a_draft_model_too_and_its_cache_is_in_order(tiny_target, draft, prompts, samplings, plain, grow, name):
    options = {"sampling": seeded(samplings)[name], "max_new_tokens": 20, "eos_ids": (), "check": True}
    out = generate(tiny_target, prompts, draft_model=draft, grow=grow, **options)
    assert [result.token_ids for result in out] == plain[name]
    assert sum(sum(result.stats.accepted) for result in out) > 0


@pytest.mark.parametrize("accept", ["rejection", "typical"])
def test_greedy_text_is_the_same_with_any_rule(tiny_target, good_head, prompts, plain, accept):
    options = {"head": good_head, "grow": TREES["tree"], "max_new_tokens": 20, "eos_ids": ()}
    out = generate(tiny_target, prompts, accept=accept, **options)
    assert [result.token_ids for result in out] == plain["greedy"]


def test_block_verification_takes_dynamic_chains_and_refuses_trees(tiny_target, good_head, prompts, plain):
    options = {"head": good_head, "accept": "block", "max_new_tokens": 20, "eos_ids": ()}
    out = generate(tiny_target, prompts, grow=TREES["adaptive chain"], **options)
    assert [result.token_ids for result in out] == plain["greedy"]
    with pytest.raises(ValueError, match="for chains"):
        generate(tiny_target, prompts, grow=TREES["tree"], **options)


@dataclass
class Recording:
    """Grows like `grow` and remembers the trees of a single row."""

    grow: DynamicTree

    def __post_init__(self) -> None:
        self.depth, self.max_nodes, self.width = self.grow.depth, self.grow.max_nodes, self.grow.width
        self.trees = []

    def __call__(self, *args, **options):
        trees = self.grow(*args, **options)
        self.trees += trees
        return trees


@pytest.mark.parametrize("name", ["tree", "adaptive tree", "adaptive chain"])
def test_statistics_count_only_offers_that_were_made(tiny_target, good_head, prompts, name):
    recording = Recording(TREES[name])
    drafting = Drafting(good_head, recording)
    out = generate(tiny_target, prompts[0], proposer=drafting, max_new_tokens=40, eos_ids=())
    stats = out.stats
    assert len(recording.trees) == stats.steps
    sizes = {tree.shape.size for tree in recording.trees}
    assert len(sizes) > 2 or name == "tree"
    at, offered, accepted = 1, [0] * 3, [0] * 3
    for tree in recording.trees:
        node, depth = 0, 0
        while (children := tree.shape.children[node]) and depth < 40 - at - 1:  # no deeper than there is room
            offered[depth] += 1
            node = next((c for c in children if int(tree.token_ids[c]) == out.token_ids[at + depth]), None)
            if node is None:
                break
            accepted[depth] += 1
            depth += 1
        at += depth + 1
    assert at == 40
    length = len(stats.offered)
    assert stats.offered == offered[:length]
    assert stats.accepted == accepted[:length]
    assert not any(offered[length:])


def test_without_confidence_a_step_is_a_plain_one(tiny_target, tiny_head):
    out = generate(tiny_target, [5, 6], head=tiny_head, grow=DynamicTree(3, 2, 6, confidence=1.0), max_new_tokens=9)
    assert out.stats.steps == out.stats.tokens - 1
    assert out.stats.accept_rates == []


def test_a_folder_may_recommend_a_dynamic_tree(tiny_target, tiny_head, tmp_path):
    settings = {"depth": 3, "width": 2, "size": 6, "confidence": 0.1}
    save_head(tiny_head, tmp_path, target=tiny_target, notes=HeadNotes(tree=settings))
    plain = generate(tiny_target, [5, 6, 7], max_new_tokens=9).token_ids
    assert generate(tiny_target, [5, 6, 7], head=tmp_path, max_new_tokens=9).token_ids == plain
    ways = our_ways(tiny_target, {"medusa": load_head(tmp_path, tiny_target)}, chain=2, costs=lambda: None)
    assert {name for name in ways if "dynamic" in name} == {"medusa tree 6 (dynamic)"}
