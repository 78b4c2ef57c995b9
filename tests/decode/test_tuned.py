"""Plans in the folders of heads and draft models: written, found again, obeyed, and refused where they are damaged."""

import copy
import json
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from decode import Chain, Drafting, DraftModel, DynamicTree, Sampling, StaticTree, Target, generate, stream
from decode import generation as generation_module
from decode.adaptive import Adaptive
from decode.tuned import FORMAT, Choice, Plan, TunedArm, find_plan, plan_key, write_plan
from heads import load_head, save_head
from heads.checkpoint import TUNED, read_plans
from heads.files import write_atomically

CHAIN, DYNAMIC = [[0], [0, 0]], {"depth": 3, "width": 2, "size": 6, "confidence": 0.1}
PROMPT = [40, 41, 42, 43]


def arm(way, *, cost: float = 1.5) -> TunedArm:
    costs = {"0": {"1": cost, "4": cost + 1}, "1": {"1": cost + 2, "4": cost + 3}}
    return TunedArm(way, costs, {"0": [0.6, 0.3], "1": [0.2]})


def chosen(temperature: float, rows: int, number: int | None) -> Choice:
    return Choice(temperature, rows, number, 1.9, 1.4, 1.2)


def make_plan(target: Target, **options) -> Plan:
    point = {"rows": 1, "context": 256, "nodes": 1, "seconds": 0.1, "low": 0.09, "high": 0.12}
    choices = [chosen(0.0, 1, 0), chosen(0.0, 4, 1), chosen(1.0, 1, None), chosen(1.0, 4, 1)]
    made = {"target": target.fingerprint}
    return replace(Plan([arm(CHAIN), arm(DYNAMIC)], choices, [point, {**point, "nodes": 4}], made=made), **options)


@pytest.fixture
def plan(tiny_target) -> Plan:
    return make_plan(tiny_target)


@pytest.fixture
def folder(tiny_target, tiny_head, tmp_path):
    save_head(tiny_head, tmp_path, target=tiny_target)
    return tmp_path


@pytest.fixture
def tuned_head(tiny_head, tiny_target, plan):
    tiny_head.tuned = {plan_key(tiny_target): asdict(plan)}
    return tiny_head


@pytest.fixture
def used(monkeypatch):
    """The proposers that decode."""
    seen = []

    class Spy(generation_module.Decoding):
        def __init__(self, target, rows, proposer, rule, **options):
            seen.append(proposer)
            super().__init__(target, rows, proposer, rule, **options)

    monkeypatch.setattr(generation_module, "Decoding", Spy)
    return seen


def test_a_plan_that_was_written_is_read_again(folder, tiny_target, plan):
    write_plan(folder, plan_key(tiny_target), plan)
    head = load_head(folder, tiny_target)
    assert head.tuned == read_plans(folder)
    found = find_plan(head.tuned, tiny_target)
    assert asdict(found) == asdict(plan)
    assert [type(part) for part in (found.arms[0], found.choices[0])] == [TunedArm, Choice]


def test_a_folder_holds_a_plan_for_each_device_and_a_new_one_replaces_the_old(folder, tiny_target, plan):
    key = plan_key(tiny_target)
    other = replace(plan, choices=[chosen(0.0, 1, None)])
    write_plan(folder, "another device, float32", other)
    assert find_plan(load_head(folder, tiny_target).tuned, tiny_target) is None
    write_plan(folder, key, plan)
    write_plan(folder, key, replace(plan, choices=plan.choices[:1]))
    plans = read_plans(folder)
    assert list(plans) == ["another device, float32", key]
    assert Plan.read(plans["another device, float32"]).choices == other.choices
    assert find_plan(plans, tiny_target).choices == plan.choices[:1]


