"""`decode.bench`: what it measures, prints and writes, and what it refuses."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from decode import Sampling, Target, bench, generate
from decode.bench import main
from decode.costs import measure_costs
from decode.tuned import Choice, Plan, TunedArm, plan_key, write_plan

OURS = [
    *("plain", "prompt lookup", "prompt lookup 3", "medusa a chain 3", "medusa a tree 4"),
    *("medusa a tuned", "medusa a adaptive", "medusa b chain 3", "medusa b tree 10 (dynamic)"),
    *("draft model chain 3", "draft model chain 4", "draft model chain 5"),
]
THEIRS = ["transformers", "transformers prompt lookup", "transformers assisted"]
SETTINGS = [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]


def tune(folder, target):
    """A plan: the tree of three nodes, but nothing for batches of two at temperature 0."""
    costs = {"0": {"1": 1.1, "2": 1.2}, "1": {"1": 1.1, "2": 1.2}}
    arms = [TunedArm([[0], [1]], costs, {"0": [0.9], "1": [0.9]})]
    choices = [Choice(t, rows, None if (t, rows) == (0.0, 2) else 0, 1.5, 1.2, 1.1) for t, rows in SETTINGS]
    points = measure_costs(target, nodes=[2], repeats=1).write()
    write_plan(folder, plan_key(target), Plan(arms, choices, points, made={"target": target.fingerprint}))


@pytest.fixture(scope="module")
def place(bench_files, tmp_path_factory):
    """The folders, head a with a plan for this machine."""
    path = tmp_path_factory.mktemp("tuned")
    shutil.copytree(bench_files.path / "a", path / "a")
    tune(path / "a", bench_files.target)
    return path


@pytest.fixture(scope="module")
def finished(bench_files, place):
    """The command run once from beginning to end."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *lines, sep=" ", **_: printed.append(sep.join(map(str, lines))))
        options = ["--draft-model", bench_files.path / "target", "--chain", 3, "--lookup", 3]
        several = ["--temperature", 0, 1, "--rows", 1, 2, "--out", place / "out"]
        heads = (place / "a", bench_files.path / "b")
        status = main(bench_files.command(*options, *several, heads=heads))
    report = json.loads((place / "out" / "comparison.json").read_text())
    return SimpleNamespace(status=status, report=report, printed="\n".join(printed), out=place / "out")


def find(entries, **wanted):
    (found,) = [entry for entry in entries if wanted.items() <= entry.items()]
    return found


def test_all_methods_give_plain_text_and_are_counted(finished):
    assert finished.status == 0
    rows = finished.report["rows"]
    expected = [
        (temperature, number, prompts, method)
        for temperature, number in SETTINGS
        for prompts in ("x", "y", "all")
        for method in [*OURS, *(THEIRS if (temperature, number) == (0.0, 1) else [])]
    ]
    assert [(row["temperature"], row["rows"], row["prompts"], row["method"]) for row in rows] == expected
    assert all(row["differences"] == row["unexcused"] == 0 for row in rows)
    everything = [row for row in rows if row["prompts"] == "all"]
    assert {row["num_prompts"] for row in everything} == {3}
    for row in everything:
        if row["method"] == "plain":
            assert row["tokens_per_step"] == row["speedup"] == [1.0, 1.0, 1.0]
        if row["method"] in THEIRS:
            assert row["tokens_per_step"] is None
            assert row["time_shares"] == {}
        else:
            assert sum(row["time_shares"].values()) == pytest.approx(1.0)
            assert row["time_shares"]["score"] > 0


def test_figures_are_those_of_decoding_and_the_seed_fixes_sampled_texts(finished, bench_files, place):
    target = bench_files.target
    prompts = bench_files.sets["x"]
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=0)
        options = {"sampling": sampling, "max_new_tokens": 10, "adapt": False}
        alone = [generate(target, prompt, head=bench_files.path / "a", **options) for prompt in prompts]
        together = generate(target, prompts, head=bench_files.path / "a", **options)
        for rows, outs in ((1, alone), (2, together)):
            mine = {"temperature": temperature, "method": "medusa a tree 4", "prompts": "x", "rows": rows}
            row, raw = find(finished.report["rows"], **mine), find(finished.report["raw"], **mine)
            tokens, steps = (sum(getattr(out.stats, name) for out in outs) for name in ("tokens", "steps"))
            assert row["tokens_per_step"][0] == pytest.approx((tokens - 2) / steps)
            by_row = [stats for answer in raw["answers"] for stats in answer["by_row"]]
            assert [stats["tokens"] for stats in by_row] == [len(out.token_ids) for out in outs]
            assert sum(answer["counts"]["trees"] for answer in raw["answers"]) == steps
            assert row["speedup"][1] <= row["speedup"][0] <= row["speedup"][2]


