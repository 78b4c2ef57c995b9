"""Distillation by a server: the same rows as in this process, whatever fails on the way; never another model's text."""

import json
import re
import threading
import time
from email.utils import formatdate

import pytest
from chat_server import expected_answer

import data.server
from data.answers import meta_path
from data.card import card_path
from data.conversations import load_conversations
from data.distill import DistillConfig, distill, main
from data.questions import prompt_seed
from data.server import ServerError

NUM = 12


def create_prompt(index):
    system = [{"role": "system", "content": "Be short."}] if index % 3 == 0 else []
    earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}] if index % 4 == 0 else []
    messages = [*system, *earlier, {"role": "user", "content": f"Question {index}?"}]
    return {"id": f"p{index}", "source": "tests", "messages": messages}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(data.server, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(data.server, "LONGEST_WAIT", 0.02)


@pytest.fixture
def configure(chat_server, saved_target, write_rows, tmp_path):
    prompts = write_rows(*map(create_prompt, range(NUM)), name="prompts.jsonl")

    def create(**changes):
        options = {"target": str(saved_target), "prompts": prompts, "out": tmp_path / "out.jsonl", "retries": 3}
        options |= {"server": chat_server.url, "max_new_tokens": 12, "temperature": 0.8, "top_p": 0.95}
        return DistillConfig(**options | {"concurrency": 4} | changes)

    return create


def expected_rows(count=NUM):
    rows = []
    for prompt in map(create_prompt, range(count)):
        text, is_cut = expected_answer(prompt["messages"], prompt_seed(0, prompt["id"]) & 0x7FFFFFFF)
        messages = [*prompt["messages"], {"role": "assistant", "content": text.rstrip("\ufffd")}]
        rows.append(prompt | {"messages": messages, "finish_reason": "length" if is_cut else "stop"})
    return rows


def load_rows(config):
    return [json.loads(line) for line in config.out.read_text().splitlines()]


def once(**fault):
    return lambda text, times: fault if times == 0 else None


# rows


def test_rows_are_the_servers_answers_in_the_order_of_the_prompts(configure, chat_server):
    chat_server.fault = lambda text, times: {"wait": 0.05} if "1" in text else None
    summary = distill(configure())
    assert load_rows(configure()) == expected_rows()
    assert {row["finish_reason"] for row in expected_rows()} == {"stop", "length"}
    assert (summary.new_answers, summary.new_tokens, summary.failed) == (NUM, 5 * NUM, {})
    assert len(load_conversations(configure().out)) == NUM


def test_every_way_to_change_the_distribution_is_said(configure, chat_server):
    distill(configure(limit=1, seed=3))
    (body,) = chat_server.asked
    assert body == {
        "model": "served", "messages": create_prompt(0)["messages"], "max_tokens": 12, "temperature": 0.8,
        "top_p": 0.95, "seed": prompt_seed(3, "p0") & 0x7FFFFFFF, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


def test_tgi_is_asked_in_its_own_words(configure, chat_server):
    chat_server.models = [{"id": "org/model", "owned_by": "org/model", "created": 0}]
    chat_server.fault = lambda text, times: {"model": "org/model"}
    distill(configure(top_p=1.0))
    assert {body["model"] for body in chat_server.asked} == {"tgi"}
    assert not any("top_p" in body for body in chat_server.asked)
    assert len(load_rows(configure())) == NUM


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_are_asked_at_once_and_no_more(configure, chat_server, concurrency):
    chat_server.fault = lambda text, times: {"wait": 0.03}
    distill(configure(concurrency=concurrency))
    assert chat_server.most_at_once == concurrency


def test_the_key_is_sent_and_written_nowhere(configure, chat_server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    distill(configure())
    assert {headers["Authorization"] for headers in chat_server.headers} == {"Bearer very-secret"}
    for path in configure().out.parent.glob("out.jsonl*"):
        assert "very-secret" not in path.read_text()
    with pytest.raises(ValueError, match="set OPENAI_API_KEY instead"):
        distill(configure(server=chat_server.url.replace("//", "//me:word@")))


# failures


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500}, {"status": 503}, {"status": 429, "headers": {"Retry-After": "0"}}, {"drop": True},
        {"torn": "json"}, {"torn": "text"}, {"wait": 1.0}, {"choices": []}, {"choices": None},
        {"choices": [{"message": {"content": "half"}, "finish_reason": "abort"}]},
    ],
    ids=str,
)  # fmt: skip
def test_failures_that_pass_are_asked_again(configure, chat_server, fault):
    chat_server.fault = lambda text, times: fault if times == 0 and "1" in text else None
    distill(configure(timeout=0.5))
    assert load_rows(configure()) == expected_rows()
    assert len(chat_server.asked) == NUM + sum("1" in f"{index}" for index in range(NUM))


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_for(configure, chat_server, as_date):
    after = formatdate(time.time() + 2, usegmt=True) if as_date else "0.7"
    chat_server.fault = once(status=429, headers={"Retry-After": after})
    distill(configure(limit=1))
    assert chat_server.times[1] - chat_server.times[0] >= 0.7


