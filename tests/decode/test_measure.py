"""What is measured about batches, and reports that must not be lost."""

import json
from pathlib import Path

import pytest

from decode import Sampling, generate
from decode.compare import first_difference
from decode.measure import measure, write_report
from decode.methods import Run, our_runs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_difference_is_judged_by_the_noise_of_its_own_row(tiny_target, prompts, temperature):
    sampling = Sampling(temperature=temperature, seed=5)
    right = our_runs(tiny_target, {"plain": None}, sampling, 6)["plain"]

    def decode(batch):
        texts, stats = right.decode(batch)
        texts[2][1] = 0 if texts[2][1] else 1
        return texts, stats

    answers = measure(tiny_target, {"plain": right, "wrong": Run(decode)}, prompts[:4], sampling, turn=0)
    assert (answers["plain"].differences, answers["plain"].difference) == ([], None)
    (found,) = answers["wrong"].differences
    assert (found.row, found.near_tie, answers["wrong"].unexcused) == (2, False, 1)
    assert answers["wrong"].difference == found.text
    text = generate(tiny_target, prompts[:4], sampling=sampling, max_new_tokens=6)[2].token_ids
    wrong = [text[0], 0 if text[1] else 1, *text[2:]]
    difference = first_difference(tiny_target, prompts[2], text, wrong, sampling, row=2)
    assert found.text == str(difference)
    elsewhere = first_difference(tiny_target, prompts[2], text, wrong, sampling, row=0)
    assert (found.text == str(elsewhere)) is sampling.greedy


def test_what_a_setting_costs_is_not_timed(tiny_target):
    entered = []

    class Slow:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *_):
            entered.append("out")

    run = Run(lambda batch: (entered.append("decode"), ([[5]], []))[1], Slow)
    answers = measure(tiny_target, {"plain": run}, [7, 8], Sampling(seed=0), turn=0)
    assert entered == ["in", "decode", "out"]
    assert (answers["plain"].stats, answers["plain"].tokens) == (None, 1)
    run([7, 8])
    assert entered[3:] == ["in", "decode", "out"]


def test_a_report_that_cannot_be_written_is_printed(capsys):
    assert not write_report(Path("/dev/full"), {"rows": [1, 2]})  # a device that is always full
    out, err = capsys.readouterr()
    assert json.loads(out) == {"rows": [1, 2]}
    assert "cannot write /dev/full" in err
