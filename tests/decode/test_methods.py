"""The methods that `decode.bench` compares: names, what depends on temperature and rows, and transformers' own."""

import pytest
import torch

from decode import AdaptiveLookup, Chain, DraftModel, DynamicTree, PromptLookup, Sampling, Target, generate
from decode.adaptive import Adaptive
from decode.costs import Cost, VerifyCosts
from decode.measure import measure
from decode.methods import check_proposers, name_heads, our_runs, our_ways, select, their_runs
from decode.propose import Drafting
from decode.tuned import Choice, Plan, TunedArm, plan_key

COSTS = VerifyCosts([Cost(1, 20, 1, 0.1, 0.1, 0.1), Cost(1, 20, 4, 0.15, 0.15, 0.15)])
PROMPTS = [[40, 41, 42, 43, 44, 40, 41], [7, 8, 9, 7, 8]]


def ways_of(target, heads, **options):
    return our_ways(target, heads, costs=lambda: COSTS, **options)


def plan_for(target, *, chosen) -> dict:
    """Plans of a folder, as JSON has them; `chosen` is the number of the arm by temperature and rows."""
    costs = {"0": {"1": 0.5}, "1": {"1": 0.5}}
    arms = [TunedArm(way, costs, {"0": [0.9], "1": [0.9]}) for way in ([[0]], [[0], [1]])]
    choices = [Choice(*setting, arm, 1.5, 1.2, 1.1) for setting, arm in chosen.items()]
    plan = Plan(arms, choices, COSTS.write(), made={"target": target.fingerprint})
    content = {name: vars(plan)[name] for name in ("costs", "format", "made")}
    content |= {"arms": [vars(arm) for arm in arms], "choices": [vars(choice) for choice in choices]}
    return {plan_key(target): content}


def test_heads_draft_chains_and_their_own_trees_as_deep_as_they_can(tiny_target, tiny_head):
    assert list(ways_of(tiny_target, {"medusa": tiny_head}, chain=5)) == [
        *("plain", "prompt lookup", "medusa chain 4", "medusa tree 10 (dynamic)")
    ]
    tiny_head.tree = {"depth": 2, "width": 2, "size": 5}
    draft_model = DraftModel(tiny_target, tiny_target)
    found = ways_of(tiny_target, {"m": tiny_head}, chain=2, lookup=2, draft_model=draft_model)
    assert list(found) == [
        *("plain", "prompt lookup", "prompt lookup 2", "m chain 3", "m tree 5 (dynamic)"),
        *("draft model chain 3", "draft model chain 4", "draft model chain 5"),
    ]
    assert found["m tree 5 (dynamic)"](0.0, 1).grow == DynamicTree(depth=2, width=2, size=5)
    assert found["draft model chain 4"](1.0, 8) == Drafting(draft_model, Chain(3))
    assert found["prompt lookup 2"](0.0, 1) == PromptLookup(length=2)
    assert found["prompt lookup"](0.0, 1) == AdaptiveLookup(COSTS)
    assert found["plain"](1.0, 2) is None
    tiny_head.tree = ((0,), (0, 0))
    assert list(ways_of(tiny_target, {"m": tiny_head}, chain=2)) == ["plain", "prompt lookup", "m chain 3"]


