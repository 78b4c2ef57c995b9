"""`python -m decode.report`: the pictures of what was measured, and the numbers in them."""

import json
from dataclasses import asdict
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from decode.comparison_table import summarise
from decode.measure import Answer, Result
from decode.report import main, speedups
from decode.report_figures import draw_gaps, draw_speedups, token_gaps
from decode.results import Stats
from decode.tuned import Choice, Plan, TunedArm, write_plan
from heads.checkpoint import TUNED

PLAIN = [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1)]
DRAFTED = [(1.0, 1), (1.5, 3), (2.25, 1)]
HEAD = r"head $a_{$ b_c tree 3"
SETS = ("x$_{$", "y")


def answer(bursts, *, scale: float = 1.0, rows: int = 1, accepted=()) -> Answer:
    """Texts of so many rows; a step's time is multiplied by `scale`."""
    scaled = [(scale * seconds, tokens) for seconds, tokens in bursts]
    stats = Stats(tokens=5, steps=len(bursts) - 1, seconds=scaled[-1][0], parts={"prefill": scale}, bursts=scaled)
    stats.offered, stats.accepted = [4] * len(accepted), list(accepted)
    return Answer(scaled[-1][0], 5 * rows, [stats] * rows, rows=rows)


def results(rows: tuple[int, ...] = (1, 8)) -> list[Result]:
    found = []
    for temperature in (0.0, 1.0):
        for number in rows:
            for name in SETS:
                plain = answer(PLAIN, scale=1 + temperature, rows=number)
                drafted = answer(DRAFTED, scale=number**0.5, rows=number, accepted=(3, 1 + temperature))
                found.append(Result("plain", name, temperature, number, [plain]))
                found.append(Result(HEAD, name, temperature, number, [drafted]))
                if (temperature, number) == (0.0, 1):
                    found.append(Result("transformers", name, temperature, number, [Answer(10.0, 5)]))
    return found


def write(folder: Path, found: list[Result]) -> dict:
    rows = [asdict(row) for row in summarise(found)]
    content = {"command": "python -m decode.bench …", "machine": {"device": "a CPU"}}
    content |= {"rows": rows, "raw": [asdict(result) for result in found]}
    (folder / "comparison.json").write_text(json.dumps(content))
    return content


def tuned(folder: Path, *devices: str) -> Path:
    """A folder with plans."""
    folder.mkdir(parents=True)
    way = {"depth": 3, "width": 2, "size": 4, "confidence": 0.0}
    arm = TunedArm(way, {"0": {"1": 1.2}}, {"0": [0.5]})
    seconds = {(1, 256, 1): 0.2, (1, 256, 4): 0.3, (1, 64, 1): 0.1, (1, 64, 4): 0.4, (8, 256, 1): 0.5}
    points = [
        {"rows": r, "context": c, "nodes": n, "seconds": s, "low": s, "high": s} for (r, c, n), s in seconds.items()
    ]
    choices = [Choice(0.0, 1, 0, 1.5, 1.2, 1.2), Choice(0.0, 8, None, 1.0, 1.0, 1.2)]
    for device in devices:
        write_plan(folder, device, Plan([arm], choices, points))
    return folder


