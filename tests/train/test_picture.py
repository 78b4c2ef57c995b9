import json
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from accelerate import Accelerator
from matplotlib.image import imread
from matplotlib.legend import Legend

from decode.chart import draw
from decode.comparison_table import summarise
from decode.counting import Counts
from decode.measure import Answer, Result
from decode.results import Stats
from train.journal import Journal
from train.picture import draw_curves, label, make_figure, running_mean

Launch = Callable[..., Path]


def evaluation(step: int, **more: float) -> dict[str, float]:
    rate = 1 + step / 10
    names = {"tokens_per_step": rate, "chain/tokens_per_step": rate - 0.1, "t1/tokens_per_step": rate - 0.2}
    ends = {name + end: value + shift for name, value in names.items() for end, shift in (("_low", -0.3), ("_high", 1))}
    depths = {f"accept_rate/depth{depth}": 1 / depth for depth in (1, 2, 10)}
    return {"step": step, **{f"eval/{name}": value for name, value in {**names, **ends, **depths, **more}.items()}}


def training(step: int) -> dict[str, float]:
    return {"step": step, "train/loss": 5.0 - step, "train/lr": 0.1, "train/depth1/loss": 3.0}


LINES = [evaluation(0), training(1), training(2), evaluation(2), training(3), evaluation(3)]


def test_each_curve_shows_the_numbers_of_the_metrics():
    panels = {axes.get_title(): axes for axes in make_figure(LINES).axes}
    assert list(panels) == [
        "training loss", "learning rate", "tokens per step", "acceptance given the parent's, tree, greedy"
    ]  # fmt: skip
    assert panels["training loss"].lines[0].get_xydata().tolist() == [[1, 4], [2, 3], [3, 2]]
    speed = panels["tokens per step"]
    curves = {line.get_label(): line.get_xydata().tolist() for line in speed.lines}
    assert curves["tree, greedy"] == [[0, 1.0], [2, 1.2], [3, 1.3]]
    assert list(curves) == ["tree, greedy", "chain, greedy", "tree, T = 1"]
    band = speed.collections[0].get_paths()[0].vertices
    assert {(2, 0.9), (2, 2.2)} <= set(map(tuple, np.round(band, 9).tolist()))
    depths = [line.get_label() for line in panels["acceptance given the parent's, tree, greedy"].lines]
    assert depths == ["depth 1", "depth 2", "depth 10"]


def test_several_prompt_sets_get_a_panel_of_their_own():
    lines = [evaluation(step, **{"tatoeba/tokens_per_step": 2.0, "code/tokens_per_step": 1.0}) for step in (0, 4)]
    panels = {axes.get_title(): axes for axes in make_figure(lines).axes}
    assert "training loss" not in panels
    sets = panels["tokens per step by prompt set, tree, greedy"]
    assert [line.get_label() for line in sets.lines] == ["tatoeba", "code"]
    assert len(panels["tokens per step"].lines) == 3


NAMES = ["a$_$b", "_c", r"\frac$$", "d"]
"""Names of prompt sets, and of methods, which are file names."""


def texts(legend: Legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_names_are_drawn_as_they_are_in_the_curves(tmp_path: Path):
    lines = [evaluation(step, **{f"{name}/tokens_per_step": 2.0 for name in NAMES}) for step in (0, 4)]
    figure = make_figure(lines)
    legends = {axes.get_title(): axes.get_legend() for axes in figure.axes}
    assert texts(legends["tokens per step by prompt set, tree, greedy"]) == NAMES
    assert texts(legends["tokens per step"]) == ["tree, greedy", "chain, greedy", "tree, T = 1"]
    figure.savefig(tmp_path / "curves.png")  # only now is a formula read


def test_names_are_drawn_as_they_are_in_the_chart(tmp_path: Path):
    stats = Stats(tokens=11, steps=5, seconds=1.0, parts={"prefill": 0.1, "propose": 0.1}, offered=[5], accepted=[4])
    results = [
        Result(method, name, 0.0, 1, [Answer(1.0, 11, [stats], counts=Counts(trees=5, nodes=15, passes=10))])
        for name in NAMES
        for method in ("plain", *NAMES)
    ]
    figure = draw(summarise(results))
    assert texts(figure.legends[0]) == NAMES
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == [*NAMES, "all"]
    figure.savefig(tmp_path / "chart.png")


def test_labels_name_temperature_and_method():
    assert label("eval/t0.5/chain/tokens_per_step") == "chain, T = 0.5"
    assert label("eval/tokens_per_step") == "tree, greedy"


def test_a_running_mean_is_over_the_last_values():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [*LINES, evaluation(4, tokens_per_step=float("nan")), evaluation(5, **{"accept_rate/depth1": float("inf")})]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(path, tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape == (700, 1100, 4)
    assert picture[..., :3].std() > 0.05  # not an empty page


def test_the_picture_is_replaced_as_a_whole_and_no_state_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, picture = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    draw_curves(path, picture)
    before = picture.read_bytes()

    def torn(figure: object, temporary: Path, **options: object) -> None:
        temporary.write_text("half a picture")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", torn)
    with pytest.raises(OSError, match="No space"):
        draw_curves(path, picture)
    assert picture.read_bytes() == before
    assert "pyplot" not in vars(matplotlib)


def test_a_picture_that_cannot_be_drawn_is_said_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_accelerate: None
):
    journal = Journal(Accelerator(cpu=True), tmp_path / "metrics.jsonl")
    journal.draw()  # nothing was logged yet
    assert capsys.readouterr().out == ""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(training(1)) + "\n")
    (tmp_path / "curves.png").mkdir()  # a folder cannot be replaced by a file
    journal.draw()
    assert "could not make" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(json.JSONDecodeError):  # a bug, not a full disk
        journal.draw()


def test_a_run_leaves_its_curves_and_a_continued_one_shows_all(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    drawn: list[list[int]] = []

    def record(metrics: Path, picture: Path) -> None:
        drawn.append([json.loads(line)["step"] for line in metrics.read_text().splitlines()])
        draw_curves(metrics, picture)

    monkeypatch.setattr("train.journal.draw_curves", record)
    options = ("--optim.schedule=constant", "--eval.num_prompts=1", "--eval.max_new_tokens=3", "--run.eval_every=2")
    folder = launch(*options, "--optim.steps=3")
    assert drawn == [[0], [0, 1, 2, 2], [0, 1, 2, 2, 3, 3]]
    first = (folder / "curves.png").read_bytes()
    launch(*options, "--optim.steps=4")
    assert drawn[-1] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert (folder / "curves.png").read_bytes() != first
