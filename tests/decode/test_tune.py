"""`python -m decode.tune`: measured on the machine, written to the folder, used by `generate`."""

import json
from pathlib import Path

import pytest
import torch

from decode import DraftModel, Target, VerifyCosts, generate, tune
from decode.adaptive import Adaptive
from decode.costs import Cost
from decode.propose import Drafting, Proposer
from decode.tune import main
from decode.tune_tables import name_way
from decode.tuned import Plan, find_plan, plan_key
from heads import create_head, load_head, save_head
from heads.checkpoint import TUNED, read_plans
from heads.eagle import EagleConfig
from train.new_head import target_sizes

PROMPTS = [
    {"prompt": "the cat"},
    {"turns": ["one two", "three"]},
    {"messages": [{"role": "user", "content": "sat"}]},
]
QUICK = ["--max-new-tokens", "7", "--most-nodes", "4", "--rows", "2", "--context", "8", "16", "--check", "2"]
FOLDERS = ("medusa", "eagle", "model")


@pytest.fixture(scope="module")
def folders(tiny_target, tiny_tokenizer, good_head, make_tiny_llama, tmp_path_factory) -> Path:
    """A saved target, two heads for it, a draft model and a file of prompts."""
    path = tmp_path_factory.mktemp("tune")
    tiny_target.model.save_pretrained(path / "target")
    make_tiny_llama().save_pretrained(path / "model")  # the target's own weights: all drafts are right
    for folder in ("target", "model"):
        tiny_tokenizer.save_pretrained(path / folder)
    target = Target.from_pretrained(str(path / "target"), device="cpu")
    save_head(good_head, path / "medusa", target=target)
    config = EagleConfig(max_depth=3, draft_vocab_size=3, **target_sizes(target, EagleConfig))
    eagle = create_head("eagle", config, target).double()
    eagle.set_vocabulary(torch.tensor([5, 90, 200]))
    save_head(eagle, path / "eagle", target=target)
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture(autouse=True)
def untuned(folders):
    """Every test starts without plans."""
    for name in FOLDERS:
        (folders / name / TUNED).unlink(missing_ok=True)


@pytest.fixture
def begun(monkeypatch) -> list[Proposer]:
    """The proposers that decode."""
    seen: list[Proposer] = []
    for kind in (Adaptive, Drafting):

        def begin(self, rows, *, shared_noise, begin=kind.begin):
            seen.append(self)
            return begin(self, rows, shared_noise=shared_noise)

        monkeypatch.setattr(kind, "begin", begin)
    return seen


@pytest.fixture
def flat(monkeypatch) -> None:
    """Passes take a second for every row, whatever the size of the trees."""
    costs = VerifyCosts([Cost(1, 8, 1, 1.0, 1.0, 1.0), Cost(2, 8, 1, 2.0, 2.0, 2.0)])
    monkeypatch.setattr(tune, "measure_costs", lambda *args, **options: costs)


def arguments(folders: Path, name: str, *more: str) -> list[str]:
    option = "--draft-model" if name == "model" else "--head"
    given = [folders / "target", option, folders / name, "--prompts", folders / "prompts.jsonl"]
    return [*map(str, given), "--device", "cpu", *QUICK, *more]