def test_plans_are_for_one_precision_one_number_of_threads_and_one_way_to_compute_layers(make_tiny_llama, tiny_target):
    single, plain = (Target(make_tiny_llama(dtype=torch.float32), pack=pack) for pack in (True, False))
    threads = f", {torch.get_num_threads()} threads, "
    assert plan_key(tiny_target).endswith(f"{threads}float64, layers plain, target {tiny_target.fingerprint}")
    assert plan_key(plain) == plan_key(tiny_target).replace("float64", "float32")
    assert plan_key(single) == plan_key(plain).replace("layers plain", "layers packed")
    assert single.fingerprint == tiny_target.fingerprint
    tuned = {plan_key(tiny_target): asdict(make_plan(single))}
    assert find_plan(tuned, tiny_target) is not None
    assert find_plan(tuned, single) is find_plan(tuned, plain) is None


@pytest.mark.parametrize("number", [..., 0, 2, "1", None])
def test_a_plan_of_another_format_is_passed_over(tiny_target, tiny_head, plan, used, number):
    content = asdict(plan)
    assert content["format"] == FORMAT
    edit("format", value=number)(content)
    content["arms"] = "as another version writes them"
    tiny_head.tuned = {plan_key(tiny_target): content}
    assert find_plan(tiny_head.tuned, tiny_target) is None
    generate(tiny_target, PROMPT, head=tiny_head, max_new_tokens=2)
    assert used[-1] == Drafting.of(tiny_head)


def test_a_plan_made_for_another_target_is_not_used(tiny_target, make_tiny_llama, plan, used):
    tuned = {plan_key(tiny_target): asdict(plan)}
    other = Target(make_tiny_llama(seed=3))
    assert find_plan(tuned, other) is None
    for target, expected in ((tiny_target, Adaptive), (other, Drafting)):
        model = DraftModel(Target(make_tiny_llama(seed=5)), target, tuned=tuned)
        generate(target, PROMPT, draft_model=model, max_new_tokens=3)
        assert type(used[-1]) is expected
    assert used[-1].grow == Chain(4)


def test_two_targets_share_the_folder_of_a_draft_model(tiny_target, make_tiny_llama, plan, tmp_path):
    other = Target(make_tiny_llama(seed=3))
    theirs = replace(make_plan(other), choices=[chosen(0.0, 1, 1)])
    for target, made in ((tiny_target, plan), (other, theirs), (tiny_target, plan)):
        write_plan(tmp_path, plan_key(target), made)
    tuned = read_plans(tmp_path)
    assert len(tuned) == 2
    assert find_plan(tuned, tiny_target).choices == plan.choices
    assert find_plan(tuned, other).choices == theirs.choices


def test_a_head_that_is_saved_anew_has_no_plan(folder, tiny_target, tiny_head, plan):
    write_plan(folder, plan_key(tiny_target), plan)
    save_head(tiny_head, folder, target=tiny_target)
    assert not (folder / TUNED).exists()
    assert load_head(folder, tiny_target).tuned == read_plans(folder) == {}


def test_plans_of_a_draft_model_are_read_from_its_folder(tiny_target, tiny_tokenizer, make_tiny_llama, plan, tmp_path):
    make_tiny_llama(seed=5).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert DraftModel.from_pretrained(tmp_path, tiny_target).tuned == {}
    write_plan(tmp_path, plan_key(tiny_target), plan)
    model = DraftModel.from_pretrained(tmp_path, tiny_target)
    assert asdict(find_plan(model.tuned, tiny_target)) == asdict(plan)


def test_the_nearest_temperature_counts_first_and_then_the_nearest_number_of_rows(plan, tiny_head):
    assert [plan.choice(*at) for at in ((0.0, 1), (0.4, 2), (0.0, 3), (0.3, 99))] == [
        plan.choices[i] for i in (0, 0, 1, 1)
    ]
    assert [plan.choice(*at) for at in ((1.0, 1), (0.6, 2), (7.0, 4))] == [plan.choices[i] for i in (2, 2, 3)]
    sparse = replace(plan, choices=[plan.choices[0], plan.choices[3]])
    assert [sparse.choice(*at) for at in ((0.1, 4), (0.9, 1))] == sparse.choices
    calibrated = Plan.arm(plan.arms[0], 0.3)
    assert (calibrated.grow, calibrated.costs, calibrated.reach) == (Chain(2), {1: 1.5, 4: 2.5}, (0.6, 0.3))
    assert Plan.arm(plan.arms[1], 0.9).reach == (0.2,)
    assert Plan.arm(plan.arms[1], 0.9).costs == {1: 3.5, 4: 4.5}
    assert plan.fixed(tiny_head, 0.0, 1) == Drafting(tiny_head, Chain(2))
    assert plan.fixed(tiny_head, 1.0, 4) == Drafting(tiny_head, DynamicTree(**DYNAMIC))
    assert plan.fixed(tiny_head, 1.0, 1) is None
    assert plan.adaptive(tiny_head, 1.0).arms == tuple(Plan.arm(found, 1.0) for found in plan.arms)
    assert replace(plan, arms=[]).adaptive(tiny_head, 1.0) is None


