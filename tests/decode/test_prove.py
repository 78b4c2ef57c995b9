"""`python -m decode.prove` runs its checks (test_proofs.py), reports them and refuses bad input."""

import copy
import json
import re
import shutil

import pytest
import torch

from decode import Chain, StaticTree, Target
from decode.proofs import Check
from decode.prove import check_lines, find_drafts, main, verdict_lines
from decode.sampling import Sampler
from decode.tuned import Choice, Plan, TunedArm, plan_key, write_plan
from heads import HeadNotes, save_head

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)))


@pytest.fixture(scope="module")
def saved(tiny_target, tiny_tokenizer, good_head, tmp_path_factory):
    """Folders of a target, a head, a draft model that often agrees and one of a short context, and prompts."""
    path = tmp_path_factory.mktemp("saved")
    draft, short = copy.deepcopy(tiny_target.model), copy.deepcopy(tiny_target.model)
    draft.lm_head.weight.data *= 1 + torch.arange(320)[:, None] / 1000
    short.config.max_position_embeddings = 20
    for folder, model in (("target", tiny_target.model), ("draft", draft), ("short", short)):
        model.save_pretrained(path / folder)
        tiny_tokenizer.save_pretrained(path / folder)
    target = Target.from_pretrained(str(path / "target"), device="cpu")
    save_head(good_head, path / "head", target=target, notes=HeadNotes(tree=TREE.paths))
    rows = ({"prompt": text} for text in ("the cat sat on the mat", "one two three one two three", "x"))
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(path, *drafts: str) -> list[str]:
    found = [str(path / word) if word in ("head", "draft", "short") else word for word in drafts]
    prompts = ["--prompts", str(path / "prompts.jsonl"), "--num", "2", "--device", "cpu"]
    return [str(path / "target"), *found, *prompts, "--max-new-tokens", "8", "--samples", "50"]


CHECKS = ("greedy text", "text of a seed", "state", "law")
DRAFTS = {"head": ("--head", "head"), "draft model": ("--draft-model", "draft"), "lookup": ("--lookup", "3")}


@pytest.mark.parametrize(
    ("accept", "tree", "draw"),
    [("match", TREE, "none"), ("rejection", TREE, "without_replacement"), ("block", Chain(3), "without_replacement")],
)
def test_a_head_drafts_what_the_rule_is_for(saved, tiny_target, accept, tree, draw):
    drafts, name = find_drafts(tiny_target, head=str(saved / "head"), draft_model=None, lookup=None, accept=accept)
    assert (drafts["grow"].paths, drafts["grow"].draw) == (tree.paths, draw)
    assert drafts["accept"] == accept
    assert name.endswith(f"{'chain' if accept == 'block' else 'tree'} of {tree.max_nodes} nodes")


@pytest.mark.parametrize("nothing", [False, True], ids=["a tree is tuned", "nothing is tuned"])
@pytest.mark.parametrize("drafts", ["head", "draft model"])
def test_drafts_are_checked_in_a_fixed_shape_and_as_tuned(saved, tmp_path, capsys, drafts, nothing):
    """A plan to draft nothing must not make the checks empty."""
    option, name = DRAFTS[drafts]
    folder = tmp_path / name
    shutil.copytree(saved / name, folder)
    arm = TunedArm([[0], [0, 0]], {"0": {"1": 9.0 if nothing else 1.1}}, {"0": [0.5, 0.3]})
    costs = [{"rows": 1, "context": 256, "nodes": n, "seconds": 1.0, "low": 1.0, "high": 1.0} for n in (1, 4)]
    target = Target.from_pretrained(str(saved / "target"), device="cpu")
    write_plan(folder, plan_key(target), Plan([arm], [Choice(0.0, 1, 0, 1.5, 1.2, 1.2)], costs))
    out = tmp_path / "prove.json"
    arguments = command(saved, option, name)
    assert main([str(folder) if word == str(saved / name) else word for word in arguments] + ["--out", str(out)]) == 0
    checks = {check["name"]: check for check in json.loads(out.read_text())["checks"]}
    assert all(checks[name]["passed"] and checks[name]["counts"]["offered"] for name in CHECKS)
    tuned = {name: checks[f"{name}, tuned"] for name in CHECKS if name != "law"}
    assert {check["passed"] for check in tuned.values()} == {None if nothing else True}
    assert bool(tuned["greedy text"]["counts"]["offered"]) != nothing
    assert ("not tested: nothing was drafted in " in capsys.readouterr().out) == nothing


def test_a_command_that_drafts_nothing_proves_nothing(saved, capsys):
    assert main([*command(saved, "--lookup", "3"), "--num", "1", "--max-new-tokens", "1", "--samples", "1"]) == 1
    assert "\nNOTHING PROVED: nothing was drafted; give prompts" in capsys.readouterr().out