def load(folders: Path, name: str):
    target = Target.from_pretrained(str(folders / "target"), device="cpu")
    if name == "model":
        return target, {"draft_model": DraftModel.from_pretrained(folders / name, target)}
    return target, {"head": load_head(folders / name, target, dtype=torch.float64)}


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title."""
    lines = text.split(title)[1].split("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [table[0], *table[2:]]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_command_writes_a_plan_that_generate_uses(folders, name, capsys, begun):
    argv = arguments(folders, name, "--temperature", "0", "1")
    assert main(argv) == 0
    printed = capsys.readouterr().out
    target, drafts = load(folders, name)
    (held,) = drafts.values()
    key = plan_key(target)
    assert list(read_plans(folders / name)) == list(held.tuned) == [key]
    assert printed.count(f"wrote the plan for {key} to {folders / name / TUNED}") == 2  # before and behind the check
    plan = find_plan(held.tuned, target)
    check_plan(plan, argv)
    check_tables(plan, printed)
    for adapt, expected in ((True, plan.adaptive(held, 0.0)), (False, plan.fixed(held, 0.0, 1))):
        begun.clear()
        decoded = generate(target, "the cat", max_new_tokens=6, adapt=adapt, **drafts)
        assert decoded.token_ids == generate(target, "the cat", max_new_tokens=6).token_ids
        assert begun == ([] if expected is None else [expected])


def test_where_passes_cost_the_same_whatever_their_size_the_longest_right_drafts_are_chosen(
    folders, capsys, begun, flat
):
    assert main(arguments(folders, "model", "--temperature", "0", "0.8", "--max-new-tokens", "9")) == 0
    target, drafts = load(folders, "model")
    plan = find_plan(drafts["draft_model"].tuned, target)
    assert all(Plan.arm(plan.arms[choice.arm], choice.temperature).grow.depth >= 3 for choice in plan.choices)
    assert all(2.5 < choice.tokens_per_step < 4.01 for choice in plan.choices)
    assert all(2 < choice.speedup <= choice.tokens_per_step for choice in plan.choices)
    for temperature, found in plan.made["by_temperature"].items():
        assert found["accept_rate"] == {"value": 1.0, "low": 1.0, "high": 1.0}
        checked, arm = found["checked"], plan.arms[plan.choice(float(temperature), 1).arm]
        assert (checked["prompts"], checked["differences"], checked["unexcused"]) == (2, 0, 0)
        assert all(rate is not None and rate < 0.5 for rate in found["chains"].values())  # drafts are nearly free
        assert all(
            checked[way]["low"] <= checked[way]["value"] <= checked[way]["high"] for way in ("fixed", "adaptive")
        )
        assert 2.5 / arm.costs[temperature]["1"] < checked["predicted"] < 4.01 / arm.costs[temperature]["1"]
    header, *table = rows_of(capsys.readouterr().out, "## Prediction and real decoding")
    assert header == ["T", "prompts", "predicted", "fixed", "adaptive", "texts that differ"]
    assert [(row[0], row[1], row[-1]) for row in table] == [(t, "2", "0, 0 without a near tie") for t in ("0", "0.8")]
    assert {type(proposer) for proposer in begun} == {Adaptive, Drafting}


def check_plan(plan: Plan, argv: list[str]) -> None:
    assert plan.made["command"] == " ".join(["python -m decode.tune", *argv])
    assert plan.made["machine"]["dtype"] == "float64"
    assert [(choice.temperature, choice.rows) for choice in plan.choices] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert {(cost["rows"], cost["context"], cost["nodes"]) for cost in plan.costs} == {
        *((1, context, nodes) for context in (8, 16) for nodes in (1, 2, 3, 4)),
        *((2, 8, nodes) for nodes in (1, 2, 3, 4)),
    }
    for arm in plan.arms:
        assert {*arm.costs} == {*arm.reach} == {"0", "1"}
        assert all({*costs} == {"1", "2"} for costs in arm.costs.values())
        assert Plan.arm(arm, 0.0).grow.max_nodes <= 4
    for choice in plan.choices:
        arms = [Plan.arm(arm, choice.temperature) for arm in plan.arms]
        speedups = [(1 + sum(arm.reach)) / arm.cost(choice.rows) for arm in arms]
        assert choice.speedup == pytest.approx(max(1.0, *speedups))
        assert (choice.arm is None) == (max(speedups) <= 1)
        if choice.arm is not None:
            assert speedups[choice.arm] == pytest.approx(max(speedups))
            assert choice.tokens_per_step == pytest.approx(1 + sum(arms[choice.arm].reach))
            assert choice.needed == pytest.approx(arms[choice.arm].cost(choice.rows))
    for found in plan.made["by_temperature"].values():
        assert found["texts"] == 3
        assert list(found["chains"]) == ["1", "2", "3"]
        assert all(rate is None or 0 <= rate <= 1 for rate in found["chains"].values())


def check_tables(plan: Plan, printed: str) -> None:
    header, *table = rows_of(printed, "## The fastest way, as predicted")
    assert header == ["T", "rows", "draft", "tokens per step", "needed to pay", "speed-up"]
    expected = [
        [
            f"{c.temperature:g}",
            str(c.rows),
            "nothing" if c.arm is None else name_way(plan.arms[c.arm].way),
            *(f"{number:.2f}" for number in (c.tokens_per_step, c.needed, c.speedup)),
        ]
        for c in plan.choices
    ]
    assert table == expected
    header, *table = rows_of(printed, "## Cost of a target pass (one node = 1)")
    assert header == ["rows", "context", "one node", "spread", "2", "3", "4"]
    assert [row[:2] for row in table] == [["1", "8"], ["1", "16"], ["2", "8"]]
    header, *table = rows_of(printed, "## Guesses")
    assert header == ["T", "depth", "rank 1", "rank 2", "rank 3", "rank 4"]
    acceptance = {t: found["acceptance"] for t, found in plan.made["by_temperature"].items()}
    shares = [[t, str(depth), *(f"{s:.2f}" for s in row)] for t in "01" for depth, row in enumerate(acceptance[t], 1)]
    assert table == shares
    assert all(f"T={t}: a chain's drafts are accepted at a rate of" in printed for t in "01")
    assert printed.count("texts); chains of 1 ") == 2
    _, *table = rows_of(printed, "## Prediction and real decoding")
    assert [(row[0], row[1], row[-1]) for row in table] == [(t, "2", "0, 0 without a near tie") for t in "01"]


def test_a_plan_that_is_only_shown_is_not_written(folders, capsys, flat):
    assert main(arguments(folders, "model", "--dry-run", "--temperature", "0", "--check", "0")) == 0
    printed = capsys.readouterr().out
    assert [row[:2] for row in rows_of(printed, "## The fastest way")[1:]] == [["0", "1"], ["0", "2"]]
    assert "wrote" not in printed
    assert "Prediction and real decoding" not in printed
    assert not (folders / "model" / TUNED).exists()


def test_a_plan_that_cannot_be_written_is_printed(folders, capsys, monkeypatch):
    def fail(path, write):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("decode.tuned.write_atomically", fail)
    assert main(arguments(folders, "medusa", "--temperature", "0", "--check", "0", "--rows", "1")) == 2
    out, err = capsys.readouterr()
    assert "error: cannot write the plan ([Errno 30] Read-only file system); it follows, for " in err
    assert str(folders / "medusa" / TUNED) in err
    (folders / "medusa" / TUNED).write_text(out.splitlines()[-1])
    target, drafts = load(folders, "medusa")
    assert [choice.rows for choice in find_plan(drafts["head"].tuned, target).choices] == [1]


def test_a_plan_whose_tables_cannot_be_shown_is_kept(folders, capsys, fill_stdout):
    target, _ = load(folders, "medusa")
    fill_stdout()
    assert main(arguments(folders, "medusa", "--temperature", "0", "--rows", "1")) == 2
    assert "error: cannot write to standard output ([Errno 28]" in capsys.readouterr().err
    assert find_plan(read_plans(folders / "medusa"), target) is not None


def test_an_interrupt_is_one_line(folders, capsys, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("decode.tune.tune", stop)
    assert main(arguments(folders, "medusa")) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped; ")


def test_a_second_plan_replaces_the_first_and_leaves_those_of_other_devices(folders):
    target, _ = load(folders, "medusa")
    other = {"another device, float32": {"arms": []}, plan_key(target): {"arms": []}}
    (folders / "medusa" / TUNED).write_text(json.dumps(other))
    assert main(arguments(folders, "medusa", "--temperature", "0", "--check", "0", "--rows", "1")) == 0
    plans = read_plans(folders / "medusa")
    assert plans["another device, float32"] == {"arms": []}
    assert find_plan(plans, target) is not None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--head", "nowhere"], "nowhere is not a head folder"),
        (["--head", "FOLDERS/model"], "pass the folder as a draft model (--draft-model)"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--num", "0"], "at least 1 prompt must be read"),
        (["--most-nodes", "1"], "--most-nodes must be at least 2, got 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2, got 1"),
        (["--check", "-1"], "--check must be at least 0, got -1"),
        (["--rows", "1", "0"], "--rows takes numbers of at least 1, got [1, 0]"),
        (["--context", "0"], "--context takes numbers of at least 1, got [0]"),
        (["--temperature", "0", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "toaster"], "unknown device 'toaster'"),
    ],
)
def test_bad_arguments_are_an_error_before_anything_is_measured(folders, capsys, monkeypatch, extra, message):
    monkeypatch.setattr(tune, "measure_costs", None)
    argv = arguments(folders, "medusa", *(word.replace("FOLDERS", str(folders)) for word in extra))
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (folders / "medusa" / TUNED).exists()


@pytest.mark.parametrize(
    ("context", "draft_context", "eos", "extra", "message"),
    [
        (
            60,
            256,
            1,
            ["--most-nodes", "99"],
            "a tree of 96 nodes is not below the target's context, 60; measure smaller",
        ),
        (8, 256, 1, [], "tokens, but the target's context is 8; shorten the prompt"),
        (256, 16, 1, [], "the draft model was made for 16; lower max_new_tokens"),
        (256, 256, list(range(320)), [], "at temperature 0 every answer has one token only"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    folders, make_tiny_llama, tiny_tokenizer, tmp_path, capsys, context, draft_context, eos, extra, message
):
    for name, size in (("target", context), ("model", draft_context)):
        model = make_tiny_llama()
        model.config.max_position_embeddings = size
        model.generation_config.eos_token_id = eos
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text((folders / "prompts.jsonl").read_text())
    assert main(arguments(tmp_path, "model", *extra)) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
    assert not (tmp_path / "model" / TUNED).exists()


def test_a_draft_model_that_is_no_folder_keeps_no_plan_and_can_only_be_tried(folders, capsys, monkeypatch, flat):
    argv = [*arguments(folders, "model", "--temperature", "0", "--check", "0"), "--draft-model", "someone/model"]
    assert main(argv) == 2
    assert "error: someone/model is no folder, so no plan can be kept in it; download it" in capsys.readouterr().err
    load = DraftModel.from_pretrained
    monkeypatch.setattr(DraftModel, "from_pretrained", lambda name, target: load(folders / name[-5:], target))
    assert main([*argv, "--dry-run"]) == 0
    assert "## The fastest way" in capsys.readouterr().out