def test_what_was_tuned_is_measured_for_each_temperature_and_number_of_rows(finished):
    rows = [row for row in finished.report["rows"] if row["prompts"] == "all"]
    for temperature, number in SETTINGS:
        mine = {"temperature": temperature, "rows": number}
        tuned = find(rows, method="medusa a tuned", **mine)
        assert tuned["nodes_per_step"] == (1.0 if (temperature, number) == (0.0, 2) else 3.0)
        assert find(rows, method="medusa a adaptive", **mine)["nodes_per_step"] <= 3.0


def test_rows_are_decoded_together_in_the_order_of_the_file_and_timed_as_clients_see_them(finished, bench_files):
    raw = find(finished.report["raw"], method="plain", prompts="x", temperature=0.0, rows=2)
    (answer,) = raw["answers"]
    assert answer["rows"] == len(answer["by_row"]) == 2
    (short,) = find(finished.report["raw"], method="plain", prompts="y", temperature=0.0, rows=2)["answers"]
    assert short["rows"] == 1  # the last batch of a set may be smaller
    for stats in answer["by_row"]:
        seconds, tokens = zip(*stats["bursts"], strict=True)
        assert sum(tokens) == stats["tokens"]
        assert list(seconds) == sorted(seconds)
        assert 0 < seconds[0] < seconds[-1] < answer["seconds"]
    lines = [json.loads(line) for line in (finished.out / "raw.jsonl").read_text().splitlines()[1:]]
    places = [(line["prompts"], line["rows"], line["number"], line["temperature"]) for line in lines]
    in_turn = [("x", 1, 0), ("x", 2, 0), ("x", 1, 1), ("y", 1, 0), ("y", 2, 0)]
    assert places == [(*place, temperature) for place in in_turn for temperature in (0.0, 1.0)]
    assert lines[0]["answers"]["plain"]["by_row"][0]["bursts"]