def pictures(folder: Path) -> list[str]:
    found = sorted(folder.glob("*.png"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    return sorted(path.stem for path in found)


def test_every_picture_is_there_and_the_numbers_are_those_of_the_comparison(tmp_path, capsys):
    content = write(tmp_path, results())
    heads = [tuned(tmp_path / "runs" / "my_head$" / "best", "a CPU, float32", "a GPU, bfloat16")]
    heads += [tuned(tmp_path / "other" / "my_head$" / "best", "a CPU, float32"), tuned(tmp_path / "h", "a CPU")]
    assert main([str(tmp_path), "--head", *map(str, heads)]) == 0
    costs = ["costs-my_head$-best", "costs-my_head$-best-2", "costs-my_head$-best-3", f"costs-{tmp_path.name}-h"]
    assert pictures(tmp_path) == sorted(["acceptance", "gaps", "speedup", "throughput", *costs])
    printed = capsys.readouterr()
    assert printed.out == (
        f"wrote speedup.png, acceptance.png, gaps.png, throughput.png, {', '.join(f'{name}.png' for name in costs)}, "
        f"report.json to {tmp_path}\n"
    )
    assert not printed.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["command"], report["machine"]) == (content["command"], content["machine"])
    assert {*report} == {"command", "machine", "speedup", "acceptance", "gaps", "throughput", *costs}
    assert list(report["speedup"]) == [*SETS, "all"]
    for found in report["speedup"].values():
        assert list(found) == [f"{HEAD}, 1 row", f"{HEAD}, 8 rows", "transformers, 1 row"]
        assert found[f"{HEAD}, 1 row"] == pytest.approx({"0": 5 / 2.25, "1": 10 / 2.25})
        assert found[f"{HEAD}, 8 rows"] == pytest.approx({"0": 5 / (8**0.5 * 2.25), "1": 10 / (8**0.5 * 2.25)})
        assert found["transformers, 1 row"] == pytest.approx({"0": 0.5})
    assert report["acceptance"] == {"T=0": {HEAD: [3 / 4, 1 / 4]}, "T=1": {HEAD: [3 / 4, 2 / 4]}}
    for title, unit in (("T=0", 1.0), ("T=1", 2.0)):  # plain decoding gives 5 tokens in 5 and in 10 s
        assert {*report["throughput"][title]} == {"plain", HEAD}
        assert report["throughput"][title]["plain"] == pytest.approx({"1": 1.0, "8": 8.0})
        assert report["throughput"][title][HEAD] == pytest.approx(
            {"1": unit * 5 / 2.25, "8": unit * 8 * 5 / 2.25 / 8**0.5}
        )
    for name in costs:
        assert report[name] == {
            "1 x 64 tokens": {"1": 1.0, "4": pytest.approx(4.0)},
            "1 x 256 tokens": {"1": 1.0, "4": pytest.approx(1.5)},
            "8 x 256 tokens": {"1": 1.0},
            "chosen at T=0": "dynamic tree of 4, depth 3, width 2",
        }


def test_gaps_are_those_of_the_first_temperature_and_number_of_rows(tmp_path):
    write(tmp_path, results())
    assert main([str(tmp_path)]) == 0
    gaps = json.loads((tmp_path / "report.json").read_text())["gaps"]
    assert list(gaps) == ["plain", HEAD]
    assert gaps["plain"] == {
        "no gap": 0.0,
        **dict.fromkeys(("mean ms", "p50 ms", "p95 ms", "p99 ms"), pytest.approx(1000.0)),
        "bursts": {"1": 1.0},
    }
    assert gaps[HEAD] == {  # 500, 0, 0, 750 ms, in both texts
        "no gap": 0.5,
        "mean ms": pytest.approx(312.5),
        "p50 ms": pytest.approx(500.0),
        "p95 ms": pytest.approx(750.0),
        "p99 ms": pytest.approx(750.0),
        "bursts": {"1": pytest.approx(2 / 3), "3": pytest.approx(1 / 3)},
    }


def test_tokens_that_come_together_have_no_gap_and_steps_without_tokens_are_waited_through():
    assert token_gaps([]) == token_gaps([(1.0, 1)]) == []
    assert token_gaps([(1.0, 1), (1.5, 3), (2.25, 1)]) == [0.5, 0.0, 0.0, 0.75]
    assert token_gaps([(1.0, 2), (1.5, 0), (3.0, 2)]) == [0.0, 2.0, 0.0]


def test_all_methods_share_the_bins_of_the_gaps():
    left, right = Figure().subplots(1, 2)
    slow, fast = [(float(n), 1) for n in range(9)], [(n / 9, 1) for n in range(9)]
    draw_gaps(left, right, {"slow": [slow], "fast": [fast], "ended": [[(1.0, 1)]]})
    edges = [{round(x, 6) for x, _ in polygon.get_xy()} for polygon in left.patches]
    assert edges[0] == edges[1]
    assert max(edges[0]) == 1000.0
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["slow", "fast"]


@pytest.mark.parametrize("rows", [(1,), (8,), (2, 8)])
def test_throughput_is_drawn_for_several_numbers_of_rows_only(tmp_path, rows):
    write(tmp_path, results(rows))
    assert main([str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert ("throughput" in pictures(tmp_path)) == ("throughput" in report) == (len(rows) > 1)
    if len(rows) > 1:
        assert report["throughput"]["T=0"]["plain"] == pytest.approx({"2": 1.0, "8": 4.0})


@pytest.mark.parametrize("drafted", [{"plain"}, {"plain", "8 rows"}])
def test_where_nothing_drafts_there_is_no_picture_of_acceptance(tmp_path, recwarn, drafted):
    """Not even where drafts are made in larger batches only."""
    found = [r for r in results() if r.method in drafted or ("8 rows" in drafted and (r.method, r.rows) == (HEAD, 8))]
    if "8 rows" in drafted:
        found += [
            Result(HEAD, r.prompts, r.temperature, 1, r.answers) for r in found if (r.method, r.rows) == ("plain", 1)
        ]
    write(tmp_path, found)
    assert main([str(tmp_path)]) == 0
    assert pictures(tmp_path) == ["gaps", "speedup", "throughput"]
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]
    assert "pyplot" not in vars(matplotlib)  # which would keep figures in a global state


def harm(content: dict, name: str) -> object:
    if name == "bursts":
        del content["raw"][0]["answers"][0]["by_row"][0]["bursts"]
    elif name == "no rows":
        content["rows"] = []
    elif name == "no raw":
        del content["raw"]
    elif name == "no speed-up":
        del content["rows"][1]["speedup"]
    elif name == "raw":
        content["raw"] = [7]
    elif name == "a list":
        return [content]
    return content


@pytest.mark.parametrize("name", ["bursts", "no rows", "no raw", "no speed-up", "raw", "a list"])
def test_what_is_no_comparison_is_refused(tmp_path, capsys, name):
    content = harm(write(tmp_path, results()), name)
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'comparison.json'} holds no results of decode.bench (")
    assert ("bursts" in error) == (name == "bursts")
    assert "run the command again" in error
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"", b"7"])
def test_broken_json_is_refused(tmp_path, capsys, content):
    (tmp_path / "comparison.json").write_bytes(content)
    assert main([str(tmp_path)]) == 2
    assert "holds no results of decode.bench" in capsys.readouterr().err


