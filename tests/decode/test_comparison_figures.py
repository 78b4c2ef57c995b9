"""The figures of a comparison, its picture, and the counts behind them."""

from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from decode import Chain, PromptLookup, generate
from decode.adaptive import Adaptive, Arm
from decode.chart import draw
from decode.comparison_table import summarise, tables
from decode.counting import Counting, Counts
from decode.measure import Answer, Result, RowDifference, markdown
from decode.propose import Drafting
from decode.results import Stats


def answer(*, tokens: int, steps: int, seconds: float, propose: float = 0.0, counts: Counts | None = None) -> Answer:
    stats = Stats(tokens=tokens, steps=steps, seconds=seconds, parts={"prefill": 1.0, "propose": propose})
    stats.offered, stats.accepted = [steps, 4], [4, 1]
    return Answer(seconds, tokens, [stats], counts=counts)


def counts(steps: int) -> Counts:
    return Counts(trees=steps, nodes=3 * steps, passes=2 * steps, prompt_seconds=0.5)


@pytest.fixture
def results() -> list[Result]:
    """Plain steps take 1 s after 1 s of prefill; those with drafts 1 s too, 0.2 s of them drafting in two passes."""
    found = []
    for temperature in (0.0, 1.0):
        for name, texts in {"a": [(11, 5), (21, 10)], "b": [(41, 10)]}.items():
            plain = [answer(tokens=tokens, steps=tokens - 1, seconds=float(tokens)) for tokens, _ in texts]
            drafted = [
                answer(tokens=t, steps=s, seconds=1.0 + s, propose=0.5 + 0.2 * s, counts=counts(s)) for t, s in texts
            ]
            found += [
                Result("plain", name, temperature, 1, plain),
                Result("head tree 3", name, temperature, 1, drafted),
            ]
    return found


def batch_of_two(
    *, seconds: float, steps: tuple[int, int], propose: float = 0.0, counts: Counts | None = None
) -> Answer:
    """Texts of 11 and 6 tokens; both rows report the time of the batch until they ended."""
    parts = {"prefill": 1.0, "propose": propose, "score": 2.0}
    by_row = [
        Stats(tokens=tokens, steps=own, seconds=seconds - 0.1 * place, parts=parts)
        for place, (tokens, own) in enumerate(zip((11, 6), steps, strict=True))
    ]
    return Answer(seconds, 17, by_row, counts=counts, rows=2)


def test_figures_are_sums_over_prompts_paired_with_plain_decoding(results):
    rows = summarise(results)
    assert [(row.temperature, row.prompts, row.method) for row in rows[:4]] == [
        *((0.0, "a", "plain"), (0.0, "a", "head tree 3"), (0.0, "b", "plain"), (0.0, "b", "head tree 3"))
    ]
    plain, head = rows[4:6]
    assert (plain.prompts, head.prompts, head.num_prompts) == ("all", "all", 3)
    assert plain.tokens_per_step == plain.speedup == (1.0, 1.0, 1.0)
    assert plain.nodes_per_step == 1.0
    assert head.tokens_per_step.value == pytest.approx(70 / 25)
    assert head.speedup.value == pytest.approx(73 / 28)
    assert head.median_speedup == pytest.approx(21 / 11)  # the others' are 11 / 6 and 41 / 11
    assert head.tokens_per_second == pytest.approx(73 / 28)
    assert rows[1].tokens_per_step == (2.0, 2.0, 2.0)  # both prompts of set a have the same
    assert head.tokens_per_step.low < 2.8 < head.tokens_per_step.high
    assert head.accept_rates == [12 / 25, 3 / 12]
    assert head.nodes_per_step == 3.0
    assert head.draft_cost == pytest.approx(0.2)  # the prompt's half second is left out
    assert head.pass_cost == pytest.approx(0.1)
    assert head.identical == 3
    shares = {"prefill": 3 / 28, "propose": 6.5 / 28, "other": 18.5 / 28}
    assert head.time_shares == pytest.approx(shares)


def test_a_batch_is_timed_once_and_its_rows_are_counted_each():
    plain = batch_of_two(seconds=21.0, steps=(10, 5))
    drafted = batch_of_two(
        seconds=11.0, steps=(4, 3), propose=3.0, counts=Counts(trees=7, nodes=21, passes=8, prompt_seconds=1.0)
    )
    assert drafted.steps == 4  # passes over the batch
    base, row = summarise([Result("plain", "a", 0.0, 2, [plain] * 2), Result("m", "a", 0.0, 2, [drafted] * 2)])
    assert (row.rows, row.num_prompts) == (2, 4)
    assert base.tokens_per_step.value == 1.0
    assert row.tokens_per_step.value == pytest.approx(15 / 7)
    assert row.speedup == pytest.approx((21 / 11,) * 3)
    assert row.tokens_per_second == pytest.approx(17 / 11)
    assert row.nodes_per_step == 3.0
    assert row.draft_cost == pytest.approx((3.0 - 1.0) / 4 / 2.0)  # a plain step takes 2 s
    assert row.pass_cost == pytest.approx((3.0 - 1.0) / 8 / 2.0)
    assert row.time_shares == pytest.approx({"prefill": 1 / 11, "propose": 3 / 11, "score": 2 / 11, "other": 5 / 11})