def test_it_prints_the_overall_tables_and_says_how_it_was_measured(finished):
    tables = finished.printed.split("## ")[1:]
    assert [table.splitlines()[0] for table in tables] == [
        *(
            f"{title}, rows: {rows}"
            for rows in (1, 2)
            for title in (
                "All 3 prompts, with 95 % intervals",
                "Tokens per step by prompt set",
                "Speed-up over plain decoding by prompt set",
                "Drafts: their cost (a plain step is 1), and the share accepted at each depth that was reached",
            )
        ),
        "Speed-up by rows and temperature",
        *("Throughput by rows of the batch; plain decoding with 1 is 1", "Share of the time"),
    ]
    header, _, plain, *others = [line for line in tables[0].splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == [
        *("method", "tokens per step, T=0", "tokens per step, T=1", "speed-up, T=0", "speed-up, T=1"),
        *("median, T=0", "median, T=1", "texts identical"),
    ]
    assert "1.00 [1.00, 1.00]" in plain
    assert "6 of 6" in plain
    assert len(others) == len(OURS) + len(THEIRS) - 1
    assert "transformers" in others[-1]
    assert "3 of 3" in others[-1]
    assert finished.report["command"].startswith("python -m decode.bench ")
    assert finished.report["machine"]["torch"] == torch.__version__
    assert finished.report["machine"]["device"] in finished.printed
    assert "wrote comparison.json and comparison.png, comparison-rows-2.png to" in finished.printed


def test_there_is_a_picture_for_each_number_of_rows(finished):
    for name in ("comparison.png", "comparison-rows-2.png"):
        picture = (finished.out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
        assert 600 < width < 6000
        assert 600 < height < 2000


def test_methods_are_chosen_and_without_out_nothing_is_left_behind(bench_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(bench_files.command("--methods", "medusa tree", heads=["a"], new_tokens=4)) == 0
    out, _ = capsys.readouterr()
    table = out.split("## ")[1]
    assert [line.split("|")[1].strip() for line in table.splitlines()[4:] if line] == ["plain", "medusa tree 4"]
    assert "wrote" not in out
    assert list(tmp_path.iterdir()) == []
    assert main(bench_files.command("--methods", "plain", heads=[], new_tokens=2)) == 0
    assert main(bench_files.command("--methods", "plain", "--out", tmp_path / "o", heads=[], new_tokens=2)) == 0
    assert main(bench_files.command("--methods", "eagle")) == 2
    assert "no method begins with ['eagle']; there are plain, prompt lookup, medusa chain 3" in capsys.readouterr().err


def test_transformers_is_measured_as_shipped_and_packed_at_temperature_0_only(bench_files, tmp_path, capsys):
    options = ["--methods", "transformers", "--dtype", "float32", "--draft-model", bench_files.path / "target"]
    assert main(bench_files.command(*options, "--temperature", 1, 0, "--out", tmp_path, new_tokens=4)) == 0
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    names = ["transformers", "transformers (packed weights)", "transformers prompt lookup"]
    names += ["transformers prompt lookup (packed weights)", "transformers assisted"]
    for temperature, expected in ((0, ["plain", *names]), (1, ["plain"])):
        found = [row["method"] for row in rows if (row["prompts"], row["temperature"]) == ("all", temperature)]
        assert found == expected
    for extra in (["--temperature", 1], ["--rows", 2]):
        assert main(bench_files.command(*options, *extra)) == 2
        assert "no method begins with ['transformers']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--temperature", "1", "1"], "--temperature: the numbers must differ"),
        (["--rows", "2", "2"], "--rows: the numbers must differ"),
        (["--temperature", "0.12345671", "0.12345672"], "--temperature: the numbers must differ, in their first six"),
        (["--rows", "0"], "a batch has at least 1 row"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-p", "0"], "top_p"),
        (["--chain", "0"], "a chain has at least 1 token"),
        (["--lookup", "0"], "prompt lookup needs length >= 1"),
        (["--num", "0"], "at least 1 prompt"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--head", "nowhere"], "nowhere"),
        (["--draft-model", "nowhere"], "cannot load the model nowhere"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_decoded(bench_files, tmp_path, capsys, extra, message):
    assert main(bench_files.command("--out", tmp_path, *extra)) == 2
    assert message in capsys.readouterr().err
    raw = tmp_path / "raw.jsonl"
    assert not raw.exists() or not raw.read_text()


def test_a_target_that_is_not_there_and_files_that_cannot_be_written_are_refused(bench_files, tmp_path, capsys):
    assert main(["nowhere", *bench_files.command()[1:]]) == 2
    assert "cannot load the model nowhere" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(bench_files.command("--out", tmp_path / "file")) == 2
    assert "file" in capsys.readouterr().err


def test_a_broken_prompt_file_is_refused_by_its_line(bench_files, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": \n')
    assert main(bench_files.command("--prompts", tmp_path / "p.jsonl")) == 2
    assert "p.jsonl:2" in capsys.readouterr().err


def test_a_draft_model_with_too_short_a_context_is_refused(bench_files, tmp_path, make_tiny_llama, capsys):
    model = make_tiny_llama()
    model.config.max_position_embeddings = 10
    model.save_pretrained(tmp_path / "short")
    bench_files.target.tokenizer.save_pretrained(tmp_path / "short")
    assert main(bench_files.command("--draft-model", tmp_path / "short")) == 2
    assert "the draft model was made for 10" in capsys.readouterr().err


def test_prompt_files_of_one_name_are_refused(bench_files, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text((bench_files.path / "x.jsonl").read_text())
    paths = [bench_files.path / "x.jsonl", tmp_path / "x.jsonl"]
    assert main(bench_files.command("--prompts", *paths)) == 2
    assert "must differ in name" in capsys.readouterr().err


def test_heads_of_another_target_and_heads_given_twice_are_refused(bench_files, tmp_path, make_tiny_llama, capsys):
    other = Target(make_tiny_llama(seed=5), bench_files.target.tokenizer, name="another")
    bench_files.save_medusa(tmp_path / "other", other)
    assert main(bench_files.command(heads=["a", tmp_path / "other"])) == 2
    assert "has other weights" in capsys.readouterr().err
    assert main(bench_files.command(heads=["a", "a"])) == 2
    assert "a head is given twice" in capsys.readouterr().err


def test_results_are_printed_where_they_cannot_be_written(bench_files, tmp_path, monkeypatch, capsys):
    def fail(rows, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "save_chart", fail)
    assert main(bench_files.command("--methods", "plain", "--out", tmp_path, heads=[], new_tokens=2)) == 2
    out, error = capsys.readouterr()
    assert out.startswith("## All 3 prompts")
    assert "wrote" not in out
    assert f"cannot write to {tmp_path}" in error


def test_results_are_written_where_they_cannot_be_printed(bench_files, tmp_path, capsys, fill_stdout):
    fill_stdout()
    assert main(bench_files.command("--methods", "plain", "--out", tmp_path, heads=[], new_tokens=2)) == 2
    assert "error: cannot write to standard output ([Errno 28]" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"raw.jsonl", "comparison.json", "comparison.png"}


def test_the_old_command_says_how_to_call_the_new_one(bench_files, tmp_path, capsys):
    old = ["compare", str(bench_files.path / "a"), "--prompts", str(bench_files.path / "x.jsonl")]
    assert main([*old, "--out", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert "python -m decode.bench TARGET --head DIR" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
