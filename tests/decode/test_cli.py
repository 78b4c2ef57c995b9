"""`python -m decode`, in this process: text on standard output, counts on standard error, errors with status 2."""

import io

import pytest

import decode.__main__ as command
from decode import DynamicTree, PromptLookup, Sampling, Target, generate
from decode.__main__ import main
from decode.results import Delta
from heads import save_head


@pytest.fixture(scope="module")
def saved(tiny_target, tiny_tokenizer, good_head, tmp_path_factory):
    """A target's folder, a head's folder, and the target as the command loads it."""
    path = tmp_path_factory.mktemp("saved")
    tiny_target.model.save_pretrained(path / "target")
    tiny_tokenizer.save_pretrained(path / "target")
    target = Target.from_pretrained(str(path / "target"), device="cpu")
    save_head(good_head, path / "head", target=target)
    return str(path / "target"), str(path / "head"), target


@pytest.mark.parametrize("drafts", ["none", "head", "lookup", "measured lookup"])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_text_is_that_of_generate(saved, capsys, drafts, sampled):
    folder, head, target = saved
    arguments = [folder, "the cat sat", "--max-new-tokens", "12", "--device", "cpu"]
    choices = {"none": [], "head": ["--head", head], "lookup": ["--lookup", "3"], "measured lookup": ["--lookup"]}
    arguments += choices[drafts]
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=5)
    if sampled:
        options = ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01"]
        arguments += [*options, "--repetition-penalty", "1.1", "--seed", "5"]
    expected = generate(target, "the cat sat", sampling=sampling if sampled else None, max_new_tokens=12)
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert f"{expected.stats.tokens} tokens in" in err
    assert f"ended by {expected.finish_reason}" in err
    if sampled:
        assert "seed 5" in err


def test_a_drawn_seed_is_shown_and_gives_the_text_again(saved, capsys):
    folder = saved[0]
    arguments = [folder, "the cat", "--max-new-tokens", "12", "--temperature", "1.5"]
    assert main(arguments) == 0
    first, err = capsys.readouterr()
    seed = err.split("seed ")[1].split("]")[0]
    assert main([*arguments, "--seed", seed]) == 0
    assert capsys.readouterr().out == first