def test_texts_are_decoded_as_was_tuned(tuned_head, tiny_target, plan, used):
    run = partial(generate, tiny_target, head=tuned_head, max_new_tokens=8, eos_ids=())
    plain = [generate(tiny_target, PROMPT, sampling=s, max_new_tokens=8, eos_ids=()) for s in (Sampling(), WARM)]
    assert run(PROMPT).token_ids == plain[0].token_ids
    assert used[-1] == plan.adaptive(tuned_head, 0.0)
    assert run(PROMPT, sampling=WARM).token_ids == plain[1].token_ids
    assert used[-1] == plan.adaptive(tuned_head, 0.9)
    assert run(PROMPT, adapt=False).token_ids == plain[0].token_ids
    assert used[-1] == Drafting(tuned_head, Chain(2))
    assert [result.token_ids for result in run([PROMPT] * 3, adapt=False)] == [plain[0].token_ids] * 3
    assert used[-1] == Drafting(tuned_head, DynamicTree(**DYNAMIC))
    assert run(PROMPT, sampling=WARM, adapt=False).token_ids == plain[1].token_ids
    assert used[-1] is None  # plain decoding


WARM = Sampling(temperature=0.9, seed=4)


def test_streams_are_decoded_as_was_tuned(tuned_head, tiny_target, plan, used):
    list(stream(tiny_target, PROMPT, head=tuned_head, max_new_tokens=3))
    assert used[-1] == plan.adaptive(tuned_head, 0.0)
    list(stream(tiny_target, PROMPT, head=tuned_head, max_new_tokens=3, adapt=False))
    assert used[-1] == Drafting(tuned_head, Chain(2))


@pytest.mark.parametrize("adapt", [True, False])
def test_a_tree_that_is_asked_for_and_rules_that_draw_their_drafts_go_their_own_way(
    tuned_head, tiny_target, used, adapt
):
    run = partial(generate, tiny_target, PROMPT, head=tuned_head, max_new_tokens=3, adapt=adapt)
    run(grow=StaticTree(((0,), (1,))))
    assert used[-1] == Drafting(tuned_head, StaticTree(((0,), (1,))))
    for rule in ("rejection", "block", "typical"):
        run(accept=rule, sampling=WARM)
        assert used[-1] == Drafting.of(tuned_head)
    other = Drafting(tuned_head, Chain(1))
    generate(tiny_target, PROMPT, proposer=other, max_new_tokens=3, adapt=adapt)
    assert used[-1] == other


@pytest.mark.parametrize("adapt", [True, False])
def test_a_plan_of_larger_trees_than_the_head_drafts_is_refused_by_name(tiny_head, tiny_target, plan, adapt):
    deep = replace(plan, arms=[arm([[0] * depth for depth in range(1, 5)])], choices=[chosen(0.0, 1, 0)])
    tiny_head.tuned = {plan_key(tiny_target): asdict(deep)}
    with pytest.raises(
        ValueError, match=r"tuned.json was made for another head .*4 deep.*drafts 3.*; delete it or run"
    ):
        generate(tiny_target, PROMPT, head=tiny_head, adapt=adapt)


