"""Every form of a prompt stands for the tokens a user would expect."""

import json

import pytest
import torch

from decode import generate
from decode.prompts import read_prompts, split_batch, to_token_ids


def test_a_tensor_is_one_prompt_or_a_batch(tiny_target):
    one = generate(tiny_target, torch.tensor([5, 6, 7]), max_new_tokens=4)
    batch = generate(tiny_target, torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=4)
    assert one.prompt_ids == batch[0].prompt_ids == [5, 6, 7]
    assert one.token_ids == batch[0].token_ids
    assert split_batch("text") == (["text"], True)
    assert split_batch([{"role": "user", "content": "a"}])[1]


def test_text_is_a_user_message_unless_raw(tiny_target, tiny_tokenizer):
    ids = to_token_ids(tiny_target, "the cat", raw=False)
    assert tiny_tokenizer.decode(ids) == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert ids == to_token_ids(tiny_target, [{"role": "user", "content": "the cat"}], raw=False)
    assert tiny_tokenizer.decode(to_token_ids(tiny_target, "the cat", raw=True)) == "the cat"
    with pytest.raises(ValueError, match="raw=True takes text"):
        to_token_ids(tiny_target, [{"role": "user", "content": "the cat"}], raw=True)


def test_a_template_that_refuses_the_messages_is_a_clear_error(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="refuses the messages: no system role"):
        to_token_ids(tiny_target, "the cat", raw=False)


def test_all_layouts_are_read_and_a_last_answer_is_left_out(tmp_path):
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"prompt": "q"},
        {"turns": ["q", "later"]},
        {"messages": [user]},
        {"messages": [user, answer]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    assert read_prompts(path) == ["q", "q", [user], [user], [user]]
    assert read_prompts(path, limit=2) == ["q", "q"]


BROKEN = [
    *("{", "[]", "3", '{"text": "q"}', '{"messages": []}', '{"turns": []}'),
    *('{"turns": "abc"}', '{"turns": [["a"]]}', '{"turns": {"0": "a"}}', '"turns"', '{"prompt": ""}'),
    *(
        f'{{"prompt": {prompt}}}'
        for prompt in ("5", "null", "true", "[1.5, 2]", "[true]", '{"role": "u"}', '["a", "b"]')
    ),
    *('{"messages": "text"}', '{"messages": ["text"]}', '{"messages": {"role": "user", "content": "a"}}'),
    *(
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"content": "a"}]}',
        '{"messages": [{"role": 5, "content": "a"}]}',
    ),
    *('{"messages": [{"role": "user", "content": null}]}', '{"messages": [{"role": "assistant", "content": "only"}]}'),
    *(
        '{"conversations": "text"}',
        '{"conversations": [{"from": "human"}]}',
        '{"conversations": [{"from": [], "value": "a"}]}',
    ),
    *('{"prompt": "half a character: \\ud800"}', '{"messages": [{"role": "user", "content": "\\udc00"}]}'),
    *(b"\xa0\x00\xff", b'{"prompt": "\xff"}'),
]


@pytest.mark.parametrize("line", BROKEN, ids=str)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "q"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: expected a JSON object"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "is text, token ids or chat messages, got 5"),
        ([1.5, 2], "is text, token ids or chat messages, got .1.5, 2."),
        (["a", "b"], "is text, token ids or chat messages"),
        ("half a character: \ud800", "not Unicode text"),
        ([{"role": "user"}], "template refuses the messages: 'dict object' has no attribute 'content'"),
        ([{"role": "user", "content": ["a"]}], "template refuses the messages: .* concatenate"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_a_clear_error(tiny_target, monkeypatch, prompt, message):
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", "{{ 'said: ' + messages[0]['content'] }}")
    with pytest.raises(ValueError, match=message):
        to_token_ids(tiny_target, prompt, raw=False)


def test_token_ids_in_a_file_are_a_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [5, 6]}\n')
    assert read_prompts(path) == [[5, 6]]


def test_a_stop_string_that_texts_never_show_is_refused(tiny_target):
    with pytest.raises(ValueError, match="pass their ids as eos_ids"):
        generate(tiny_target, [5, 6], stop="<|im_end|>", max_new_tokens=4)


def test_a_message_that_calls_a_tool_needs_no_text(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "3"}]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert read_prompts(path) == [messages]
    del call["tool_calls"]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(ValueError, match=r"tools\.jsonl:1"):
        read_prompts(path)