@pytest.mark.parametrize("accept", ["match", "rejection", "block"])
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=list(DRAFTS))
def test_what_is_right_passes(saved, capsys, drafts, accept):
    out = saved / "out" / "prove.json"
    assert main([*command(saved, *drafts), "--accept", accept, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    checks = {check["name"]: check for check in written["checks"]}
    assert {name: check["passed"] for name, check in checks.items()} == {
        "greedy text": True,
        "text of a seed": True if accept == "match" else None,
        "state": True,
        "law": True,
    }
    assert checks["greedy text"]["counts"]["identical"] == checks["greedy text"]["counts"]["texts"] == 4
    assert checks["law"]["counts"]["offered"] > 0
    assert written["command"].startswith("python -m decode.prove")
    assert written["passed"]
    text = capsys.readouterr().out
    if accept == "block":
        assert "tree" not in text
    assert (f"not applicable: {accept} keeps the distribution" in text) == (accept != "match")
    assert "4 of 4 texts identical, 0 near ties" in text
    assert "50 texts of 3 tokens" in text
    assert "off by 0." in text
    assert "fails with probability 1e-06" in text
    assert "PASS: " in text


def test_the_same_command_gives_the_same_numbers_and_a_failure_is_status_1(saved, capsys, monkeypatch):
    arguments = [*command(saved, "--draft-model", "draft"), "--num", "1", "--accept", "rejection"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    monkeypatch.setattr(Sampler, "flip", lambda self, probability: True)
    assert main([*arguments, "--seed", "1"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  law" in text
    assert "law. Drafting changes what this model says" in text


def test_several_temperatures_and_a_penalty_are_checks_of_their_own(saved, capsys):
    more = ["--temperature", "0.7", "1.5", "--repetition-penalty", "1.3", "--batch", "2"]
    assert main([*command(saved, "--lookup", "3"), *more, "--out", str(saved / "more.json")]) == 0
    text = capsys.readouterr().out
    for summary in ("temperature 0.7", "temperature 1.5", "temperature 1.5, repetition penalty 1.3"):
        assert re.search(f"2 of 2 texts identical, 0 near ties, 0 other differences, {summary}\\)?\n", text)
    assert "of 3 tokens, temperature 0.7" in text
    assert len(json.loads((saved / "more.json").read_text())["settings"]["more"]) == 2


def test_the_report_shows_ten_lines_of_detail_and_what_failed():
    check = Check("greedy text", False, "0 of 24 texts identical", {}, [f"prompt {i} alone" for i in range(24)])
    checks = [check, Check("law", None, "not tested")]
    lines = [*check_lines(check), *verdict_lines(checks, 1e-3)]
    assert sum("alone" in line for line in lines) == 10
    assert any("and 14 more" in line for line in lines)
    assert lines[-2].startswith("FAIL: greedy text.")
    assert lines[-1] == "The law of sampled texts was not tested."
    assert "probability 0.001" in verdict_lines([check], 1e-3)[-1]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--num", "0"], "num must be at least 1"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--alpha", "0"], "alpha must be between 0 and 1"),
        (["--temperature", "0"], "temperature must be above 0"),
        (["--temperature", "1", "0"], "temperature must be above 0 (greedy is checked anyway), got 0"),
        (["--num", "-1"], "at least 1"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--top-p", "2"], "top_p must be above 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dtype", "float23"], "float23"),
        (["--lookup", "0"], "length >= 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(saved, capsys, extra, message):
    assert main([*command(saved, "--lookup", "3"), *extra]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in next(line for line in err.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (("--head", "no/such/head"), "no/such/head"),
        (("--draft-model", "no/such/draft"), "no/such/draft"),
        (("--draft-model", "short"), "the draft model was made for 20"),
    ],
)
def test_drafts_that_cannot_be_used_are_status_2_before_anything_is_decoded(saved, capsys, drafts, message):
    assert main(command(saved, *drafts)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert "greedy text" not in err


@pytest.mark.parametrize(
    "wrong", [[], ["--head", "h", "--lookup", "2"], ["--lookup", "2", "--accept", "typical"]], ids=str
)
def test_a_wrong_command_line_is_argparses_error(wrong, capsys):
    with pytest.raises(SystemExit) as end:
        main(["target", "--prompts", "p.jsonl", *wrong])
    assert end.value.code == 2
    assert "usage: python -m decode.prove" in capsys.readouterr().err


def test_an_interrupt_keeps_the_checks_that_are_done(saved, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("decode.proofs.prove_state", interrupted)
    assert main(command(saved, "--lookup", "3")) == 130
    out, err = capsys.readouterr()
    assert "PASS  text of a seed" in out
    assert "PASS: " not in out
    assert "stopped" in err


def test_a_report_that_finds_the_disk_full_is_printed(saved, capsys, monkeypatch):
    check = Check("greedy text", True, "2 of 2 texts identical")
    monkeypatch.setattr("decode.prove.prove", lambda *arguments, **options: [check])
    assert main([*command(saved, "--lookup", "3"), "--out", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert '"passed": true' in out
    assert "cannot write /dev/full" in err


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_decoded(saved, capsys):
    assert main([*command(saved, "--lookup", "3"), "--out", str(saved)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "error: " in err
