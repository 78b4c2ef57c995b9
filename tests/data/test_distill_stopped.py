"""Distillations that are killed or shared among processes give the output of one that was not."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from data.answers import AnswerFile, meta_path
from data.card import card_path
from data.distill import DistillConfig, distill
from data.processes import Processes, find_parts
from data.server import Server, ServerError

KILLS = 20
# imports once, then forks: what is killed are real processes, without the seconds that each takes to start
STARTER = """
import os, sys
from data.distill import main
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        main(line.split())
        sys.stdout.flush()
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def create_prompts(count):
    return [{"id": f"p{n}", "messages": [{"role": "user", "content": f"Question {n}?"}]} for n in range(count)]


def names(path):
    return [json.loads(line)["id"] for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.fixture
def starter(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=(tmp_path / "stderr").open("w"),
    )  # fmt: skip
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def options(chat_server, saved_target, write_rows, tmp_path):
    prompts = write_rows(*create_prompts(300), name="prompts.jsonl")
    command = ["--target", saved_target, "--prompts", prompts, "--server", chat_server.url, "--concurrency", 6]
    return [
        str(part) for part in [*command, "--max-new-tokens", 12, "--temperature", 1, "--out", tmp_path / "out.jsonl"]
    ]


def start(starter, options):
    starter.stdin.write(" ".join(options) + "\n")
    starter.stdin.flush()
    return int(starter.stdout.readline())


def wait_for_answers(server, count):
    deadline = time.monotonic() + 30
    while server.answered < count and time.monotonic() < deadline:
        time.sleep(0.001)


class Gate:
    """Lets so many answers out in each round, so that no run is done before it is killed, and fails some of them."""

    def __init__(self, server):
        self.server, self.round, self.quota = server, 0, 0

    def open(self, answers):
        self.round += 1
        while self.server.now:  # requests of those that were killed, some of which come only now
            time.sleep(0.002)
            self.round += 1
        self.quota = self.server.answered + answers

    def __call__(self, text, times):
        mine = self.round
        while self.round == mine and self.server.answered >= self.quota:
            time.sleep(0.002)
        return {"drop": True} if self.round != mine else {"status": 500} if times == 0 and "7" in text else None


@pytest.mark.timeout(200)
def test_twenty_kills_give_the_output_of_a_run_that_was_not_killed(starter, options, chat_server, tmp_path):
    out, draw, killed, grown = tmp_path / "out.jsonl", random.Random(0), 0, 0
    gate = chat_server.fault = Gate(chat_server)
    for _ in range(KILLS):
        before, asked = set(names(out)) if out.exists() else set(), len(chat_server.asked)
        gate.open(draw.randrange(6, 20))
        child = start(starter, options)
        wait_for_answers(chat_server, gate.quota - draw.randrange(6))
        time.sleep(draw.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        killed += int(starter.stdout.readline()) == -signal.SIGKILL
        again = {body["messages"][-1]["content"] for body in chat_server.asked[asked:]}
        assert not again & {f"Question {name[1:]}?" for name in before}
        assert before <= set(names(out))
        grown += before < set(names(out))
    assert killed == KILLS
    assert grown > KILLS // 2  # most were killed among answers, not before the first
    assert KILLS < len(names(out)) < 300
    gate.open(10_000)
    start(starter, options)
    assert starter.stdout.readline().startswith("answers 300 ")
    assert starter.stdout.readline() == "0\n"
    whole = tmp_path / "whole.jsonl"
    start(starter, [*options[:-1], str(whole)])
    assert starter.stdout.readline().startswith("answers 300 ")
    assert out.read_bytes() == whole.read_bytes()
    assert names(out) == [f"p{n}" for n in range(300)]


def test_an_interrupted_run_keeps_what_came_and_says_so_on_the_card(options, chat_server, tmp_path):
    command = [sys.executable, "-m", "data.distill", *options]
    chat_server.fault = lambda text, times: {"wait": 300} if chat_server.answered >= 10 else None
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for_answers(chat_server, 10)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)  # ends like Ctrl-C
    _, said = process.communicate(timeout=20)  # does not wait for answers that do not come
    assert process.returncode == 130
    assert "interrupted; run the same command to go on" in said
    came = len(names(tmp_path / "out.jsonl"))
    assert came >= 10
    assert f"{came} of 300 prompts are answered" in card_path(tmp_path / "out.jsonl").read_text()


def test_an_interruption_waits_until_rows_are_on_disk(tmp_path, monkeypatch, request):
    sync = os.fsync

    def interrupt(descriptor):
        signal.raise_signal(signal.SIGINT)
        sync(descriptor)

    answers = AnswerFile(tmp_path / "out.jsonl")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            answers.append([{"id": "a", "finish_reason": "stop"}, {"id": "b", "finish_reason": "stop"}])
    assert list(answers.finish_reasons) == names(answers.path) == ["a", "b"]
    answers.arrange(["b", "a"])
    assert list(answers.finish_reasons) == names(answers.path) == ["b", "a"]
    with pytest.raises(ValueError, match="another run is writing"):  # the new file is locked too
        AnswerFile(answers.path)
    answers.append([{"id": "c", "finish_reason": "stop"}])
    answers.drop_torn_line()
    answers.close()
    assert names(answers.path) == ["b", "a", "c"]


# several processes


@pytest.fixture
def configure(write_rows, tmp_path):
    prompts = write_rows(*create_prompts(20), name="prompts.jsonl")

    def create(**changes):
        options = {"target": "small", "prompts": prompts, "out": tmp_path / "out.jsonl", "max_new_tokens": 8}
        return DistillConfig(**options | {"batch_size": 3, "temperature": 1.0} | changes)

    return create


@pytest.mark.timeout(200)
def test_two_launched_processes_write_what_one_writes(saved_target, configure, tmp_path):
    one = configure(target=str(saved_target), out=tmp_path / "one.jsonl", dtype="float32", device="cpu")
    distill(one)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    launcher += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "-m"]
    options = ["--target", saved_target, "--prompts", one.prompts, "--out", tmp_path / "two.jsonl", "--device", "cpu"]
    options += ["--max-new-tokens", 8, "--batch-size", 3, "--temperature", 1, "--dtype", "float32"]
    command = [*launcher, "data.distill", *map(str, options)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"answers (\d+) .* new (\d+) ", done.stdout) == [("20", "20")]  # one process speaks, of both
    assert (tmp_path / "two.jsonl").read_bytes() == one.out.read_bytes()
    assert find_parts(tmp_path / "two.jsonl") == []
    assert json.loads(meta_path(tmp_path / "two.jsonl").read_text())["runs"][0]["processes"] == 2