def test_a_folder_that_is_none_or_holds_nothing_is_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main([str(folder)]) == 2
        assert f"{folder / 'comparison.json'} is not there; give the folder that" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_head_without_a_plan_of_this_version_is_refused_before_anything_is_drawn(tmp_path, capsys):
    write(tmp_path, results((1,)))
    old = tuned(tmp_path / "old", "a CPU")
    (old / TUNED).write_text((old / TUNED).read_text().replace('"format": 1', '"format": 0'))
    for head in (old, tmp_path / "nowhere"):
        assert main([str(tmp_path), "--head", str(head)]) == 2
        message = capsys.readouterr().err
        assert f"{head} holds no {TUNED} of this version; run `python -m decode.tune TARGET --head {head}" in message
    assert pictures(tmp_path) == []


@pytest.mark.parametrize("name", ["report.json", "gaps.png"])
def test_files_that_cannot_be_written_are_an_error(tmp_path, capsys, name):
    write(tmp_path, results((1,)))
    (tmp_path / name).mkdir()
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert name in error


def test_temperatures_are_drawn_in_order_whatever_order_they_were_measured_in():
    rows = [asdict(row) for row in summarise(results())]
    axes = Figure().subplots()
    draw_speedups(axes, [row for row in reversed(rows) if row["prompts"] == "all"])
    lines = {container.get_label(): container.lines[0].get_xdata().tolist() for container in axes.containers}
    assert lines[f"{HEAD}, 1 row"] == lines[f"{HEAD}, 8 rows"] == [0.0, 1.0]


def test_forty_methods_look_different_and_their_names_do_not_take_the_panels_room():
    first = next(asdict(row) for row in summarise(results((1,))) if row.method == HEAD)
    figures = []
    for number in (2, 40):
        figure, _ = speedups([{**first, "method": f"{HEAD} {n}"} for n in range(number)])
        figures.append(figure)
        FigureCanvasAgg(figure).draw()
    lines = [container.lines[0] for container in figures[1].axes[0].containers]
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 40
    few, many = (figure.axes[0].get_window_extent().height for figure in figures)
    assert many > 0.9 * few
    assert len({text.get_text() for text in figures[1].legends[0].get_texts()}) == 40


def test_a_head_whose_plan_is_damaged_is_named(tmp_path, capsys):
    write(tmp_path, results((1,)))
    good, bad = tuned(tmp_path / "good", "a CPU"), tuned(tmp_path / "bad", "a CPU")
    (bad / TUNED).write_text((bad / TUNED).read_text().replace('"reach"', '"rich"'))
    assert main([str(tmp_path), "--head", str(good), str(bad)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {bad}: {TUNED} holds no plan (")
