"""The figures of a comparison, its picture, the counts behind them, and how methods are named."""

import pytest

from decode import Chain, DraftModel, DynamicTree, PromptLookup, generate
from decode.chart import draw
from decode.comparison_table import summarise, tables
from decode.counting import Counting, Counts
from decode.measure import Answer, Result, markdown
from decode.methods import name_heads, rivals
from decode.propose import Drafting
from decode.results import Stats


def answer(*, tokens: int, steps: int, seconds: float, propose: float = 0.0, counts: Counts | None = None) -> Answer:
    stats = Stats(tokens=tokens, steps=steps, seconds=seconds, parts={"prefill": 1.0, "propose": propose})
    stats.offered, stats.accepted = [steps, 4], [4, 1]
    return Answer(seconds, tokens, stats, counts=counts)


def counts(steps: int) -> Counts:
    return Counts(trees=steps, nodes=3 * steps, passes=2 * steps, prompt_seconds=0.5)


@pytest.fixture
def results() -> dict[float, list[Result]]:
    """Plain steps take 1 s after 1 s of prefill; those with drafts 1 s too, 0.2 s of them drafting in two passes."""
    found = []
    for name, texts in {"a": [(11, 5), (21, 10)], "b": [(41, 10)]}.items():
        plain = [answer(tokens=tokens, steps=tokens - 1, seconds=float(tokens)) for tokens, _ in texts]
        drafted = [
            answer(tokens=t, steps=s, seconds=1.0 + s, propose=0.5 + 0.2 * s, counts=counts(s)) for t, s in texts
        ]
        found += [Result("plain", name, plain), Result("head tree 3", name, drafted)]
    return {0.0: found, 1.0: found}


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
    assert rows[1].tokens_per_step == (2.0, 2.0, 2.0)  # both prompts of set a have the same
    assert head.tokens_per_step.low < 2.8 < head.tokens_per_step.high
    assert head.accept_rates == [12 / 25, 3 / 12]
    assert head.nodes_per_step == 3.0
    assert head.draft_cost == pytest.approx(0.2)  # the prompt's half second is left out
    assert head.pass_cost == pytest.approx(0.1)
    assert head.identical == 3


def test_differences_are_counted_and_near_ties_apart(results):
    for found in results.values():
        found[1].answers[0] = Answer(6.0, 11, found[1].answers[0].stats, "token 3: …, near tie", near_tie=True)
        found[3].answers[0] = Answer(11.0, 41, found[3].answers[0].stats, "token 3: …, NOT a tie")
    total = summarise({0.0: results[0.0]})[-1]
    assert (total.differences, total.unexcused, total.identical) == (2, 1, 1)
    assert "1 of 3, 1 near ties" in tables(summarise({0.0: results[0.0]}))


def test_one_prompt_set_needs_no_tables_by_set(results):
    both, one = tables(summarise(results)), tables(summarise({0.0: results[0.0][:2]}))
    assert both.count("## ") == 4
    assert one.count("## ") == 2
    assert "| a, T=0 " in both
    assert "| a, T=0 " not in one


def test_texts_that_end_at_once_make_no_figures():
    ended = [Result(name, "a", [Answer(1.0, 1, Stats(tokens=1, seconds=1.0))]) for name in ("plain", "head chain 2")]
    row = summarise({0.0: ended})[1]
    assert (row.draft_cost, row.pass_cost, row.nodes_per_step) == (0.0, 0.0, 1.0)
    assert tables([*summarise({0.0: ended})])


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


def test_heads_draft_chains_and_their_own_trees_as_deep_as_they_can(tiny_target, tiny_head):
    assert list(rivals({"medusa": tiny_head}, lookup=2, chain=5)) == [
        *("plain", "prompt lookup", "medusa chain 4", "medusa tree 10 (dynamic)")
    ]
    tiny_head.tree = {"depth": 2, "width": 2, "size": 5}
    found = rivals({"m": tiny_head}, lookup=2, chain=2, draft_model=DraftModel(tiny_target, tiny_target))
    assert list(found) == ["plain", "prompt lookup", "draft model chain 3", "m chain 3", "m tree 5 (dynamic)"]
    assert found["m tree 5 (dynamic)"].grow == DynamicTree(depth=2, width=2, size=5)
    assert found["prompt lookup"] == PromptLookup(length=2)
    tiny_head.tree = ((0,), (0, 0))
    assert list(rivals({"m": tiny_head}, lookup=2, chain=2)) == ["plain", "prompt lookup", "m chain 3"]


def test_heads_of_one_kind_are_named_by_their_folders():
    kinds = ["medusa", "medusa", "eagle"]
    assert name_heads(["runs/a", "runs/b", "runs/e"], kinds) == ["medusa a", "medusa b", "eagle"]
    assert name_heads(["a/best", "b/best", "e/best"], kinds) == ["medusa a/best", "medusa b/best", "eagle"]
    with pytest.raises(ValueError, match="a head is given twice"):
        name_heads(["runs/a", "runs/../runs/a"], ["medusa", "medusa"])


def test_tables_are_aligned():
    table = markdown([{"method": "plain", "n": 1}, {"method": "a", "n": 10.25}])
    assert table.splitlines() == [
        "| method | n     |",
        "| ------ | ----- |",
        "| plain  | 1     |",
        "| a      | 10.25 |",
    ]