def share_of(index, count, config, target, monkeypatch):
    """Answer one process's share and stop where it would wait for the others."""
    waits = []

    def add_up(self, *numbers):
        waits.append(numbers)
        if numbers:
            raise ValueError("killed")
        return []

    with monkeypatch.context() as patch:
        patch.setattr(Processes, "add_up", add_up)
        with pytest.raises(ValueError, match="killed"):
            distill(config, target, Processes(index, count))


@pytest.mark.parametrize("count", [1, 2])
def test_another_number_of_processes_goes_on(configure, small_target, tmp_path, monkeypatch, count):
    whole = configure(out=tmp_path / "whole.jsonl")
    distill(whole, small_target)
    for index in range(2):  # the third was killed before its first batch was done
        share_of(index, 3, configure(), small_target, monkeypatch)
    parts = find_parts(configure().out)
    assert [part.name for part in parts] == ["out.jsonl.part-0-of-3", "out.jsonl.part-1-of-3"]
    came = sorted(name for part in parts for name in names(part))
    with parts[1].open("ab") as file:
        file.write(b'{"id": "p1", "mess')  # torn by the kill
    if count == 2:
        share_of(0, 2, configure(), small_target, monkeypatch)
        share_of(1, 2, configure(), small_target, monkeypatch)
        assert sorted(names(configure().out)) == came
    assert distill(configure(), small_target).new_answers == (20 - len(came) if count == 1 else 0)
    assert configure().out.read_bytes() == whole.out.read_bytes()
    assert find_parts(configure().out) == []


def test_a_kill_after_a_part_is_taken_over_and_before_it_is_deleted_doubles_nothing(
    configure, small_target, tmp_path, monkeypatch
):
    share_of(0, 2, configure(), small_target, monkeypatch)
    (part,) = find_parts(configure().out)
    content = part.read_bytes()
    distill(configure(), small_target)
    whole = configure().out.read_bytes()
    part.write_bytes(content)
    assert distill(configure(), small_target).new_answers == 0
    assert configure().out.read_bytes() == whole
    assert not part.exists()


def test_parts_of_other_settings_or_in_use_are_refused(configure, small_target, monkeypatch):
    share_of(0, 2, configure(), small_target, monkeypatch)
    with pytest.raises(ValueError, match=r"seed was 0, is 1; .* delete .*out.jsonl, .*part-0-of-2"):
        distill(configure(seed=1), small_target)
    answers = AnswerFile(find_parts(configure().out)[0])
    with pytest.raises(ValueError, match="part-0-of-2: another run is writing"):
        distill(configure(), small_target)
    answers.close()


def test_the_end_of_another_process_is_said(monkeypatch):
    def fail(total):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_reduce", fail)
    with pytest.raises(ValueError, match="another process of this run has ended"):
        Processes(0, 2).add_up(1)


def test_each_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [Processes(3, 4, 1).device(wanted) for wanted in (None, "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    assert Processes().device(None) is None


def test_redirects_are_not_followed(chat_server):
    chat_server.fault = lambda text, times: {"status": 302, "headers": {"Location": f"{chat_server.url}/models"}}
    server = Server(chat_server.url, key="secret", timeout=5, retries=0)
    with pytest.raises(ServerError, match=r"it has moved to .*/v1/models; ask there"):
        server.request("/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
