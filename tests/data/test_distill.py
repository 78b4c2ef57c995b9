"""Distillation answers every prompt once, however often it is killed, and finds mistakes before it loads the model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from data.answers import AnswerFile, meta_path
from data.conversations import encode_conversation, load_conversations
from data.distill import DistillConfig, distill, main
from decode import Sampling, generate

QUESTIONS = [
    "What is a tree?",
    "Write a haiku about rain.",
    "3 + 4?",
    "a",
    "def add(a, b):\n    return",
    "Rain on the old roof",
]


def create_prompt(index):
    content = QUESTIONS[index % len(QUESTIONS)] * (1 + index % 3)
    return {"id": f"p{index}", "source": "tests", "messages": [{"role": "user", "content": content}]}


@pytest.fixture
def prompts(write_rows):
    return write_rows(*map(create_prompt, range(11)), name="prompts.jsonl")


@pytest.fixture
def configure(prompts, tmp_path):
    def create(**changes):
        options = {"target": "small", "prompts": prompts, "out": tmp_path / "out.jsonl", "max_new_tokens": 12}
        return DistillConfig(**options | {"batch_size": 4, "temperature": 0.8, "top_p": 0.95} | changes)

    return create


def load_rows(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


# rows


def test_every_prompt_is_answered_with_what_the_target_says(configure, small_target):
    config = configure(temperature=0.0)
    summary = distill(config, small_target)
    rows = load_rows(config.out)
    assert sorted(rows) == sorted(f"p{index}" for index in range(11))
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}
    tokens = 0
    for prompt in map(create_prompt, range(11)):
        alone = generate(small_target, prompt["messages"], sampling=Sampling(), max_new_tokens=12)
        row = rows[prompt["id"]]
        answer = {"role": "assistant", "content": alone.text.rstrip("\ufffd")}
        reason = {"eos": "stop", "length": "length"}[alone.finish_reason]
        assert row == prompt | {"messages": [*prompt["messages"], answer], "finish_reason": reason}
        tokens += len(alone.token_ids)
    assert (summary.new_answers, summary.new_tokens) == (11, tokens)
    assert f"answers 11 ({summary.finish_reasons['length']} length, " in str(summary)


def test_answers_load_and_supervise_ends_only_where_the_target_ended(configure, small_target):
    config = configure()
    distill(config, small_target)
    eos = small_target.tokenizer.eos_token_id
    for conversation in load_conversations(config.out):
        encoded = encode_conversation(conversation, small_target.tokenizer, max_length=192)
        last = encoded.token_ids[encoded.loss_mask.index(True) :] if any(encoded.loss_mask) else []
        supervised = [token_id for token_id, is_on in zip(encoded.token_ids, encoded.loss_mask, strict=True) if is_on]
        assert supervised == last[: len(supervised)]
        assert (eos in supervised) == (conversation.finish_reason == "stop")


@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_sampled_rows_do_not_depend_on_batch_size(configure, small_target, tmp_path, batch_size):
    config, other = configure(), configure(batch_size=batch_size, out=tmp_path / "other.jsonl")
    distill(config, small_target)
    distill(other, small_target)
    assert load_rows(config.out) == load_rows(other.out)


def test_seeds_change_sampled_rows_and_prompts_have_their_own_noise(configure, small_target, write_rows, tmp_path):
    twins = write_rows(create_prompt(0), create_prompt(0) | {"id": "twin"}, name="twins.jsonl")
    texts = set()
    for seed in (0, 1):
        config = configure(prompts=twins, seed=seed, out=tmp_path / f"{seed}.jsonl")
        distill(config, small_target)
        texts |= {row["messages"][-1]["content"] for row in load_rows(config.out).values()}
    assert len(texts) == 4


# killed and continued


def test_resume_after_a_kill_anywhere_gives_the_same_rows(configure, small_target, tmp_path):
    whole = configure()
    distill(whole, small_target)
    expected, content = load_rows(whole.out), whole.out.read_bytes()
    lines = content.splitlines(keepends=True)
    ends = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    cuts = [*ends[::4], ends[1], ends[2] + 1, ends[5] - 1, len(content) - 1]
    for number, cut in enumerate(cuts):
        config = configure(out=tmp_path / f"cut{number}.jsonl")
        config.out.write_bytes(content[:cut])
        meta_path(config.out).write_bytes(meta_path(whole.out).read_bytes())
        summary = distill(config, small_target)
        assert load_rows(config.out) == expected
        complete = content[:cut].count(b"\n")
        assert summary.new_answers == len(lines) - complete
        assert config.out.read_bytes().startswith(b"".join(lines[:complete]))


def test_resume_continues_after_a_real_kill(saved_target, write_rows, tmp_path):
    prompts = write_rows(*map(create_prompt, range(400)), name="many.jsonl")
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "data.distill", "--target", saved_target, "--prompts", prompts, "--out", out]
    command = [str(part) for part in [*command, "--batch-size", 1, "--max-new-tokens", 8, "--limit", 400]]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = out.read_bytes()
    assert 3 <= before.count(b"\n") < 400
    command[command.index("--batch-size") + 1] = "64"
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(load_rows(out)) == sorted(f"p{index}" for index in range(400))
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert len(json.loads(meta_path(out).read_text())["runs"]) == 2


def test_finished_run_repeated_changes_no_row_and_a_higher_limit_goes_on(configure, small_target):
    distill(configure(limit=5), small_target)
    content = configure().out.read_bytes()
    assert content.count(b"\n") == 5
    assert distill(configure(limit=5), small_target).new_answers == 0
    assert configure().out.read_bytes() == content
    assert distill(configure(), small_target).new_answers == 6
    assert configure().out.read_bytes().startswith(content)


def test_provenance_says_how_rows_were_made(configure, small_target, prompts):
    config = configure()
    distill(config, small_target)
    meta = json.loads(meta_path(config.out).read_text())
    assert meta["settings"]["fingerprint"] == small_target.fingerprint
    assert meta["settings"]["prompts_sha256"] == subprocess.check_output(["sha256sum", prompts], text=True).split()[0]
    assert (meta["settings"]["temperature"], meta["settings"]["dtype"]) == (0.8, "float64")
    assert meta["runs"][0]["target"] == "small"
    assert set(meta["runs"][0]["versions"]) == {"python", "torch", "transformers", "gorgon"}
    assert meta["counts"]["prompts"] == 11
    assert sum(meta["counts"]["finish_reasons"].values()) == 11


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"temperature": 0.7}, "temperature was 0.8, is 0.7"),
        ({"top_p": 1.0}, "top_p was 0.95, is 1.0"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"max_new_tokens": 13}, "max_new_tokens was 12, is 13"),
    ],
)
def test_other_settings_are_refused_with_the_difference(configure, small_target, changes, difference):
    distill(configure(), small_target)
    content = configure().out.read_bytes()
    with pytest.raises(ValueError, match=f"other settings: {difference}; choose another output, or delete"):
        distill(configure(**changes), small_target)
    assert configure().out.read_bytes() == content


def test_other_prompts_and_other_weights_are_refused(configure, small_target, write_rows):
    distill(configure(), small_target)
    with pytest.raises(ValueError, match="prompts_sha256 was"):
        distill(configure(prompts=write_rows(create_prompt(0))), small_target)
    meta = json.loads(meta_path(configure().out).read_text())
    meta["settings"]["fingerprint"] = "another"
    meta_path(configure().out).write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="fingerprint was 'another', is"):
        distill(configure(), small_target)


# refused


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"id": "x"}'])
def test_corrupt_line_in_the_output_is_named(configure, small_target, line):
    distill(configure(), small_target)
    lines = configure().out.read_text().splitlines()
    lines[2] = line
    configure().out.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"out.jsonl:3: not an answer .*delete the line"):
        distill(configure(), small_target)


def test_answers_twice_or_of_unknown_making_are_refused(configure, small_target):
    distill(configure(), small_target)
    out = configure().out
    content = out.read_text()
    out.write_text(content + content.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"out.jsonl:12: second answer to 'p"):
        distill(configure(), small_target)
    out.write_text(content)
    meta_path(out).unlink()
    with pytest.raises(ValueError, match=r"meta.json does not say how they were made"):
        distill(configure(), small_target)


def test_output_of_a_running_distillation_is_refused(configure, small_target):
    answers = AnswerFile(configure().out)
    with pytest.raises(ValueError, match="another run is writing"):
        distill(configure(), small_target)
    answers.close()


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["{broken"], r"prompts2.jsonl:2: invalid JSON"),
        ([{"id": "e", "messages": [{"role": "user", "content": " \n"}]}], r"no question to answer: 1 prompts \(e\)"),
        ([{"id": "s", "messages": [{"role": "system", "content": "x"}]}], r"no question to answer: 1 prompts \(s\)"),
        (
            [{"id": "d", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}],
            r"already answered: 1 prompts \(d\)",
        ),
        (
            [{"id": n, "messages": [{"role": "user", "content": "tree " * 200}]} for n in ("l1", "l2")],
            r"longer than 180 tokens .*context of 192 less max_new_tokens=12.*2 prompts \(l1, l2\).*--skip-long",
        ),
    ],
)
def test_bad_prompts_are_named_before_anything_is_loaded_or_written(
    configure, saved_target, write_rows, rows, complaint
):
    (saved_target / "model.safetensors").unlink()
    path = write_rows(create_prompt(0), *rows, name="prompts2.jsonl")
    with pytest.raises(ValueError, match=complaint):
        distill(configure(prompts=path, target=str(saved_target)))
    assert not configure().out.exists()


def test_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(configure, saved_target, tmp_path):
    (saved_target / "model.safetensors").unlink()
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out.jsonl", tmp_path):
        with pytest.raises(ValueError, match="cannot be written"):
            distill(configure(target=str(saved_target), out=out))


def test_long_prompts_can_be_left_out(configure, small_target, write_rows):
    long = {"id": "long", "messages": [{"role": "user", "content": "tree " * 200}]}
    config = configure(prompts=write_rows(create_prompt(0), long), skip_long=True)
    distill(config, small_target)
    assert list(load_rows(config.out)) == ["p0"]
    assert json.loads(meta_path(config.out).read_text())["counts"]["too_long"] == 1


@pytest.mark.parametrize(
    "changes", [{"max_new_tokens": 0}, {"batch_size": 0}, {"limit": 0}, {"temperature": -1.0}, {"top_p": 0.0}]
)
def test_impossible_settings_are_refused(configure, changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        configure(**changes)


def test_command_line_prints_a_summary_or_the_error(saved_target, prompts, tmp_path, capsys):
    options = ["--target", str(saved_target), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")]
    main([*options, "--max-new-tokens", "4", "--dtype", "float32", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("answers 11 (")
    with pytest.raises(SystemExit, match="1"):
        main([*options, "--max-new-tokens", "5", "--dtype", "float32", "--device", "cpu"])
    assert "error: " in capsys.readouterr().err
