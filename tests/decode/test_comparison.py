"""`decode.bench compare`: what it writes, that it continues where it was killed, and what it refuses."""

import json
from types import SimpleNamespace

import pytest
import torch

from decode import Target, comparison, generate
from decode.bench import main
from decode.comparison_log import ComparisonLog, Key
from decode.measure import Answer
from decode.methods import our_runs
from heads import HeadNotes, create_head, save_head
from heads.medusa import MedusaConfig

METHODS = [
    *("plain", "prompt lookup", "draft model chain 4"),
    *("medusa a chain 3", "medusa a tree 4", "medusa b chain 3", "medusa b tree 10 (dynamic)"),
]
SETS = {"x": ["the cat", "one two three"], "y": ["four sat on"]}


@pytest.fixture(scope="module")
def place(tiny_tokenizer, make_tiny_llama, tmp_path_factory):
    """A saved target, two Medusa heads for it (one has a tree), two files of prompts."""
    path = tmp_path_factory.mktemp("comparison")
    make_tiny_llama().save_pretrained(path / "target")
    tiny_tokenizer.save_pretrained(path / "target")
    target = Target.from_pretrained(str(path / "target"), device="cpu")
    for name, tree in (("a", ((0,), (1,), (0, 0))), ("b", None)):
        save_medusa(path / name, target, tree)
    for name, prompts in SETS.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def save_medusa(path, target, tree=None):
    head = create_head("medusa", MedusaConfig(hidden_size=32, vocab_size=320, num_heads=2), target)
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    save_head(head, path, target=target, notes=HeadNotes(tree=tree))


def command(place, out, *extra, heads=("a",)) -> list[str]:
    arguments = ["compare", *(place / name for name in heads), "--prompts", place / "x.jsonl", place / "y.jsonl"]
    return list(map(str, [*arguments, "--max-new-tokens", 10, "--device", "cpu", "--out", out, *extra]))


