"""Prompts that an evaluation prompt matches are left out, and nothing else changes."""

import json

import pytest
import yaml

from data.answers import meta_path
from data.card import card_path
from data.conversations import Conversation, load_conversations
from data.decontaminate import exclude, to_words
from data.distill import DistillConfig, distill, main

GSM = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips?"
LONG = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences."


def user(name, *texts):
    turns = []
    for text in texts:
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    return Conversation(name, turns[:-1])


@pytest.fixture
def evaluation(write_rows):
    return write_rows(
        {"id": "mt-1", "turns": [LONG, "Rewrite your previous response."]},
        {"prompt": "Say hi!"},
        {"question": GSM, "answer": "72"},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is a tree?"}]},
        {"conversations": [{"from": "human", "value": "Name ten rivers of France in one line"}]},
        name="evaluation.jsonl",
    )


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["say HI"], "exact"),
        (["Say\n\thi?!"], "exact"),
        (["Say hi to me"], None),
        (["Tell me.", "rewrite your previous response"], "exact"),
        (["Be kind."], None),
        ([f"Solve this. {GSM.upper()} Think first."], "overlap"),
        (["In a shop, she sold clips to 48 of her friends in April and then she sold half of it"], "overlap"),
        (["She sold clips to 48 of her friends in April and then she slept"], None),  # 12 words in a row
        (["Please name ten rivers of France in one line, in German"], "overlap"),  # a shorter one, all of it
        (["Name ten rivers of France in one word"], None),
        (["\uff57\uff48\uff41\uff54 is a TREE"], "exact"),  # full-width letters
        (["..."], None),
    ],
)
def test_matches_are_found_by_words(evaluation, texts, expected):
    kept, report = exclude([user("other", "Something else"), user("x", *texts)], [evaluation])
    assert [match.kind for match in report.matches] == ([expected] if expected else [])
    assert [prompt.id for prompt in kept] == (["other"] if expected else ["other", "x"])


def test_texts_without_spaces_match_by_characters(write_rows):
    text = "请写一篇关于夏威夷旅行的精彩博客文章"
    path = write_rows({"prompt": text})
    _, report = exclude([user("x", f"你好{text}谢谢"), user("y", "请写一篇关于夏天的文章")], [path])
    assert [match.prompt for match in report.matches] == ["x"]
    assert len(to_words(text)) == len(text)


def test_an_instruction_that_all_evaluation_prompts_share_is_no_match(write_rows):
    frame = "Think step by step and give the final answer as a number after four number signs: "
    few, many = (write_rows(*[{"prompt": f"{frame}{n}"} for n in range(n)], name=f"{n}.jsonl") for n in (10, 11))
    prompt, equal = user("x", f"{frame}the sum of seven and nine"), user("y", f"{frame}3")
    kept, _ = exclude([prompt, equal, user("z", "a")], [many])
    assert [each.id for each in kept] == ["x", "z"]
    kept, _ = exclude([prompt, equal, user("z", "a")], [few])
    assert [each.id for each in kept] == ["z"]


def test_others_keep_order_and_ids_and_files_are_counted(evaluation, write_rows):
    second = write_rows({"prompt": "Something odd"}, name="second.jsonl")
    texts = ["a", "Say hi", "b", GSM, "c", "something odd", f"x {LONG}"]
    path = write_rows(*[{"messages": [{"role": "user", "content": text}]} for text in texts], name="p.jsonl")
    kept, report = exclude(load_conversations(path), [evaluation, second])
    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in kept] == [("1", "a"), ("3", "b"), ("5", "c")]
    description = report.describe()
    assert description["files"] == {
        "evaluation.jsonl": {"prompts": 5, "exact": 2, "overlap": 1},
        "second.jsonl": {"prompts": 1, "exact": 1, "overlap": 0},
    }
    assert description["left_out"]["4"] == "exact, evaluation.jsonl:3"


