"""Costs are measured, and the fastest tree is chosen and written into the head's folder."""

import json

import pytest
import torch

from decode import Target, generate, tune
from decode.ranks import Ranked, best_tree, simulated_tokens_per_step
from decode.tune import choose_tree, main, verify_costs
from heads import HeadNotes, load_head, read_notes, save_head
from heads.medusa import MedusaHead


def test_costs_are_measured_and_the_fastest_choice_comes_first(tiny_target):
    costs = verify_costs(tiny_target, [1, 2, 5], context=20, repeats=2)
    assert list(costs) == [1, 2, 5]
    assert all(seconds > 0 for seconds in costs.values())
    texts = [Ranked(torch.randint(0, 4, (200, 3), generator=torch.Generator().manual_seed(0)))]
    choices = choose_tree(texts, {1: 1.0, 4: 1.1, 16: 5.0}, draft_seconds=0.1)
    assert [choice.size for choice in choices] == [4, 16]
    for choice, seconds in zip(choices, (1.1, 5.0), strict=True):
        assert choice.paths == best_tree(texts, choice.size)
        assert choice.tokens_per_step == simulated_tokens_per_step(texts, choice.paths)
        assert choice.speedup == pytest.approx(choice.tokens_per_step / (seconds + 0.1))


@pytest.fixture
def folders(tiny_target, tiny_tokenizer, good_head, tmp_path):
    """A saved target, a head for it and a file of prompts."""
    tiny_target.model.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    target = Target.from_pretrained(str(tmp_path / "target"), device="cpu")
    save_head(good_head, tmp_path / "head", target=target, notes=HeadNotes(training={"steps": 3}))
    prompts = [
        {"prompt": "the cat"},
        {"turns": ["one two", "three"]},
        {"messages": [{"role": "user", "content": "sat"}]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    arguments = [tmp_path / "target", "--head", tmp_path / "head", "--prompts", tmp_path / "prompts.jsonl"]
    return target, tmp_path, [*map(str, arguments), "--max-new-tokens", "10"]


def test_the_command_writes_the_tree_that_generate_then_uses(folders, capsys):
    target, path, arguments = folders
    assert main([*arguments, "--sizes", "2", "6", "--size", "4"]) == 0
    notes = read_notes(path / "head")
    assert notes.training == {"steps": 3}
    assert 1 <= len(notes.tree) <= 3  # fewer where no text would have taken a further node
    assert f"wrote the tree of {len(notes.tree) + 1} nodes" in capsys.readouterr().out
    head = load_head(path / "head", target)
    assert head.tree == notes.tree
    plain = generate(target, "the cat", max_new_tokens=10)
    assert generate(target, "the cat", head=head, max_new_tokens=10).token_ids == plain.token_ids


def test_heads_whose_guesses_depend_on_the_tokens_before_are_refused(folders, capsys, monkeypatch):
    _, path, arguments = folders
    monkeypatch.setattr(MedusaHead, "depth_only", False)
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "tune measures trees for heads whose guesses depend on the depth only" in message
    assert f"try trees with `python -m decode {path / 'target'} --head {path / 'head'} --tree-depth" in message
    assert read_notes(path / "head") == HeadNotes(training={"steps": 3})


def test_a_tree_that_cannot_be_written_is_shown(folders, capsys, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune, "write_notes", fail)
    assert main([*folders[2], "--sizes", "2", "3"]) == 2
    message = capsys.readouterr().err
    assert 'config.json yourself: "tree": [[0]' in message


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--sizes", "0"], "tree sizes must be at least 2"),
        (["--sizes", "1"], "size"),
        (["--size", "1"], "size"),
        (["--sizes", "2", "100000000"], "a tree of 100000000 nodes is not below the target's context, 256"),
        (["--head", "nowhere"], "not a head folder"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_arguments_are_an_error_and_leave_the_head_alone(folders, capsys, extra, message):
    _, path, arguments = folders
    assert main([*arguments, *extra]) == 2
    assert message in capsys.readouterr().err
    assert read_notes(path / "head") == HeadNotes(training={"steps": 3})