def test_a_plan_for_this_machine_adds_what_it_chose_for_each_temperature_and_number_of_rows(tiny_target, tiny_head):
    chosen = {(0.0, 1): 1, (0.0, 8): None, (1.0, 1): 0}
    draft_model = DraftModel(tiny_target, tiny_target, tuned=plan_for(tiny_target, chosen=chosen))
    tiny_head.tuned = plan_for(tiny_target, chosen=chosen)
    found = ways_of(tiny_target, {"m": tiny_head}, chain=1, draft_model=draft_model)
    assert [name for name in found if "chain" not in name and "tree" not in name] == [
        *("plain", "prompt lookup", "m tuned", "m adaptive", "draft model tuned", "draft model adaptive")
    ]
    for name, drafts in (("m", tiny_head), ("draft model", draft_model)):
        tuned, adaptive = found[f"{name} tuned"], found[f"{name} adaptive"]
        assert tuned(0.0, 1).grow.paths == ((0,), (1,))
        assert tuned(0.0, 8) is None  # plain decoding
        assert tuned(1.0, 1).grow.paths == ((0,),)
        assert isinstance(adaptive(0.0, 8), Adaptive)
        assert adaptive(0.0, 8).head is tuned(0.0, 1).head is drafts
    tiny_head.tuned = {"another machine": next(iter(tiny_head.tuned.values()))}
    assert "m tuned" not in ways_of(tiny_target, {"m": tiny_head}, chain=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_way_gives_plain_text_in_a_batch_row_by_row(tiny_target, good_head, monkeypatch, temperature):
    monkeypatch.setattr(good_head, "tuned", plan_for(tiny_target, chosen={(0.0, 2): 1, (1.0, 2): 0}))
    draft_model = DraftModel(tiny_target, tiny_target)
    found = ways_of(tiny_target, {"m": good_head}, chain=3, draft_model=draft_model)
    sampling = Sampling(temperature=temperature, seed=3)
    proposers = {name: way(temperature, 2) for name, way in found.items()}
    answers = measure(tiny_target, our_runs(tiny_target, proposers, sampling, 12), PROMPTS, sampling, turn=1)
    assert list(answers) == list(found)
    expected = generate(tiny_target, PROMPTS, sampling=sampling, max_new_tokens=12)
    for answer in answers.values():
        assert answer.differences == []
        assert answer.rows == 2
        assert [stats.tokens for stats in answer.by_row] == [len(out.token_ids) for out in expected]
        assert answer.tokens == answer.stats.tokens == sum(stats.tokens for stats in answer.by_row)
        assert answer.stats.seconds == max(stats.seconds for stats in answer.by_row) < answer.seconds
        assert answer.stats.parts == answer.by_row[0].parts
    assert answers["m tuned"].stats.steps < answers["plain"].stats.steps


def test_a_single_prompt_is_a_batch_of_one(tiny_target):
    run = our_runs(tiny_target, {"plain": None}, Sampling(seed=0), 5)["plain"]
    assert run(PROMPTS[0]) == run(PROMPTS[:1]) == [generate(tiny_target, PROMPTS[0], max_new_tokens=5).token_ids]


@pytest.fixture(scope="module")
def packed_target(make_tiny_llama, tiny_tokenizer) -> Target:
    return Target(make_tiny_llama(dtype=torch.float32), tiny_tokenizer, name="packed")


@pytest.fixture(scope="module")
def assistant(make_tiny_llama, tiny_tokenizer, packed_target) -> DraftModel:
    """Right now and then, and with settings of its own that would change a text."""
    model = make_tiny_llama(dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(1.02)
    settings = model.generation_config
    settings.repetition_penalty, settings.do_sample, settings.temperature = 3.0, True, 5.0
    settings.eos_token_id, settings.max_new_tokens, settings.no_repeat_ngram_size = 7, 1, 1
    return DraftModel(Target(model, tiny_tokenizer, name="assistant"), packed_target)


def test_transformers_own_drafting_gives_the_greedy_text(packed_target, assistant):
    runs = their_runs(packed_target, assistant, 24)
    assert list(runs) == [
        *("transformers", "transformers (packed weights)", "transformers prompt lookup"),
        *("transformers prompt lookup (packed weights)", "transformers assisted"),
    ]
    for prompt in PROMPTS:
        expected = [generate(packed_target, prompt, max_new_tokens=24).token_ids]
        assert {name: run(prompt) for name, run in runs.items()} == dict.fromkeys(runs, expected)
    assert list(their_runs(packed_target, None, 24)) == list(runs)[:-1]


def test_transformers_runs_as_shipped_or_packed_and_drafts_as_the_name_says(packed_target, assistant, monkeypatch):
    seen = []

    def look(prompt, **options):
        packed = ["forward" in vars(module) for model in (packed_target, assistant.model)
                  for module in (model.model.model.layers[0].mlp.down_proj, model.model.lm_head)]  # fmt: skip
        seen.append((any(packed[:2]), any(packed[2:]), options))
        return prompt

    monkeypatch.setattr(packed_target.model, "generate", look)
    found = {}
    for name, run in their_runs(packed_target, assistant, 24).items():
        run(PROMPTS[0])
        found[name] = seen.pop()
    assert [(ours, drafts) for ours, drafts, _ in found.values()] == [
        *((False, True), (True, True), (False, True), (True, True), (False, False))
    ]
    drafted = {name: options.get("prompt_lookup_num_tokens") for name, (_, _, options) in found.items()}
    assert drafted == {name: 10 if "lookup" in name else None for name in found}
    assert [name for name, (_, _, options) in found.items() if "assistant_model" in options] == [
        "transformers assisted"
    ]
    assert found["transformers assisted"][2]["assistant_model"] is assistant.model.model
    assert "assistant_tokenizer" not in found["transformers assisted"][2]


def test_without_packed_weights_there_is_one_way_to_run_transformers(tiny_target):
    assert list(their_runs(tiny_target, None, 8)) == ["transformers", "transformers prompt lookup"]


def test_transformers_takes_a_padded_assistant(tiny_target, tiny_tokenizer, make_tiny_llama):
    padded = Target(make_tiny_llama(vocab_size=328), tiny_tokenizer, name="padded")
    run = their_runs(tiny_target, DraftModel(padded, tiny_target), 12)["transformers assisted"]
    assert run(PROMPTS[0]) == [generate(tiny_target, PROMPTS[0], max_new_tokens=12).token_ids]


def test_methods_are_chosen_by_the_beginnings_of_their_names():
    names = ["plain", "prompt lookup", "medusa chain 2", "medusa tree 4"]
    assert select(names, None) == names
    assert select(names, ["medusa tree", "prompt"]) == ["plain", "prompt lookup", "medusa tree 4"]
    with pytest.raises(ValueError, match="no method begins with"):
        select(names, ["eagle"])


def test_heads_of_one_kind_are_named_by_their_folders():
    kinds = ["medusa", "medusa", "eagle"]
    assert name_heads(["runs/a", "runs/b", "runs/e"], kinds) == ["medusa a", "medusa b", "eagle"]
    assert name_heads(["a/best", "b/best", "e/best"], kinds) == ["medusa a/best", "medusa b/best", "eagle"]
    with pytest.raises(ValueError, match="a head is given twice"):
        name_heads(["runs/a", "runs/../runs/a"], ["medusa", "medusa"])


def test_what_cannot_be_decoded_is_refused(tiny_target, make_tiny_llama, tiny_tokenizer):
    model = make_tiny_llama()
    model.config.max_position_embeddings = 10
    drafting = Drafting(DraftModel(Target(model, tiny_tokenizer, name="short"), tiny_target), Chain(2))
    with pytest.raises(ValueError, match="the draft model was made for 10"):
        check_proposers(tiny_target, {"plain": None, "d": drafting}, PROMPTS[0], Sampling(seed=0), 8)
    check_proposers(tiny_target, {"plain": None}, PROMPTS[0], Sampling(seed=0), 8)
