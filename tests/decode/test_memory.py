"""`python -m decode.memory`: every way decodes the same prompts in a process of its own."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from decode import Target, memory
from decode.memory import HEAD, LOOKUP, PLAIN, THEIRS, main, parser, peak, reset_peak, run_one

WAYS = [THEIRS, PLAIN, LOOKUP, HEAD]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def files(make_tiny_llama, tiny_tokenizer, bench_files, tmp_path_factory) -> SimpleNamespace:
    """A saved float32 target all of whose tokens end a text, a head for it, and prompts."""
    path = tmp_path_factory.mktemp("memory")
    model = make_tiny_llama(dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(320))
    model.save_pretrained(path / "target")
    tiny_tokenizer.save_pretrained(path / "target")
    bench_files.save_medusa(path / "head", Target.from_pretrained(str(path / "target"), device="cpu"))
    (path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "one two three"}\n')
    arguments = [path / "target", "--head", path / "head", "--device", "cpu", "--max-new-tokens", "7"]
    arguments = list(map(str, arguments))
    return SimpleNamespace(
        path=path, arguments=arguments, command=[*arguments, "--prompts", str(path / "prompts.jsonl")]
    )


@pytest.mark.parametrize("way", WAYS)
def test_each_way_decodes_all_prompts_to_the_last_token(files, monkeypatch, way):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(PROMPTS)))
    found = run_one(parser().parse_args([*files.arguments, "--one", way]))
    assert found["tokens"] == 2 * 7  # also where the model's own settings would end at once
    assert 0 < found["loaded"] <= found["peak"] + 1  # the system counts in batches


@pytest.mark.parametrize("way", WAYS)
def test_no_way_decodes_beyond_the_targets_context(files, monkeypatch, way):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([list(range(5, 255))])))
    arguments = [word if word != "7" else "20" for word in files.arguments]
    assert run_one(parser().parse_args([*arguments, "--one", way]))["tokens"] == 256 - 250


def test_an_interrupt_is_one_line(files, monkeypatch, capsys):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", stop)
    assert main(files.command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped; nothing is kept"


@pytest.mark.parametrize("way", [LOOKUP, HEAD])
def test_the_way_that_is_asked_for_decodes(files, monkeypatch, way):
    seen = []
    generate = memory.generate
    monkeypatch.setattr(memory, "generate", lambda *a, **options: seen.append(options) or generate(*a, **options))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(PROMPTS)))
    run_one(parser().parse_args([*files.arguments, "--one", way]))
    assert [(o["head"] is not None, o["proposer"] is not None) for o in seen] == [(way == HEAD, way == LOOKUP)] * 2


def test_the_peak_is_of_what_came_since_it_was_reset():
    device = torch.device("cpu")
    size = 64 << 20
    torch.ones(2 * size, dtype=torch.uint8)  # freed at once
    before = reset_peak(device)
    block = torch.ones(size, dtype=torch.uint8)
    during = peak(device)
    del block
    assert 60 < during - before < 80
    assert peak(device) >= during - 1


def faked(monkeypatch, *, failing: str | None = None) -> list[tuple[list[str], str]]:
    """Children that answer at once: each way's peak is 100 MiB more than the one's before."""
    calls: list[tuple[list[str], str]] = []

    def run(command, *, input, stdout, text, check):
        calls.append((command, input))
        way = command[command.index("--one") + 1]
        if way == failing:
            return SimpleNamespace(returncode=3, stdout="")
        found = {"loaded": 50.4, "peak": 100.0 * len(calls), "tokens": 14}
        return SimpleNamespace(returncode=0, stdout=f"a library's greeting\n{json.dumps(found)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_every_way_runs_in_its_own_process_on_the_same_prompts(files, tmp_path, monkeypatch, capsys):
    calls = faked(monkeypatch)
    out = tmp_path / "new" / "memory.json"
    assert main([*files.command, "--dtype", "float32", "--num", "1", "--out", str(out)]) == 0
    assert [command[:3] for command, _ in calls] == [[sys.executable, "-m", "decode.memory"]] * 4
    asked = [parser().parse_args(command[3:]) for command, _ in calls]
    assert [args.one for args in asked] == [THEIRS, PLAIN, LOOKUP, HEAD]
    for args in asked:
        assert (args.target, args.head) == (str(files.path / "target"), str(files.path / "head"))
        assert (args.dtype, args.device, args.max_new_tokens) == ("float32", "cpu", 7)
    assert len({prompts for _, prompts in calls}) == 1
    (prompt,) = json.loads(calls[0][1])
    assert all(isinstance(token, int) for token in prompt)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["way"], row["over transformers"], row["peak while decoding, MiB"]) for row in rows] == [
        *((THEIRS, "1.00", 100), (PLAIN, "2.00", 200), (LOOKUP, "3.00", 300), (HEAD, "4.00", 400))
    ]
    assert {(row["loaded, MiB"], row["new tokens"]) for row in rows} == {(50, 14)}
    printed = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in printed[0].split("|")[1:-1]] == list(rows[0])
    assert len(printed) == 2 + 4


def test_without_a_head_there_are_three_ways(files, monkeypatch, capsys):
    calls = faked(monkeypatch)
    target, *_ = files.arguments
    assert main([target, "--device", "cpu", "--prompts", str(files.path / "prompts.jsonl")]) == 0
    assert [parser().parse_args(command[3:]).one for command, _ in calls] == [THEIRS, PLAIN, LOOKUP]
    assert len(json.loads(calls[0][1])) == 2
    assert HEAD not in capsys.readouterr().out


def test_a_way_that_fails_ends_it(files, monkeypatch, capsys):
    calls = faked(monkeypatch, failing=LOOKUP)
    args = parser().parse_args(files.command)
    with pytest.raises(RuntimeError, match="prompt lookup failed with exit status 3"):
        memory.compare(args, PROMPTS)
    assert len(calls) == 3
    assert main(files.command) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "error: prompt lookup failed with exit status 3" in err


def test_a_table_that_cannot_be_written_is_printed(files, monkeypatch, capsys):
    faked(monkeypatch)
    assert main([*files.command, "--out", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert '"over transformers": "4.00"' in out
    assert "cannot write /dev/full" in err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--num", "0"], "at least 1 prompt"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--max-new-tokens", "-1"], "max_new_tokens must be at least 1"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "toaster"], "unknown device 'toaster'"),
        (["--head", "nowhere"], "nowhere is not a head folder"),
        (["--out", "/dev/null/memory.json"], "/dev/null"),
    ],
)
def test_bad_arguments_are_an_error_before_anything_runs(files, monkeypatch, capsys, extra, message):
    calls = faked(monkeypatch)
    assert main([*files.command, *extra]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert not calls
    assert message in next(line for line in err.splitlines() if line.startswith("error: "))


def test_prompts_and_a_target_must_be_given(files, monkeypatch, capsys):
    faked(monkeypatch)
    assert main(files.arguments) == 2
    assert "error: give --prompts, a JSONL file" in capsys.readouterr().err
    assert main(["nowhere", *files.command[1:]]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_real_processes_measure_themselves(files, tmp_path, capfd):
    out = tmp_path / "memory.json"
    assert main([*files.command, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == WAYS
    for row in rows:
        assert row["new tokens"] == 2 * 7
        assert 50 < row["loaded, MiB"] <= row["peak while decoding, MiB"]
        assert 0.3 < float(row["over transformers"]) < 3
    assert "peak while decoding, MiB" in capfd.readouterr().out