def test_files_are_counted_however_they_are_spelt_or_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, text in (("a", "Say hi"), ("b", "Say ho")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    prompts = [user("x", "say hi"), user("y", "say ho"), user("z", "other")]
    _, report = exclude(prompts, ["./a/test.jsonl", "b//test.jsonl", tmp_path / "b" / ".." / "b" / "test.jsonl"])
    description = report.describe()
    found = {"prompts": 1, "exact": 1, "overlap": 0}
    assert description["files"]["test.jsonl"] == description["files"]["test.jsonl (2)"] == found
    assert description["left_out"] == {"x": "exact, test.jsonl:1", "y": "exact, test.jsonl (2):1"}


@pytest.mark.parametrize("row", ["{broken", "[1]", '{"text": "a"}', '{"turns": []}', '{"prompt": 3}'])
def test_broken_evaluation_files_are_named(evaluation, write_rows, row):
    with pytest.raises(ValueError, match=r"bad.jsonl:2: expected `messages`"):
        exclude([user("x", "a")], [evaluation, write_rows({"prompt": "a"}, row, name="bad.jsonl")])


def test_nothing_left_is_an_error(evaluation):
    with pytest.raises(ValueError, match="all 1 prompts match evaluation prompts"):
        exclude([user("x", "Say hi")], [evaluation])


# in a distillation


@pytest.fixture
def prompts(write_rows):
    texts = ["What is rain?", "what is a tree", "3 + 4?", GSM * 40, "a"]
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]
    return write_rows(*rows, name="prompts.jsonl")


@pytest.fixture
def configure(prompts, evaluation, tmp_path):
    def create(**changes):
        options = {"target": "small", "prompts": prompts, "out": tmp_path / "out.jsonl", "max_new_tokens": 8}
        return DistillConfig(**options | {"exclude": (evaluation,)} | changes)

    return create


def test_left_out_prompts_are_not_answered_here(configure, small_target, evaluation):
    summary = distill(configure(), small_target)  # p3 would be too long, but is not asked
    assert "left out 2 that match evaluation prompts" in str(summary)
    assert sorted(conversation.id for conversation in load_conversations(configure().out)) == ["p0", "p2", "p4"]
    assert distill(configure(), small_target).new_answers == 0
    with pytest.raises(ValueError, match=r"exclude_sha256 was '\w+', is None"):
        distill(configure(exclude=(), skip_long=True), small_target)
    with evaluation.open("a") as file:
        file.write('{"prompt": "3 + 4?"}\n')
    with pytest.raises(ValueError, match="exclude_sha256 was"):
        distill(configure(), small_target)


def test_left_out_prompts_are_not_asked_of_a_server(configure, chat_server, saved_target, evaluation, capsys):
    config = configure()
    options = ["--target", str(saved_target), "--prompts", str(config.prompts), "--out", str(config.out)]
    main([*options, "--server", chat_server.url, "--max-new-tokens", "8", "--exclude", str(evaluation)])
    assert "left out 2" in capsys.readouterr().out
    assert {body["messages"][0]["content"] for body in chat_server.asked} == {"What is rain?", "3 + 4?", "a"}


# the dataset card


def test_the_card_says_where_the_answers_come_from(configure, small_target, tmp_path):
    distill(configure(), small_target)
    text = card_path(configure().out).read_text()
    _, metadata, body = text.split("---\n", 2)
    assert yaml.safe_load(metadata)["configs"] == [{"config_name": "default", "data_files": "out.jsonl"}]
    settings = json.loads(meta_path(configure().out).read_text())["settings"]
    for word in (settings["fingerprint"], settings["prompts_sha256"], "3 of 3 prompts are answered", "`small`"):
        assert word in body
    assert "| `evaluation.jsonl` | 5 | 1 | 1 |" in body
    assert "python 3." in body
    assert str(tmp_path) not in text


def test_a_folder_with_a_card_in_it_loads(configure, small_target, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    distill(configure(), small_target)
    repository = tmp_path / "repository"
    repository.mkdir()
    configure().out.rename(repository / "out.jsonl")
    card_path(configure().out).rename(repository / "README.md")
    meta_path(configure().out).rename(repository / "out.jsonl.meta.json")
    assert len(load_conversations(repository)) == 3
