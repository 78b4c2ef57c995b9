"""Loading conversations and masking everything but the assistant's tokens."""

import copy
import logging
import subprocess
import sys
from itertools import compress

import pytest
from masks import create_conversation, supervised_runs

from data.conversations import Conversation, encode_all, encode_conversation, load_conversations, main

USER = {"role": "user", "content": "What is a tree?"}
ANSWER = {"role": "assistant", "content": "A tree is a tall plant."}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "Write a haiku."}, {"role": "assistant", "content": "Rain. é 🌧"}]


# loading


def test_messages_and_sharegpt_layouts_load_to_the_same_conversation(write_rows):
    system = "You are kind."
    path = write_rows(
        {"id": "a", "messages": [{"role": "system", "content": system}, USER, ANSWER], "source": "s"},
        {
            "id": "b",
            "conversations": [
                {"from": "system", "value": system},
                {"from": "human", "value": USER["content"]},
                {"from": "gpt", "value": ANSWER["content"]},
            ],
        },
    )
    first, second = load_conversations(path)
    assert first.messages == second.messages == [{"role": "system", "content": system}, USER, ANSWER]
    assert (first.id, first.source, second.id, second.source) == ("a", "s", "b", None)


def test_rows_without_id_are_named_by_their_line_and_blank_lines_count(write_rows):
    path = write_rows({"messages": [USER]}, "", {"messages": [USER, ANSWER], "finish_reason": "length"})
    assert [(c.id, c.finish_reason) for c in load_conversations(path)] == [("1", None), ("3", "length")]


def test_limit_stops_reading(write_rows):
    path = write_rows({"messages": [USER]}, {"messages": [USER]}, "{broken")
    assert len(load_conversations(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [', "invalid JSON"),
        ('"text"', "expected an object, got str"),
        ({"id": "x", "prompt": "hi"}, r"expected `messages` or `conversations`, got the keys \['id', 'prompt'\]"),
        ({"messages": []}, "expected a list of turns"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "turn 1: `role` must be one of .*, got 'robot'"),
        ({"conversations": [{"from": "bing", "value": "hi"}]}, "turn 1: `from` must be one of .*, got 'bing'"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "turn 2: `content` must be a string, got NoneType",
        ),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "turn 1: `content` must be a string, got list"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
        ({"messages": [ANSWER, USER]}, "turn 1: an assistant turn comes before any user turn"),
        ({"messages": [USER], "id": ["x"]}, "`id` must be a string or a number, got list"),
        ({"messages": [USER], "finish_reason": 1}, "`finish_reason` must be a string"),
        ({"messages": [USER], "id": "first"}, "id 'first' is already used at .*rows.jsonl:1"),
    ],
)
def test_broken_row_is_an_error_with_file_and_line(write_rows, line, complaint):
    path = write_rows({"messages": [USER], "id": "first"}, {"messages": [USER]}, line)
    with pytest.raises(ValueError, match=f"rows.jsonl:3: .*{complaint}"):
        load_conversations(path)


def test_line_that_is_not_utf8_is_an_error_with_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "caf\xe9"}]}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: invalid JSON"):
        load_conversations(path)


