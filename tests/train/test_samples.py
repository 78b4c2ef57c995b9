import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode import Generation, Stats, Target, generate
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape
from train.samples import Sample, accepted_drafts, make_sample, token_texts, write_samples

PROMPT = [5, 6, 7, 8, 9]
RIGHT = (2, 0, 3, 1)
"""How many tokens each step drafts right before a wrong one."""


class Scripted:
    """Drafts what it knows will come, as far as `RIGHT` says, and then another token; its own state."""

    max_nodes = 5
    feature_layers = ()

    def __init__(self, text: list[int]) -> None:
        self.text, self.steps = text, 0

    def begin(self, rows: int, *, shared_noise: bool) -> "Scripted":
        return self

    def propose(self, roots: Tensor, rows: Sequence[Sampler]) -> list[TokenTree]:
        done = len(rows[0].context) - len(PROMPT)
        right = self.text[done : done + RIGHT[self.steps % 4]]
        known = done + len(right) < len(self.text)
        wrong = [(self.text[done + len(right)] + 1) % 320] if known else []
        self.steps += 1
        tokens = [rows[0].context[-1], *right, *wrong]
        return [TokenTree(torch.tensor(tokens), chain_shape(len(tokens)))]

    def sync(self, *arguments: object) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...


@pytest.fixture
def text(tiny_target: Target) -> list[int]:
    return generate(tiny_target, PROMPT, max_new_tokens=21, eos_ids=()).token_ids


def marks_of(text: list[int]) -> list[bool]:
    """The first token, and the last of each step, is the target's own."""
    return [False, *(mark for right in RIGHT * 3 for mark in (*[True] * right, False))][: len(text)]


@pytest.fixture
def drafted(tiny_target: Target, text: list[int]) -> Generation:
    output = generate(tiny_target, PROMPT, proposer=Scripted(text), max_new_tokens=21, eos_ids=())
    assert output.token_ids == text
    return output


def test_the_marked_tokens_are_those_that_were_drafted_and_kept(drafted: Generation, text: list[int]):
    assert accepted_drafts(drafted.stats) == marks_of(text)


def test_an_end_of_text_that_was_drafted_is_an_accepted_draft(tiny_target: Target, text: list[int]):
    marks = marks_of(text)
    places = [place for place, token in enumerate(text) if place and token not in text[:place]]
    assert {marks[place] for place in places} == {True, False}
    for place in places:
        ends = [text[place]]
        output = generate(tiny_target, PROMPT, proposer=Scripted(text), max_new_tokens=21, eos_ids=ends)
        assert output.token_ids == text[: place + 1]
        assert accepted_drafts(output.stats) == marks[: place + 1]


def test_a_text_of_one_token_has_no_drafts():
    assert accepted_drafts(Stats(tokens=1, bursts=[(0.1, 1)])) == [False]


def test_the_texts_of_tokens_are_the_text_and_whole_characters(tiny_target: Target):
    text = "the cat é€😀 sat<|im_end|>\n"
    ids = tiny_target.tokenizer.encode(text, add_special_tokens=False)
    pieces = list(token_texts(tiny_target.tokenizer, ids))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert {"é", "€", "😀", "<|im_end|>"} <= set(pieces)
    assert "".join(token_texts(tiny_target.tokenizer, [*ids, ids[pieces.index("😀") - 1]])).startswith(text)


def test_a_sample_shows_the_prompt_the_text_and_the_rate(tiny_target: Target, drafted: Generation):
    output, sample = drafted, make_sample(tiny_target, "chat", drafted)
    assert [mark for _, mark in sample.pieces] == marks_of(output.token_ids)
    assert "".join(text for text, _ in sample.pieces) == tiny_target.tokenizer.decode(output.token_ids)
    assert sample.prompt == tiny_target.tokenizer.decode(PROMPT)
    assert sample.tokens_per_step == output.stats.tokens_per_step


def test_html_marks_drafts_and_is_one_line_that_no_text_can_break():
    sample = Sample("a", "p", [("<b>&\n", False), ("x\r\n", True), ("", True), ("</pre>", True)], 2.0)
    assert sample.to_html() == ("<pre>&lt;b&gt;&amp;&#10;<mark>x&#13;⏎&#10;</mark><mark>&lt;/pre&gt;</mark></pre>")


def test_a_line_for_the_log_is_short_and_holds_no_control_characters():
    sample = Sample("a", "p", [("one\n", False), ("two", True), (" th", True), ("\x1b[0m", False)], 1.5)
    assert sample.to_line(colour=False) == "sample of a, 1.50 tokens per step: one⏎[[two th]] [0m"
    assert sample.to_line(colour=True).endswith("one⏎\x1b[32mtwo th\x1b[0m [0m")
    long = Sample("a", "p", [("word ", n % 2 == 0) for n in range(500)], 1.5)
    assert len(re.sub(r"\[\[|\]\]", "", long.to_line(colour=False).partition(": ")[2])) == 160
    assert long.to_line(colour=False).endswith("[[word ]]word ")


def test_the_page_has_the_newest_evaluation_first_and_each_once(tmp_path: Path):
    path = tmp_path / "samples.html"

    def write(step: int, text: str) -> list[tuple[str, str]]:
        write_samples(path, step, [Sample("a", "two\nlines", [(text, False)], 1.0)])
        return re.findall(r'data-step="(\d+)".*</details><pre>(.*?)</pre>', path.read_text())

    assert write(0, "x") == [("0", "x")]
    assert write(4, "y") == [("4", "y"), ("0", "x")]
    assert write(8, "z") == [("8", "z"), ("4", "y"), ("0", "x")]
    assert write(4, "w") == [("4", "w"), ("0", "x")]  # a continued run makes it, and those behind it, again
    assert path.read_text().count("<mark>green</mark>: drafts that were accepted") == 1