@pytest.mark.parametrize("content", ['{"a', "[]", "7", '{"cpu": []}', '{"cpu": "chain"}', b"\xff\xfe{}", ""])
def test_files_that_hold_no_plans_are_refused_by_name(folder, tiny_target, plan, content):
    (folder / TUNED).write_bytes(content if isinstance(content, bytes) else content.encode())
    for act in (partial(load_head, folder, tiny_target), partial(write_plan, folder, "cpu", plan)):
        with pytest.raises(ValueError, match=rf"{folder / TUNED} .*; delete it"):
            act()


def edit(*path, value):
    """Set one entry of a plan, or remove it if the value is `...`."""

    def change(content):
        for step in path[:-1]:
            content = content[step]
        if value is ...:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return change


ARM, CHOICE, POINT = ("arms", 0), ("choices", 1), ("costs", 0)
DAMAGED = [
    *(edit(name, value=value) for name in ("arms", "choices", "costs", "made") for value in (..., None, 7, ["x"])),
    *(edit("arms", 0, name, value=value) for name in ("way", "costs", "reach") for value in (..., None, 7, "x")),
    *(
        edit(*ARM, "way", value=way)
        for way in ([[1]], [[0.0], [0, 0]], [["0"]], [0], [[0], [0, 1]], [[-1]], {}, {"depth": 2})
    ),
    *(
        edit(*ARM, "way", value={**DYNAMIC, **wrong})
        for wrong in ({"size": 0}, {"size": 2.5}, {"confidence": 2}, {"x": 1})
    ),
    *(edit(*ARM, "reach", value=reach) for reach in ({}, {"x": []}, {"0": 1}, {"2": []})),
    *(edit(*ARM, "reach", "1", value=shares) for shares in ([1.5], [-0.1], [0.2, 0.3], ["x"], [float("nan")], None)),
    *(
        edit(*ARM, "costs", "1", value=costs)
        for costs in (..., {}, {"x": 1.0}, {"1": 0.0}, {"1": "x"}, {"1": 1e999}, [2])
    ),
    *(edit(*CHOICE, name, value=...) for name in asdict(chosen(0.0, 1, 0))),
    *(edit(*CHOICE, name, value=v) for name in ("temperature", "rows", "speedup") for v in (None, "1", float("nan"))),
    *(edit(*CHOICE, "arm", value=number) for number in (2, -1, "0", 0.5, [0])),
    edit(*CHOICE, "extra", value=1),
    edit("choices", value=[]),
    edit("choices", value={"rows": 1}),
    *(edit(*POINT, name, value=value) for name in ("rows", "seconds") for value in (..., None, "1", -1)),
    edit("costs", value=[]),
    edit(*POINT, "nodes", value=2),
    *(edit(*place, value=10**400) for place in ((*ARM, "costs", "1", "1"), (*CHOICE, "speedup"), (*POINT, "seconds"))),
    edit(*ARM, "reach", "1", value=[10**400]),
    edit("costs", 1, "nodes", value=1),
]


@pytest.mark.parametrize("change", DAMAGED)
def test_damaged_plans_are_refused_by_name_before_anything_is_decoded(tiny_head, tiny_target, plan, change):
    content = copy.deepcopy(json.loads(json.dumps(asdict(plan))))
    Plan.read(content)
    change(content)
    tiny_head.tuned = {plan_key(tiny_target): json.loads(json.dumps(content))}
    with pytest.raises(ValueError, match=rf"{TUNED} holds no plan \(.*\); delete it or run decode.tune again"):
        generate(tiny_target, PROMPT, head=tiny_head)
    assert generate(tiny_target, PROMPT, head=tiny_head, grow=Chain(1), max_new_tokens=2).stats.tokens == 2
    tiny_head.tuned = {"another device": content}
    assert find_plan(tiny_head.tuned, tiny_target) is None


def test_a_crash_while_writing_leaves_the_old_plans(folder, tiny_target, plan, monkeypatch):
    write_plan(folder, "cpu", plan)
    before = (folder / TUNED).read_text()

    def crash(path, write):
        write_atomically(path, lambda temporary: (write(temporary), 1 / 0))

    monkeypatch.setattr("decode.tuned.write_atomically", crash)
    with pytest.raises(ZeroDivisionError):
        write_plan(folder, "gpu", plan)
    assert (folder / TUNED).read_text() == before
