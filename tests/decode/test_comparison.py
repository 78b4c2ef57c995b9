"""`decode.bench` continues where it was killed, in the order it would have had, and shows what is wrong."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from decode import bench, comparison
from decode.bench import main
from decode.comparison import Comparison
from decode.comparison_log import ComparisonLog, Key
from decode.costs import CONTEXTS, Cost, VerifyCosts
from decode.measure import Answer, RowDifference, measure
from decode.methods import Run, our_runs
from decode.results import Stats
from decode.sampling import Sampling

BOTH = ["--temperature", "0", "1"]
FEW = ["--methods", "medusa"]
COSTS = VerifyCosts([Cost(1, 20, 1, 0.1, 0.1, 0.1), Cost(1, 20, 4, 0.15, 0.15, 0.15)])


def test_a_killed_run_continues_and_another_command_is_refused(bench_files, tmp_path, monkeypatch, capsys):
    measured, original = [], comparison.measure
    command = bench_files.command(*BOTH, *FEW, "--out", tmp_path)

    def killed_after(number):
        def run(target, runs, batch, *arguments, **options):
            if len(measured) == number:
                raise KeyboardInterrupt
            measured.append(batch)
            return original(target, runs, batch, *arguments, **options)

        return run

    monkeypatch.setattr(comparison, "measure", killed_after(4))
    assert main(command) == 130
    assert "the same command continues" in capsys.readouterr().err
    raw = tmp_path / "raw.jsonl"
    assert len(raw.read_text().splitlines()) == 1 + 4
    whole = raw.read_text()
    raw.write_text(whole + '{"prompts": "y", "num')  # torn by the kill
    monkeypatch.setattr(comparison, "measure", killed_after(None))
    assert main(command) == 0
    assert len(measured) == 2 * 3
    assert raw.read_text().startswith(whole)
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(raw["answers"]) for raw in report["raw"]] == [*[2] * 3, *[1] * 3] * 2
    monkeypatch.setattr(comparison, "measure", killed_after(6))
    assert main(command) == 0  # nothing is left to do
    capsys.readouterr()
    before = raw.read_text()
    for option, value, was in (("--seed", 3, 0), ("--top-p", 0.9, 1.0), ("--rows", 2, [1])):
        assert main([*command, option, str(value)]) == 2
        now = [value] if isinstance(was, list) else value
        assert f"{option[2:].replace('-', '_')} was {was} and is {now}" in capsys.readouterr().err
    assert raw.read_text() == before


def test_a_run_that_continues_looks_up_by_the_costs_of_its_beginning(bench_files, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(bench, "measure_costs", lambda *_, **options: made.append(options) or COSTS)
    command = bench_files.command("--methods", "prompt lookup", "--rows", "2", "--out", tmp_path, new_tokens=2)
    monkeypatch.setattr(ComparisonLog, "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(command) == 130
    monkeypatch.undo()
    monkeypatch.setattr(bench, "measure_costs", None)
    used = []
    lookup = comparison.Counting
    monkeypatch.setattr(comparison, "Counting", lambda proposer: used.append(proposer) or lookup(proposer))
    assert main(command) == 0
    assert made[0]["rows"] == [2]
    assert made[0]["contexts"] == CONTEXTS
    assert max(made[0]["nodes"]) >= 33  # as far as it proposes, and the root
    assert [proposer.costs.points for proposer in used] == [COSTS.points]


def test_stopping_without_out_says_that_nothing_is_kept(bench_files, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "measure", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(bench_files.command(*FEW)) == 130
    assert "nothing is kept" in capsys.readouterr().err


def test_a_disk_that_fills_up_ends_it_with_a_message_and_loses_nothing(bench_files, tmp_path, monkeypatch, capsys):
    append, measured = ComparisonLog.append, []

    def full_after_two(self, key, answers):
        if len(measured) == 2:
            with (tmp_path / "raw.jsonl").open("a") as file:
                file.write('{"prompts": "x", "num')
            raise OSError(28, "No space left on device")
        measured.append(key)
        append(self, key, answers)

    short = bench_files.command(*BOTH, *FEW, "--out", tmp_path, new_tokens=2)
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


def opened(path, settings) -> ComparisonLog:
    log = ComparisonLog(path)
    log.open(settings)
    return log


def test_a_torn_line_is_cut_off_and_what_is_before_it_not_written_anew(tmp_path, monkeypatch):
    path = tmp_path / "raw.jsonl"
    stats = [Stats(tokens=2, steps=1, seconds=1.0, bursts=[(0.5, 1), (1.0, 1)]), Stats(tokens=1)]
    answer = Answer(1.0, 3, stats, [RowDifference(1, "token 0", near_tie=True)], rows=2)
    opened(path, {"seed": 0}).append(Key("x", 0, 0.0, 2), {"plain": answer})
    before = path.read_text()
    path.write_text(before + '{"prompts"')
    monkeypatch.setattr(type(path), "write_text", None)
    assert opened(path, {"seed": 0}).answers == {Key("x", 0, 0.0, 2): {"plain": answer}}
    assert path.read_text() == before


def test_an_entry_without_one_of_the_methods_is_measured_anew(bench_files, tmp_path, monkeypatch):
    short = bench_files.command(*FEW, "--out", tmp_path, new_tokens=2)
    assert main(short) == 0
    settings, first, *others = (tmp_path / "raw.jsonl").read_text().splitlines()
    entry = json.loads(first)
    del entry["answers"]["plain"]
    (tmp_path / "raw.jsonl").write_text("\n".join([settings, json.dumps(entry), *others, ""]))
    measured = []
    monkeypatch.setattr(comparison, "measure", lambda *a, **options: measured.append(a[2]) or measure(*a, **options))
    for _ in range(2):
        assert main(short) == 0
        assert len(measured) == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b'{"messages": []}\n', b'{"settings": 5}\n', b"\xff\n", b"[]\n", b"\n", b'{"settings": {}}\n'),
        *(b'{"settings": {}, "costs": null}\n{"answers": []}\n', b'{"settings": {}, "costs": [5]}\n'),
    ],
)
def test_a_file_that_is_no_comparison_is_refused_and_kept(tmp_path, content):
    (tmp_path / "raw.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"raw\.jsonl holds no comparison .* give another --out"):
        opened(tmp_path / "raw.jsonl", {})
    assert (tmp_path / "raw.jsonl").read_bytes() == content


def spoiled(run: Run, row: int) -> Run:
    def decode(batch):
        texts, stats = run.decode(batch)
        row_now = min(row, len(texts) - 1)
        texts[row_now][1] = (texts[row_now][1] + 1) % 320
        return texts, stats

    return Run(decode, run.setting)


def test_a_wrong_text_is_shown_by_its_row_and_fails_the_command(bench_files, tmp_path, monkeypatch, capsys):
    def broken_runs(target, proposers, sampling, max_new_tokens):
        runs = our_runs(target, proposers, sampling, max_new_tokens)
        wrong = {name: spoiled(run, 1) for name, run in runs.items() if name != "plain"}
        return runs | (wrong if not sampling.greedy else {})

    monkeypatch.setattr(comparison, "our_runs", broken_runs)
    assert main(bench_files.command("--methods", "medusa tree", *BOTH, "--rows", 2, "--out", tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "T=1, rows 2, medusa tree 4: x[1] token 1" in printed
    assert "NOT a tie" in printed
    assert "T=0, rows 2, medusa tree 4:" not in printed
    assert "| 4 of 6" in printed
    assert [json.loads(line)["temperature"] for line in (tmp_path / "raw.jsonl").read_text().splitlines()[1:]]


def test_a_wrong_text_of_transformers_is_shown_and_does_not_fail_the_command(bench_files, monkeypatch, capsys):
    their_runs = comparison.their_runs
    monkeypatch.setattr(
        comparison,
        "their_runs",
        lambda *arguments: {name: spoiled(run, 0) for name, run in their_runs(*arguments).items()},
    )
    assert main(bench_files.command("--methods", "transformers prompt")) == 0
    assert "T=0, rows 1, transformers prompt lookup: x[0] token 1" in capsys.readouterr().out


def test_the_order_of_the_methods_rotates_and_goes_on_as_it_was(tiny_target, tmp_path, monkeypatch):
    order, names = [], ("plain", "other", "third")

    def runs_of(target, proposers, sampling, max_new_tokens):
        def method(name):
            return Run(lambda batch: order.append(name) or ([[5]] * len(batch), [Stats(tokens=1)] * len(batch)))

        return {name: method(name) for name in proposers}

    monkeypatch.setattr(comparison, "our_runs", runs_of)
    sets = {"a": [[5], [6]], "b": [[7], [8], [9]]}
    ways = {name: lambda temperature, rows: None for name in names}
    samplings = {0.5: Sampling(temperature=0.5, seed=0)}
    compared = Comparison(tiny_target, ways, [], None, sets, samplings, [1], 3)
    log = opened(tmp_path / "raw.jsonl", {})
    compared.run(log)
    rotated = "plain other third other third plain third plain other plain other third other third plain"
    assert " ".join(order[3:]) == rotated
    del log.answers[Key("b", 0, 0.5, 1)]
    order.clear()
    compared.run(log)
    assert " ".join(order[3:]) == "third plain other"
    both = replace(compared, samplings=samplings | {1.0: Sampling(temperature=1.0, seed=0)}, rows=[1, 2])
    assert Counter(key.rows for key in both.all_keys()) == {1: 10, 2: 6}
    twos = [both.batch(key) for key in both.all_keys() if key.rows == 2 and key.temperature == 1]
    assert twos == [[[5], [6]], [[7], [8]], [[9]]]