def test_a_server_that_asks_for_too_long_a_wait_ends_the_run(configure, chat_server):
    chat_server.fault = once(status=429, headers={"Retry-After": "86400"}, error="daily quota")
    with pytest.raises(ServerError, match=r"asks to wait for 86400 s: .*daily quota"):
        distill(configure())


@pytest.mark.parametrize(
    ("fault", "message", "tries"),
    [
        ({"status": 400, "error": "no such role"}, "400 Bad Request: no such role", 1),
        ({"status": 500, "error": "poison"}, r"500 Internal Server Error: poison \(4 tries\)", 4),
        ({"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]}, "no answer in text", 1),
        ({"choices": [{"message": {"content": "\ud800"}, "finish_reason": "stop"}]}, "no answer in text", 1),
    ],
)
def test_a_prompt_that_always_fails_is_named_and_loses_no_other(configure, chat_server, fault, message, tries):
    chat_server.fault = lambda text, times: fault if text == "Question 5?" else None
    summary = distill(configure())
    assert list(summary.failed) == ["p5"]
    assert re.search(message, summary.failed["p5"])
    assert load_rows(configure()) == [row for row in expected_rows() if row["id"] != "p5"]
    assert len(chat_server.asked) == NUM - 1 + tries
    assert json.loads(meta_path(configure().out).read_text())["failed"] == summary.failed
    chat_server.fault = once()
    assert distill(configure()).new_answers == 1
    assert load_rows(configure()) == expected_rows()
    assert "failed" not in json.loads(meta_path(configure().out).read_text())


def test_a_server_that_refuses_everything_is_not_asked_everything(configure, chat_server, write_rows):
    prompts = write_rows(*map(create_prompt, range(60)), name="many.jsonl")
    chat_server.fault = lambda text, times: {"status": 400, "error": "nothing works"}
    with pytest.raises(ServerError, match=r"8 prompts failed one after the other, the last with .*nothing works"):
        distill(configure(prompts=prompts, concurrency=1))
    assert len(chat_server.asked) <= 9


@pytest.mark.parametrize(
    ("status", "message"), [(401, "401 .*bad key; set OPENAI_API_KEY"), (404, "404 .*bad key; most URLs end in /v1")]
)
def test_what_no_repetition_changes_ends_the_run(configure, chat_server, status, message):
    chat_server.fault = lambda text, times: {"status": status, "error": "bad key"}
    with pytest.raises(ServerError, match=message):
        distill(configure())
    assert len(chat_server.asked) <= 4


def test_a_server_that_is_not_there_is_said_at_once(configure):
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"127.0.0.1:9/v1/models cannot be reached .*refused.*start the server"):
        distill(configure(server="http://127.0.0.1:9/v1", retries=1000))
    assert time.monotonic() - start < 30
    assert not configure().out.exists()
    with pytest.raises(ServerError, match=r"404 .*most URLs end in /v1"):
        distill(configure(server=configure().server.removesuffix("/v1")))


def test_a_server_that_goes_down_ends_the_run_and_the_same_command_goes_on(configure, chat_server, capsys):
    def fault(text, times):
        if chat_server.answered == 5:
            threading.Thread(target=lambda: (chat_server.shutdown(), chat_server.socket.close())).start()
        return {"drop": True} if chat_server.answered >= 5 else None

    chat_server.fault = fault
    config = configure(concurrency=1)
    options = ["--target", config.target, "--prompts", str(config.prompts), "--out", str(config.out), "--retries", "3"]
    options += ["--max-new-tokens", "12", "--temperature", "0.8", "--top-p", "0.95", "--concurrency", "1", "--server"]
    with pytest.raises(SystemExit, match="1"):
        main([*options, config.server])
    said = capsys.readouterr().err
    assert "refused" in said
    assert "without an answer" not in said  # it is not the prompts' fault
    assert "answers that came are kept; run the same command to go on" in said
    assert load_rows(config) == expected_rows(5)
    assert "5 of 12 prompts are answered" in card_path(config.out).read_text()


# another model, another template


def test_a_model_that_is_not_served_is_refused(configure, chat_server):
    with pytest.raises(ServerError, match="does not serve 'other' but served; correct --server-model"):
        distill(configure(server_model="other"))
    chat_server.models = [{"id": "a"}, {"id": "b"}]
    with pytest.raises(ServerError, match="serves 2 models: a, b; choose by --server-model"):
        distill(configure())
    chat_server.models = []
    with pytest.raises(ServerError, match="lists no model"):
        distill(configure())
    assert chat_server.asked == []


def test_an_answer_of_another_model_is_refused_and_not_kept(configure, chat_server):
    chat_server.fault = lambda text, times: {"model": "impostor"} if text == "Question 5?" else None
    with pytest.raises(ServerError, match="answered by 'impostor', not 'served'"):
        distill(configure())
    assert all(row in expected_rows() and row["id"] != "p5" for row in load_rows(configure()))


def test_thoughts_that_are_split_off_are_refused(configure, chat_server):
    message = {"content": "42", "reasoning_content": "Let me see."}
    chat_server.fault = lambda text, times: {"choices": [{"message": message, "finish_reason": "stop"}]}
    with pytest.raises(ServerError, match="without a reasoning parser"):
        distill(configure())
    assert load_rows(configure()) == []


def test_another_template_is_refused_unless_it_is_wanted(configure, chat_server):
    count = chat_server.count_tokens
    chat_server.count_tokens = lambda messages: count(messages) + (messages[0]["role"] != "system")
    with pytest.raises(ServerError, match=r"tokens of prompt 'p\d+', the template of .* makes \d+: .*--any-template"):
        distill(configure(concurrency=1))
    assert load_rows(configure()) == expected_rows(1)
    distill(configure(any_template=True))
    assert load_rows(configure()) == expected_rows()
    assert "4 prompts had as many as" in card_path(configure().out).read_text()
    assert json.loads(meta_path(configure().out).read_text())["template"] == {"same": 4, "other": 8}


def test_a_server_that_counts_no_tokens_cannot_be_checked_which_the_card_says(configure, chat_server):
    chat_server.fault = lambda text, times: {"usage": None}
    distill(configure())
    assert "of 12 it is not known" in card_path(configure().out).read_text()


def test_a_shorter_context_of_the_server_counts(configure, chat_server):
    chat_server.models[0]["max_model_len"] = 20
    with pytest.raises(ValueError, match=r"context of 20 less max_new_tokens=12.*--skip-long"):
        distill(configure())


def test_answers_of_a_server_and_of_this_process_are_not_mixed(configure, chat_server, small_target):
    distill(configure(limit=3))
    local = configure(server=None, concurrency=64, retries=10)
    with pytest.raises(ValueError, match="server_model was 'served', is None"):
        distill(local, small_target)
    chat_server.models = [{"id": "newer"}]
    with pytest.raises(ValueError, match="server_model was 'served', is 'newer'"):
        distill(configure())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batch_size": 4, "dtype": "float32"}, "batch_size, dtype are the server's own affair"),
        ({"server": None}, "concurrency, retries need --server"),
        ({"server": "localhost:8000"}, "server must be a URL such as"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"retries": -1}, "retries at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(configure, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        configure(**changes)