def test_standard_input_is_the_prompt_if_there_is_none(saved, capsys, monkeypatch):
    folder, _, target = saved
    monkeypatch.setattr("sys.stdin", io.StringIO("one two three"))
    assert main([folder, "--raw", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == generate(target, "one two three", raw=True, max_new_tokens=6).text + "\n"


def test_stop_strings_and_rejection_are_passed_on(saved, capsys):
    folder, head, target = saved
    whole = generate(target, "the cat", max_new_tokens=20).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    arguments = [folder, "the cat", "--max-new-tokens", "20", "--stop", "no such text", "--stop", stop]
    assert main([*arguments, "--head", head, "--accept", "rejection"]) == 0
    out, err = capsys.readouterr()
    assert out == whole[: whole.find(stop)] + "\n"
    assert "ended by stop" in err


@pytest.mark.parametrize("accept", ["match", "rejection", "block"])
def test_a_draft_model_that_is_the_target_has_all_its_drafts_accepted(saved, capsys, accept):
    folder, _, target = saved
    expected = generate(target, "the cat sat", max_new_tokens=13)
    arguments = [folder, "the cat sat", "--max-new-tokens", "13", "--draft-model", folder, "--draft-length", "3"]
    assert main([*arguments, "--accept", accept]) == 0
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert "accepted by depth: 1.00 1.00 1.00;" in err
    options = ["--temperature", "1.5", "--seed", "2", "--draft-temperature", "0.5", "--presence-penalty", "0.1"]
    assert main([*arguments, "--accept", accept, *options]) == 0
    out, err = capsys.readouterr()
    if accept == "match":
        sampling = Sampling(temperature=1.5, seed=2, presence_penalty=0.1)
        assert out == generate(target, "the cat sat", sampling=sampling, max_new_tokens=13).text + "\n"
    assert "exact" not in err


@pytest.mark.parametrize("drafts", ["head", "draft-model"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_dynamic_tree_changes_no_text_and_is_as_large_as_asked_for(saved, capsys, monkeypatch, drafts, sampled):
    folder, head, target = saved
    trees = []
    monkeypatch.setattr(DynamicTree, "__call__", lambda self, *a, g=DynamicTree.__call__, **o: g(noted(self), *a, **o))

    def noted(tree: DynamicTree) -> DynamicTree:
        trees.append(tree)
        return tree

    arguments = [folder, "the cat sat", "--max-new-tokens", "12", f"--{drafts}", head if drafts == "head" else folder]
    arguments += ["--tree-width", "2", "--tree-size", "5", "--tree-confidence", "0.01"]
    sampling = Sampling(temperature=0.8, seed=5) if sampled else None
    temperature = None
    if sampled:
        arguments += ["--temperature", "0.8", "--seed", "5"]
    if sampled and drafts == "draft-model":
        temperature = 0.5
        arguments += ["--draft-temperature", "0.5", "--draft-length", "2"]
    expected = generate(target, "the cat sat", sampling=sampling, max_new_tokens=12)
    assert main(arguments) == 0
    assert capsys.readouterr().out == expected.text + "\n"
    depth = 3 if drafts == "head" else 2 if sampled else 4
    assert set(trees) == {DynamicTree(depth, 2, 5, confidence=0.01, temperature=temperature)}


@pytest.mark.parametrize(
    ("option", "length"), [(["--lookup"], None), (["--lookup", "auto"], None), (["--lookup", "3"], 3)]
)
def test_lookup_without_a_number_weighs_what_was_measured(saved, capsys, monkeypatch, option, length):
    folder, _, _ = saved
    proposers = []
    monkeypatch.setattr(command, "stream", lambda *_, proposer, **options: proposers.append(proposer) or [])
    assert main([folder, "the cat", *option]) == 0
    (proposer,) = proposers
    if length is not None:
        assert proposer == PromptLookup(length)
    else:
        assert [point.nodes for point in proposer.costs.points] == [1, 2, 4, 8, 16, 32]
        assert all(point.seconds > 0 for point in proposer.costs.points)


def test_an_interrupt_is_one_line(saved, capsys, monkeypatch):
    def stop(*arguments, **options):
        yield Delta(0, "the", [5], None)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "stream", stop)
    assert main([saved[0], "x"]) == 130
    out, err = capsys.readouterr()
    assert out == "the"
    assert err.endswith("\nstopped\n")


def test_typical_acceptance_is_labelled_not_exact(saved, capsys):
    folder, head, _ = saved
    arguments = [folder, "the cat", "--head", head, "--accept", "typical", "--max-new-tokens", "8"]
    assert main([*arguments, "--temperature", "1", "--seed", "1"]) == 0
    assert "typical acceptance, NOT exact]" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "exact" not in capsys.readouterr().err  # greedy text is the target's with any rule


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TARGET", ""], "prompt is empty"),
        (["TARGET", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["TARGET", "x", "--temperature", "-1"], "temperature must be at least 0"),
        (["TARGET", "x", "--top-p", "0"], "top_p must be above 0"),
        (["TARGET", "x", "--lookup", "0"], "length >= 1"),
        (["TARGET", "x", "--lookup", "100000000"], "length >= 1 and <= 1024"),
        (["TARGET", "half a character: \udcff"], "not Unicode text"),
        (["TARGET", "x", "--head", "no/such/head"], "no/such/head is not a head folder"),
        (["TARGET", "x", "--stop", ""], "stop string is empty"),
        (["TARGET", "cat " * 400], "the target's context is 256"),
        (["no/such/target", "x"], "no/such/target"),
        (["TARGET", "x", "--dtype", "float23"], "float23"),
        (["TARGET", "x", "--device", "warp"], "warp"),
        (["TARGET", "x", "--device", "meta"], "device meta computes nothing; use cpu"),
        (["TARGET", "x", "--fixed"], "--fixed is for a --head or a --draft-model"),
        (["TARGET", "x", "--fixed", "--lookup"], "--fixed is for a --head or a --draft-model"),
        (["TARGET", "x", "--draft-model", "no/such/model"], "no/such/model"),
        (["TARGET", "x", "--draft-model", "TARGET", "--draft-length", "0"], "at least 1 token"),
        (["TARGET", "x", "--draft-length", "3"], "are for a --draft-model"),
        (["TARGET", "x", "--draft-model", "TARGET", "--draft-temperature", "-1"], "temperature must be at least 0"),
        (["TARGET", "x", "--draft-model", "TARGET", "--draft-temperature", "0.5"], "no effect on the best tokens"),
        (
            ["TARGET", "x", "--draft-model", "TARGET", "--draft-temperature=1", "--temperature=1", "--accept=typical"],
            "leave it out",
        ),
        (["TARGET", "x", "--tree-depth", "3"], "are for a --head or a --draft-model"),
        (["TARGET", "x", "--lookup", "3", "--tree-confidence", "0.5"], "are for a --head or a --draft-model"),
        (["TARGET", "x", "--draft-model", "TARGET", "--tree-width", "0"], "width must be a whole number of at least 1"),
        (["TARGET", "x", "--draft-model", "TARGET", "--tree-confidence", "2"], "between 0 (keep all) and 1, got 2"),
        (["TARGET", "x", "--draft-model", "TARGET", "--tree-width=2", "--accept=block"], "--tree-width 1"),
        (
            [
                *("TARGET", "x", "--draft-model", "TARGET", "--tree-width=2", "--temperature=1"),
                *("--draft-temperature=1", "--accept=rejection"),
            ],
            "does not share the target's noise",
        ),
        (["TARGET", "x", "--presence-penalty", "inf"], "presence_penalty must be a finite number"),
    ],
)
def test_errors_are_one_line_and_status_2(saved, capsys, arguments, message):
    assert main([saved[0] if argument == "TARGET" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    line = next(line for line in err.splitlines() if line.startswith("error: "))
    assert message in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["t", "p", "--head", "h", "--lookup", "3"],
        ["t", "p", "--accept", "sloppy"],
        ["t", "-x"],
        ["t", "--lookup", "a prompt"],
    ],
)
def test_a_wrong_command_line_is_argparses_error(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: python -m decode" in capsys.readouterr().err


def test_help_names_every_choice(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--head", "--lookup", "--accept", "--stop", "--seed", "--temperature", "--raw", "--tree-depth"):
        assert option in text