def test_throughput_is_relative_to_plain_decoding_with_the_fewest_rows(results):
    two = [
        Result("plain", "a", 0.0, 2, [batch_of_two(seconds=8.5, steps=(10, 5))]),
        Result("head tree 3", "a", 0.0, 2, [batch_of_two(seconds=4.25, steps=(4, 3))]),
    ]
    one = [result for result in results if result.temperature == 0 and result.prompts == "a"]
    text = tables(summarise([*one, *two]))
    title, table = text.split("## Throughput by rows of the batch; ")[1].split("\n\n")[:2]
    assert title == "plain decoding with 1 is 1"
    header, _, plain, head = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert header == ["method", "rows 1, T=0", "rows 2, T=0"]
    assert plain == ["plain", "1.00", "2.00"]  # 1 and 2 tokens a second
    assert head == ["head tree 3", f"{32 / 17:.2f}", "4.00"]
    assert "## All 2 prompts, with 95 % intervals, rows: 2" in text
    assert "Throughput" not in tables(summarise(one))


def test_the_speed_up_of_every_batch_size_is_shown_against_the_temperature(results):
    two = [
        Result("plain", "a", 1.0, 2, [batch_of_two(seconds=8.5, steps=(10, 5))]),
        Result("head tree 3", "a", 1.0, 2, [batch_of_two(seconds=4.25, steps=(4, 3))]),
    ]
    rows = summarise([*results, *two])
    _, *lines = tables(rows).split("## Speed-up by rows and temperature\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip().split(" [")[0] for cell in line.split("|")[1:-1]] for line in lines[1:]]
    speedups = {(r.temperature, r.rows, r.prompts): f"{r.speedup.value:.2f}" for r in rows if r.method != "plain"}
    one = [["head tree 3", "1", name, speedups[0.0, 1, name], speedups[1.0, 1, name]] for name in ("a", "b", "all")]
    assert cells == [*one, ["head tree 3", "2", "a", "", "2.00"]]
    assert "rows and temperature" not in tables(summarise(results))
    assert "rows and temperature" not in tables([row for row in rows if row.method == "plain"])


def test_transformers_has_no_steps_but_a_speed(results):
    theirs = Result("transformers", "a", 0.0, 1, [Answer(22.0, 11), Answer(42.0, 21)])
    rows = summarise([results[0], theirs, results[1], *results[4:6]])
    row = next(row for row in rows if row.method == "transformers")
    assert (row.tokens_per_step, row.speedup.value, row.time_shares) == (None, 0.5, {})
    overall, drafts, times = tables(rows).split("## ")[1:]
    cells = [cell.strip() for cell in overall.strip().splitlines()[-2].split("|")[1:-1]]
    assert cells == ["transformers", "", "", "0.50 [0.50, 0.50]", "", "0.50", "", "2 of 2"]
    assert "transformers" not in drafts + times
    figure = draw(rows)
    top, other, bottom, _ = figure.axes
    assert [len(axes.patches) for axes in (top, other, bottom)] == [1, 1, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["transformers", "head tree 3"]
    colours = {patch.get_facecolor() for axes in (top, other) for patch in axes.patches}
    assert colours == {bottom.patches[1].get_facecolor()}  # a method has one colour in all panels


def test_differences_are_counted_and_near_ties_apart(results):
    found = results[:4]
    for result, near_tie in ((found[1], True), (found[3], False)):
        first = result.answers[0]
        result.answers[0] = replace(first, differences=[RowDifference(0, "token 3: …", near_tie)])
    total = summarise(found)[-1]
    assert (total.differences, total.unexcused, total.identical) == (2, 1, 1)
    assert [result.unexcused for result in found] == [0, 0, 0, 1]
    assert "1 of 3, 1 near ties" in tables(summarise(found))


def test_a_difference_names_the_prompt_by_its_place_in_the_file():
    answers = [
        Answer(1.0, 9, rows=4),
        Answer(1.0, 9, differences=[RowDifference(2, "token 3", near_tie=False)], rows=3),
    ]
    assert Result("m", "a", 0.0, 4, answers).differences == ["a[6] token 3"]


def test_one_prompt_set_needs_no_tables_by_set(results):
    both, one = tables(summarise(results)), tables(summarise(results[:2]))
    assert both.count("## ") == 5
    assert one.count("## ") == 3
    assert "| a, T=0 " in both
    assert "| a, T=0 " not in one


def test_texts_that_end_at_once_make_no_figures():
    ended = [
        Result(name, "a", 0.0, 1, [Answer(1.0, 1, [Stats(tokens=1, seconds=1.0)])])
        for name in ("plain", "head chain 2")
    ]
    row = summarise(ended)[1]
    assert (row.draft_cost, row.pass_cost, row.nodes_per_step) == (0.0, 0.0, 1.0)
    assert tables([*summarise(ended)])


def test_the_picture_has_a_bar_with_an_interval_for_every_method_and_set(results):
    rows = summarise(results)
    figure = draw(rows)
    assert len(figure.axes) == 4  # two figures, two temperatures
    top, bottom = figure.axes[0], figure.axes[2]
    assert [label.get_text() for label in bottom.get_xticklabels()] == ["a", "b", "all"]
    drafted = [row for row in rows if row.method != "plain" and row.temperature == 0]
    assert [bar.get_height() for bar in top.patches] == [row.tokens_per_step.value for row in drafted]
    assert [bar.get_height() for bar in bottom.patches] == [row.speedup.value for row in drafted]
    (bars,) = top.containers[1:]
    ends = [end for segment in bars.errorbar.lines[2][0].get_segments() for end in segment[:, 1]]
    assert ends == pytest.approx([end for row in drafted for end in row.tokens_per_step[1:]])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["head tree 3"]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["temperature 0", "temperature 1"]


def test_the_names_of_many_methods_fit_below_the_picture(results):
    names = ["plain", *(f"transformers prompt lookup (packed weights) {number}" for number in range(9))]
    figure = draw(summarise([replace(results[0], method=name) for name in names]))
    FigureCanvasAgg(figure).draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_passes_and_nodes_are_counted_and_texts_stay(tiny_target, tiny_head):
    counting = Counting(Drafting(tiny_head, Chain(3)))
    out = generate(tiny_target, [5, 6, 7], proposer=counting, max_new_tokens=12, eos_ids=[])
    assert out.token_ids == generate(tiny_target, [5, 6, 7], max_new_tokens=12, eos_ids=[]).token_ids
    steps = out.stats.steps
    found = counting.take()
    # a pass for each level; the last step is not followed by a sync, the first follows the prompt's
    assert (found.trees, found.nodes, found.passes) == (steps, 4 * steps, 3 * steps - 1)
    assert 0 < found.prompt_seconds < out.stats.parts["propose"]
    assert counting.take() == Counts()


def test_counting_is_per_prompt_and_works_in_batches_and_for_lookup(tiny_target, prompts):
    counting = Counting(PromptLookup(length=3))
    outs = generate(tiny_target, prompts, proposer=counting, max_new_tokens=9, eos_ids=[], check=True)
    assert [out.token_ids for out in outs] == [
        out.token_ids for out in generate(tiny_target, prompts, max_new_tokens=9, eos_ids=[])
    ]
    assert counting.take().trees == sum(out.stats.steps for out in outs)
    generate(tiny_target, prompts[0], proposer=counting, max_new_tokens=1)
    assert counting.take().trees == 0


def test_a_controller_that_pauses_is_counted_by_what_its_drafter_does(tiny_target, tiny_head):
    dear, cheap = (Adaptive(tiny_head, (Arm(Chain(3), {1: cost}, (0.5, 0.2, 0.1)),)) for cost in (9.0, 0.1))
    for adaptive in (dear, cheap):
        counting = Counting(adaptive)
        out = generate(tiny_target, [5, 6, 7], proposer=counting, max_new_tokens=12, eos_ids=[])
        assert out.token_ids == generate(tiny_target, [5, 6, 7], max_new_tokens=12, eos_ids=[]).token_ids
        found, steps = counting.take(), out.stats.steps
        if adaptive is dear:  # nothing is drafted
            assert (found.trees, found.nodes, found.passes, found.prompt_seconds) == (steps, steps, 0, 0.0)
        else:
            assert (found.trees, found.nodes, found.passes) == (steps, 4 * steps, 3 * steps - 1)
            assert found.prompt_seconds > 0


def test_tables_are_aligned():
    table = markdown([{"method": "plain", "n": 1}, {"method": "a", "n": 10.25}])
    assert table.splitlines() == [
        "| method | n     |",
        "| ------ | ----- |",
        "| plain  | 1     |",
        "| a      | 10.25 |",
    ]