@pytest.fixture(scope="module")
def finished(place):
    """The command run once from beginning to end."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *lines, sep=" ", **_: printed.append(sep.join(map(str, lines))))
        options = ["--draft-model", place / "target", "--chain", 3]
        status = main(command(place, place / "finished", *options, heads=("a", "b")))
    report = json.loads((place / "finished" / "comparison.json").read_text())
    return SimpleNamespace(status=status, report=report, printed="\n".join(printed), out=place / "finished")


def test_every_method_is_compared_at_every_temperature_on_every_set(finished):
    assert finished.status == 0
    rows = finished.report["rows"]
    expected = [(t, prompts, m) for t in (0.0, 1.0) for prompts in ("x", "y", "all") for m in METHODS]
    assert [(row["temperature"], row["prompts"], row["method"]) for row in rows] == expected
    assert all(row["differences"] == row["unexcused"] == 0 for row in rows)
    assert {row["num_prompts"] for row in rows if row["prompts"] == "all"} == {3}


def test_figures_are_those_of_decoding_and_the_seed_fixes_sampled_texts(finished, place):
    target = Target.from_pretrained(str(place / "target"), device="cpu")
    for temperature in (0.0, 1.0):
        sampling = comparison.Sampling(temperature=temperature, seed=0)
        outs = [generate(target, p, head=place / "a", sampling=sampling, max_new_tokens=10) for p in SETS["x"]]
        mine = {"temperature": temperature, "method": "medusa a tree 4", "prompts": "x"}
        (row,) = [row for row in finished.report["rows"] if mine.items() <= row.items()]
        (raw,) = [raw for raw in finished.report["raw"] if mine.items() <= raw.items()]
        tokens, steps = (sum(getattr(out.stats, name) for out in outs) for name in ("tokens", "steps"))
        assert row["tokens_per_step"][0] == pytest.approx((tokens - 2) / steps)
        assert [answer["tokens"] for answer in raw["answers"]] == [len(out.token_ids) for out in outs]
        assert [answer["counts"]["trees"] for answer in raw["answers"]] == [out.stats.steps for out in outs]
        assert row["speedup"][1] <= row["speedup"][0] <= row["speedup"][2]


def test_it_prints_one_overall_table_first_and_says_how_it_was_measured(finished):
    tables = finished.printed.split("## ")[1:]
    assert tables[0].startswith("All 3 prompts")
    header, _, plain, *others = [line for line in tables[0].splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == [
        *("method", "tokens per step, T=0", "tokens per step, T=1", "speed-up, T=0", "speed-up, T=1"),
        "texts identical",
    ]
    assert "1.00 [1.00, 1.00]" in plain
    assert "6 of 6" in plain
    assert len(others) == len(METHODS) - 1
    assert len(tables) == 4
    assert finished.report["command"].startswith("python -m decode.bench compare")
    assert finished.report["machine"]["torch"] == torch.__version__


def test_there_is_a_picture(finished):
    picture = (finished.out / "comparison.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert 600 < width < 4000
    assert 600 < height < 2000


def test_a_killed_run_continues_and_another_command_is_refused(place, tmp_path, monkeypatch, capsys):
    measured, measure = [], comparison.measure

    def killed_after(number):
        def run(target, runs, ids, *arguments, **options):
            if len(measured) == number:
                raise KeyboardInterrupt
            measured.append(ids)
            return measure(target, runs, ids, *arguments, **options)

        return run

    monkeypatch.setattr(comparison, "measure", killed_after(4))
    assert main(command(place, tmp_path)) == 130
    raw = tmp_path / "raw.jsonl"
    assert len(raw.read_text().splitlines()) == 1 + 4
    whole = raw.read_text()
    raw.write_text(whole + '{"prompts": "y", "num')  # torn by the kill
    monkeypatch.setattr(comparison, "measure", killed_after(None))
    assert main(command(place, tmp_path)) == 0
    assert len(measured) == 2 * 3
    assert raw.read_text().startswith(whole)
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(raw["answers"]) for raw in report["raw"]] == [*[2] * 4, *[1] * 4] * 2
    monkeypatch.setattr(comparison, "measure", killed_after(6))
    assert main(command(place, tmp_path)) == 0  # nothing is left to do
    capsys.readouterr()
    before = raw.read_text()
    assert main(command(place, tmp_path, "--seed", "3")) == 2
    assert "seed was 0 and is 3; give another --out" in capsys.readouterr().err
    assert raw.read_text() == before


def test_a_disk_that_fills_up_ends_it_with_a_message_and_loses_nothing(place, tmp_path, monkeypatch, capsys):
    append, measured = ComparisonLog.append, []

    def full_after_two(self, key, answers):
        if len(measured) == 2:
            with (tmp_path / "raw.jsonl").open("a") as file:
                file.write('{"prompts": "x", "num')
            raise OSError(28, "No space left on device")
        measured.append(key)
        append(self, key, answers)

    short = command(place, tmp_path, "--max-new-tokens", 2)
    with monkeypatch.context() as patch:
        patch.setattr(ComparisonLog, "append", full_after_two)
        assert main(short) == 2
    message = capsys.readouterr().err
    assert f"cannot write to {tmp_path}" in message
    assert "the same command continues" in message
    whole = (tmp_path / "raw.jsonl").read_text().rpartition("\n")[0]
    (tmp_path / "comparison.json").mkdir()
    assert main(short) == 2
    assert "comparison.json" in capsys.readouterr().err
    (tmp_path / "comparison.json").rmdir()
    monkeypatch.setattr(comparison, "measure", None)
    assert main(short) == 0  # all was kept
    lines = (tmp_path / "raw.jsonl").read_text()
    assert lines.startswith(whole + "\n")
    assert len(lines.splitlines()) == 1 + 6


def test_a_torn_line_is_cut_off_and_what_is_before_it_not_written_anew(tmp_path, monkeypatch):
    path = tmp_path / "raw.jsonl"
    ComparisonLog(path, {"seed": 0}).append(Key("x", 0, 0.0), {"plain": Answer(1.0, 2)})
    before = path.read_text()
    path.write_text(before + '{"prompts"')
    monkeypatch.setattr(type(path), "write_text", None)
    assert ComparisonLog(path, {"seed": 0}).answers == {Key("x", 0, 0.0): {"plain": Answer(1.0, 2)}}
    assert path.read_text() == before


def test_an_entry_without_one_of_the_methods_is_measured_anew(place, tmp_path, monkeypatch):
    short = command(place, tmp_path, "--max-new-tokens", 2)
    assert main(short) == 0
    settings, first, *others = (tmp_path / "raw.jsonl").read_text().splitlines()
    entry = json.loads(first)
    del entry["answers"]["plain"]
    (tmp_path / "raw.jsonl").write_text("\n".join([settings, json.dumps(entry), *others, ""]))
    measured, measure = [], comparison.measure
    monkeypatch.setattr(comparison, "measure", lambda *a, **options: measured.append(a[2]) or measure(*a, **options))
    for _ in range(2):
        assert main(short) == 0
        assert len(measured) == 1


def test_a_wrong_text_is_shown_and_fails_the_command(place, tmp_path, monkeypatch, capsys):
    def broken_runs(target, proposers, sampling, max_new_tokens):
        runs = our_runs(target, proposers, sampling, max_new_tokens)
        right = runs["prompt lookup"]

        def wrong(ids):
            tokens, stats = right(ids)
            return [*tokens[:1], (tokens[1] + 1) % 320, *tokens[2:]], stats

        return runs | ({"prompt lookup": wrong} if not sampling.greedy else {})

    monkeypatch.setattr(comparison, "our_runs", broken_runs)
    assert main(command(place, tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "T=1, prompt lookup: x[0] token 1" in printed
    assert "T=0, prompt lookup:" not in printed
    assert "| 3 of 6" in printed
    assert [json.loads(line)["temperature"] for line in (tmp_path / "raw.jsonl").read_text().splitlines()[1:]]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--temperature", "1", "1"], "temperatures must differ"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--chain", "0"], "a chain has at least 1 token"),
        (["--lookup", "0"], "prompt lookup needs length >= 1"),
        (["--num", "0"], "at least 1 prompt"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--target", "nowhere"], "cannot load the target nowhere (correct --target)"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_decoded(place, tmp_path, capsys, extra, message):
    assert main(command(place, tmp_path, *extra)) == 2
    assert message in capsys.readouterr().err
    raw = tmp_path / "raw.jsonl"
    assert not raw.exists() or not raw.read_text()


def test_a_draft_model_with_too_short_a_context_is_refused(place, tmp_path, make_tiny_llama, tiny_tokenizer, capsys):
    model = make_tiny_llama()
    model.config.max_position_embeddings = 10
    model.save_pretrained(tmp_path / "short")
    tiny_tokenizer.save_pretrained(tmp_path / "short")
    assert main(command(place, tmp_path / "out", "--draft-model", tmp_path / "short")) == 2
    assert "the draft model was made for 10" in capsys.readouterr().err


def test_prompt_files_of_one_name_are_refused(place, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text((place / "x.jsonl").read_text())
    paths = [place / "x.jsonl", tmp_path / "x.jsonl"]
    assert main(command(place, tmp_path, "--prompts", *paths)) == 2
    assert "must differ in name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [b'{"messages": []}\n', b'{"settings": 5}\n', b"\xff\n", b'{"settings": {}}\n{"answers": []}\n', b"[]\n", b"\n"],
)
def test_a_file_that_is_no_comparison_is_refused_and_kept(tmp_path, content):
    (tmp_path / "raw.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"raw\.jsonl holds no comparison .* give another --out"):
        ComparisonLog(tmp_path / "raw.jsonl", {})
    assert (tmp_path / "raw.jsonl").read_bytes() == content


def test_heads_must_be_of_one_target_and_name_it(place, tmp_path, make_tiny_llama, tiny_tokenizer, capsys):
    other = Target(make_tiny_llama(seed=5), tiny_tokenizer, name="moved/away")
    save_medusa(tmp_path / "other", other)
    arguments = ["--prompts", str(place / "x.jsonl"), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(["compare", str(place / "a"), str(tmp_path / "other"), *arguments]) == 2
    assert "the heads were trained for different targets" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "other"), *arguments]) == 2
    assert (
        "cannot load the target moved/away (the heads were trained for it; give --target if it has moved)"
        in capsys.readouterr().err
    )
    assert main(["compare", str(tmp_path / "other"), "--target", str(place / "target"), *arguments]) == 2
    assert "has other weights" in capsys.readouterr().err
    other.model.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    short = ["--target", str(tmp_path / "target"), "--max-new-tokens", "4", "--temperature", "0"]
    assert main(["compare", str(tmp_path / "other"), *short, *arguments]) == 0
    assert "## All 2 prompts" in capsys.readouterr().out