def test_missing_and_empty_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_conversations(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no conversations"):
        load_conversations(tmp_path / "empty.jsonl")


def test_parquet_loads_like_jsonl(write_rows, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"id": "a", "messages": [USER, ANSWER], "finish_reason": None}, {"id": "b", "messages": [USER]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_conversations(tmp_path / "rows.parquet") == load_conversations(write_rows(*rows))


def test_broken_parquet_row_is_named(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"messages": [USER]}, {"messages": [{"role": "robot", "content": "hi"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows.parquet:row 2: turn 1"):
        load_conversations(tmp_path / "rows.parquet")


@pytest.mark.parametrize("limit", [None, 1])
def test_dataset_folder_loads_through_datasets(write_rows, tmp_path, monkeypatch, limit):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_rows({"messages": [USER, ANSWER]}, {"messages": [USER]}, name="set/train.jsonl")
    loaded = load_conversations(f"{tmp_path / 'set'}:train", limit=limit)
    assert [c.messages for c in loaded] == [[USER, ANSWER], [USER]][:limit]


# masks


def test_chatml_mask_is_the_answers_and_their_end_token(chatml_tokenizer):
    runs = supervised_runs(create_conversation(TWO_TURNS), chatml_tokenizer)
    assert runs == ["A tree is a tall plant.<|im_end|>", "Rain. é 🌧<|im_end|>"]


def test_chatml_mask_equals_character_spans(chatml_tokenizer):
    conversation = create_conversation([{"role": "system", "content": "Be  kind."}, *TWO_TURNS])
    text = chatml_tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    wanted, position = [], 0
    for message in conversation.messages:
        start = text.index(message["content"], position)
        position = start + len(message["content"] + "<|im_end|>")
        wanted.append((start, position) if message["role"] == "assistant" else (0, 0))
    encoding = chatml_tokenizer(text, return_offsets_mapping=True)
    expected = [any(s <= left and right <= e for s, e in wanted) for left, right in encoding["offset_mapping"]]
    encoded = encode_conversation(conversation, chatml_tokenizer, max_length=1000)
    assert encoded.token_ids == encoding["input_ids"]
    assert encoded.loss_mask == expected


def test_template_without_generation_prompt_is_masked_up_to_eos(llama2_tokenizer):
    messages = [USER, {"role": "assistant", "content": " A tree is a tall plant.  "}, USER, ANSWER]
    encoded = encode_conversation(create_conversation(messages), llama2_tokenizer, max_length=1000)
    supervised = list(compress(encoded.token_ids, encoded.loss_mask))
    assert supervised.count(llama2_tokenizer.eos_token_id) == 2
    assert llama2_tokenizer.bos_token_id not in supervised
    assert supervised_runs(create_conversation(messages), llama2_tokenizer) == ["A tree is a tall plant. </s>"] * 2


def test_prompt_and_answer_are_tokenised_as_generation_sees_them(chatml_tokenizer):
    prompt = chatml_tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    prompt_ids = chatml_tokenizer(prompt, add_special_tokens=False)["input_ids"]
    encoded = encode_conversation(create_conversation([USER, ANSWER]), chatml_tokenizer, max_length=1000)
    assert encoded.token_ids[: len(prompt_ids)] == prompt_ids
    assert encoded.loss_mask.index(True) == len(prompt_ids)


@pytest.mark.parametrize("content", ["A tree", "d", "x", "", "im_end", "two\n\n", "  spaced  out  "])
def test_cut_answer_has_no_end_but_a_finished_one_has(chatml_tokenizer, content):
    messages = [USER, {"role": "assistant", "content": content}]
    finished = supervised_runs(create_conversation(messages, finish_reason="stop"), chatml_tokenizer)
    cut = supervised_runs(create_conversation(messages, finish_reason="length"), chatml_tokenizer)
    assert finished == [content + "<|im_end|>"]
    assert cut == ([content] if content else [])


def test_cut_answer_that_the_template_strips_has_no_end(llama2_tokenizer):
    messages = [USER, {"role": "assistant", "content": "Rain on x  "}]
    assert supervised_runs(create_conversation(messages, finish_reason="length"), llama2_tokenizer) == ["Rain on x"]


def test_only_the_last_answer_of_a_cut_conversation_loses_its_end(chatml_tokenizer):
    runs = supervised_runs(create_conversation(TWO_TURNS, finish_reason="length"), chatml_tokenizer)
    assert runs == ["A tree is a tall plant.<|im_end|>", "Rain. é 🌧"]
    runs = supervised_runs(create_conversation([*TWO_TURNS, USER], finish_reason="length"), chatml_tokenizer)
    assert runs == ["A tree is a tall plant.<|im_end|>", "Rain. é 🌧<|im_end|>"]


def test_end_token_that_is_not_eos_but_special_ends_the_turn(chatml_tokenizer):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.eos_token = "<|endoftext|>"
    assert supervised_runs(create_conversation([USER, ANSWER]), tokenizer) == ["A tree is a tall plant.<|im_end|>"]


def test_prompts_encode_with_nothing_supervised(chatml_tokenizer):
    assert supervised_runs(create_conversation([USER]), chatml_tokenizer) == []


def test_truncation_keeps_the_first_tokens(chatml_tokenizer):
    whole = encode_conversation(create_conversation(TWO_TURNS), chatml_tokenizer, max_length=1000)
    for length in (1, 10, len(whole.token_ids)):
        part = encode_conversation(create_conversation(TWO_TURNS), chatml_tokenizer, max_length=length)
        assert part.token_ids == whole.token_ids[:length]
        assert part.loss_mask == whole.loss_mask[:length]


def test_template_that_rewrites_turns_is_refused_and_last_turn_can_be_supervised(thinking_tokenizer):
    conversation = create_conversation(TWO_TURNS)
    with pytest.raises(ValueError, match=r"'c'.* turn 2 differently once more turns follow.*turns='last'"):
        encode_conversation(conversation, thinking_tokenizer, max_length=1000)
    runs = supervised_runs(conversation, thinking_tokenizer, turns="last")
    assert runs == ["<think>\n\n</think>\n\nRain. é 🌧<|im_end|>"]


def test_generation_prompt_that_does_not_begin_the_answer_is_refused(chatml_tokenizer, monkeypatch):
    monkeypatch.setattr(
        chatml_tokenizer, "chat_template", chatml_tokenizer.chat_template[:-11] + "<think>\n{% endif %}"
    )
    with pytest.raises(ValueError, match=r"generation prompt .*<think>.* does not begin turn 2"):
        encode_conversation(create_conversation([USER, ANSWER]), chatml_tokenizer, max_length=1000)


def test_template_that_raises_names_the_conversation(llama2_tokenizer):
    conversation = create_conversation([{"role": "system", "content": "Be kind."}, USER, ANSWER])
    with pytest.raises(ValueError, match="conversation 'c': the chat template refuses it: only user and assistant"):
        encode_conversation(conversation, llama2_tokenizer, max_length=1000)


# all of them


def test_nothing_supervised_is_an_error(chatml_tokenizer):
    with pytest.raises(ValueError, match=r"0 of \d+ tokens in 1 conversations are supervised.*preview"):
        encode_all([create_conversation([USER])], chatml_tokenizer, max_length=1000)
    with pytest.raises(ValueError, match=r"0 of 3 tokens"):
        encode_all([create_conversation([USER, ANSWER])], chatml_tokenizer, max_length=3)


def test_everything_supervised_is_an_error(chatml_tokenizer, monkeypatch):
    monkeypatch.setattr(chatml_tokenizer, "chat_template", "{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match=r"(\d+) of \1 tokens"):
        encode_all([create_conversation([USER, ANSWER])], chatml_tokenizer, max_length=1000)


def test_conversations_left_with_nothing_supervised_are_reported(chatml_tokenizer, caplog):
    long = Conversation("long", [{"role": "user", "content": "tree " * 50}, ANSWER])
    with caplog.at_level(logging.WARNING):
        encoded = encode_all([create_conversation([USER, ANSWER]), long], chatml_tokenizer, max_length=40)
    assert len(encoded) == 1
    assert "1 of 2 conversations have no supervised token within max_length=40 and are left out: long" in caplog.text


def test_preview_brackets_supervised_text_and_counts(chatml_tokenizer, write_rows, tmp_path, capsys):
    chatml_tokenizer.save_pretrained(tmp_path / "target")
    path = write_rows({"id": "a", "messages": [USER, ANSWER]}, {"id": "b", "messages": [USER, ANSWER]})
    main(["preview", str(path), "--target", str(tmp_path / "target"), "--num", "1"])
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[A tree is a tall plant.<|im_end|>]]\n" in shown
    encoded = encode_conversation(create_conversation([USER, ANSWER]), chatml_tokenizer, max_length=1000)
    assert f"--- a: {sum(encoded.loss_mask)} of {len(encoded.token_ids)} tokens supervised" in shown
    assert "--- b" not in shown


def test_preview_of_a_broken_file_exits_with_the_error(write_rows, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["preview", str(write_rows("{")), "--target", "none"])
    assert "rows.jsonl:1: invalid JSON" in capsys.readouterr().err


def test_module_runs_without_warnings():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "data.conversations", "preview", "--help"]
    assert "--max-length" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
