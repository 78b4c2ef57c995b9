"""`decode.tune` checks its plan by decoding, behind the writing: whatever that brings, what was found is kept."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest

from decode import tune, tune_check
from decode.measure import RowDifference, measure
from decode.tune import main
from decode.tune_check import check
from decode.tuned import Choice, Plan, TunedArm, plan_key
from heads import load_head
from heads.checkpoint import TUNED, read_plans

POINT = {"rows": 1, "context": 8, "nodes": 1, "seconds": 0.1, "low": 0.1, "high": 0.1}
RATE = {"value": 0.5, "low": 0.4, "high": 0.6}
FOUND = {"acceptance": [[0.5]], "accept_rate": RATE, "chains": {"1": 0.3}, "texts": 2}
ARM = TunedArm([[0]], {"0": {"1": 1.25}, "1": {"1": 1.6}}, {"0": [0.5], "1": [0.25]})
PLAN = Plan(
    [ARM],
    [Choice(0.0, 1, 0, 1.5, 1.2, 1.25), Choice(1.0, 1, None, 1.0, 1.0, 1.6)],
    [POINT],
    made={"by_temperature": {"0": FOUND, "1": FOUND}},
)


@pytest.fixture
def folder(bench_files, tmp_path):
    """A head without plans."""
    shutil.copytree(bench_files.path / "b", tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def run(bench_files, folder, monkeypatch):
    """The command, which finds `PLAN` at once."""
    monkeypatch.setattr(tune, "tune", lambda *arguments: PLAN)
    arguments = [bench_files.path / "target", "--head", folder, "--prompts", bench_files.path / "x.jsonl"]
    return lambda *more: main([*map(str, arguments), "--device", "cpu", "--max-new-tokens", "6", *more])


def kept(folder) -> dict:
    """What the folder's plan says of each temperature."""
    (content,) = read_plans(folder).values()
    return Plan.read(content).made["by_temperature"]


def test_a_plan_is_written_with_what_decoding_gave(run, folder, capsys):
    assert run("--check", "9") == 0
    found = kept(folder)
    assert {name: facts["accept_rate"] for name, facts in found.items()} == {"0": RATE, "1": RATE}
    for facts in found.values():
        checked = facts["checked"]
        assert (checked["prompts"], checked["differences"], checked["unexcused"]) == (2, 0, 0)
        for way in ("fixed", "adaptive"):
            assert 0 < checked[way]["low"] <= checked[way]["value"] <= checked[way]["high"]
    assert 1 / 1.25 <= found["0"]["checked"]["predicted"] <= 2 / 1.25
    assert found["1"]["checked"]["predicted"] == 1.0  # nothing is drafted
    assert "## Prediction and real decoding" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_check_that_fails_or_is_interrupted_loses_no_plan(run, folder, monkeypatch, capsys, error):
    monkeypatch.setattr(tune_check, "measure", lambda *arguments, **options: (_ for _ in ()).throw(error))
    with pytest.raises(error) if error is RuntimeError else nullcontext():
        assert run() == 130
    assert kept(folder) == {"0": FOUND, "1": FOUND}
    out, _ = capsys.readouterr()
    assert "## The fastest way" in out
    assert "Prediction" not in out


@pytest.mark.parametrize(("near_tie", "status"), [(False, 1), (True, 0)])
def test_a_text_that_differs_without_a_near_tie_fails_the_command_but_keeps_the_plan(
    run, folder, monkeypatch, capsys, near_tie, status
):
    def differing(*arguments, turn):
        answers = measure(*arguments, turn=turn)
        difference = [RowDifference(0, "token 1", near_tie)]
        return {n: replace(a, differences=difference if n == "adaptive" else []) for n, a in answers.items()}

    monkeypatch.setattr(tune_check, "measure", differing)
    assert run("--check", "1") == status
    counts = {(f["checked"]["differences"], f["checked"]["unexcused"]) for f in kept(folder).values()}
    assert counts == {(1, status)}
    assert f"1, {status} without a near tie" in capsys.readouterr().out


def test_nothing_is_decoded_or_said_without_a_check_and_nothing_written_on_a_dry_run(run, folder, monkeypatch, capsys):
    assert run("--dry-run") == 0
    assert "## Prediction" in capsys.readouterr().out
    assert not (folder / TUNED).exists()
    monkeypatch.setattr(tune, "check", None)
    assert run("--check", "0") == 0
    assert "Prediction" not in capsys.readouterr().out
    assert kept(folder) == {"0": FOUND, "1": FOUND}


def test_a_plan_that_cannot_be_written_is_not_checked(run, folder, monkeypatch, capsys):
    monkeypatch.setattr(tune, "check", None)
    (folder / TUNED).mkdir()
    assert run() == 2
    out, err = capsys.readouterr()
    assert "error: cannot write the plan" in err
    assert next(iter(json.loads(out.splitlines()[-1]).values()))["choices"][0]["needed"] == 1.25


def test_the_prompts_are_spread_and_seeds_count_up(run, bench_files, folder, monkeypatch):
    prompts = [[5, number] for number in range(7)]
    seen = []
    monkeypatch.setattr(
        tune_check, "measure", lambda *a, turn: seen.append((a[2], a[3].seed)) or measure(*a, turn=turn)
    )
    target = bench_files.target
    head = load_head(folder, target)
    found = check(target, head, prompts[:2], PLAN, max_new_tokens=3, seed=5)
    assert seen == [([5, 0], 5), ([5, 1], 6)] * 2
    assert PLAN.made["by_temperature"]["0"] == FOUND  # the given plan stays as it is
    assert found.arms == PLAN.arms
    load = tune._load
    monkeypatch.setattr(tune, "_load", lambda args: (*load(args)[:2], prompts, replace(load(args)[3], checked=3)))
    seen.clear()
    assert run() == 0
    assert [ids for ids, _ in seen] == [prompts[0], prompts[2], prompts[4]] * 2
    assert list(read_plans(folder)) == [plan_key(target)]
