"""The prompts that come with the repository: what is measured on them was not trained on them."""

import json
from collections import Counter
from pathlib import Path

import pytest

from decode.prompts import read_prompts

PROMPTS = Path(__file__).parents[2] / "data" / "prompts"
FILES = sorted(PROMPTS.glob("*.jsonl"))
TRAINING = PROMPTS / "quickstart.jsonl"
EVALUATION = [path for path in FILES if path != TRAINING]


def read_texts(path: Path) -> list[str]:
    """Every prompt of the file as one line of lower-case words."""
    chats = read_prompts(path)
    return [" ".join(" ".join(turn["content"] for turn in chat).lower().split()) for chat in chats]


def read_ids(*paths: Path) -> list[str]:
    return [json.loads(line)["id"] for path in paths for line in path.read_text().splitlines()]


def test_the_files_are_those_known_here():
    assert {path.stem for path in FILES} == {"calibration", "copy", "held_out", "quickstart", "repeat"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_is_a_prompt_of_one_user_turn(path):
    chats = read_prompts(path)
    assert len(chats) == len(read_ids(path))
    assert all([turn["role"] for turn in chat] == ["user"] for chat in chats)


def test_no_id_and_no_text_is_used_twice():
    texts = [text for path in FILES for text in read_texts(path)]
    for values in (read_ids(*FILES), texts):
        assert [value for value, count in Counter(values).items() if count > 1] == []


@pytest.mark.parametrize(("name", "kinds"), [("copy", {"edit": 7, "code": 7, "quote": 6}), ("repeat", {"repeat": 6})])
def test_rows_of_each_kind(name, kinds):
    expected = [f"{kind}-{number:02}" for kind, count in kinds.items() for number in range(1, count + 1)]
    assert read_ids(PROMPTS / f"{name}.jsonl") == expected


def test_each_prompt_to_repeat_says_its_text_three_times_or_more():
    for [turn] in read_prompts(PROMPTS / "repeat.jsonl"):
        *blocks, instruction = turn["content"].split("\n\n")
        assert len(set(blocks)) == 1
        assert len(blocks) >= 3
        assert instruction not in blocks


@pytest.mark.parametrize("path", EVALUATION, ids=lambda path: path.stem)
def test_no_evaluation_prompt_is_trained_on(path):
    training = read_texts(TRAINING)
    for text in read_texts(path):
        assert not [other for other in training if text in other or other in text], text
