"""`everything.py`: parts with limits, a report that is never lost, and commands that their programs take."""

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import everything
import gpu_process
import psutil
import pytest
from everything import Runner, choose
from gpu_parts import FULL, SMALL, Part, Place, parts
from gpu_report import Results
from gpu_sections import Found, training

import data.distill
import decode.bench
import decode.prove
import decode.tune
from train import eagle, medusa
from train.command_line import load_config

FACTS = {"commit": "abc", "size": "full"}
SCRIPT = Path(everything.__file__)


def python(code: str) -> tuple[str, ...]:
    return ("-c", textwrap.dedent(code))


def run(tmp_path: Path, *wanted: Part, seconds: float = float("inf"), jobs: int = 2) -> str:
    results = Results(tmp_path / "out", tmp_path / "scratch", wanted, FACTS, everything.ROOT)
    Runner(results, jobs, {}, time.monotonic() + seconds).run(wanted)
    return (tmp_path / "out" / "report.md").read_text()


def outcomes(tmp_path: Path) -> dict[str, str]:
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    return {part["name"]: part["status"].partition(":")[0] for part in found["parts"]}


def test_a_part_that_fails_is_shown_with_its_log_and_the_others_go_on(tmp_path):
    broken = python("""
        import sys
        print("so far so good")
        sys.exit("no room on the device")
    """)
    report = run(
        tmp_path,
        Part("first", "tests", python("print('4 passed in 1 s')"), 1),
        Part("broken", "bench", broken, 1),
        Part("waiting", "bench", python("print('never')"), 1, needs=("broken",)),
        Part("last", "costs", python("print('## Cost of a target pass\\n\\n| 7.25 ms |')"), 1),
    )
    assert outcomes(tmp_path) == {"first": "done", "broken": "failed", "waiting": "not run", "last": "done"}
    assert "| waiting | not run: it needs broken | 0 |" in report
    assert "### broken: failed" in report
    assert "so far so good" in report
    assert "no room on the device" in report
    assert "### Tests" in report
    assert "4 passed in 1 s" in report
    assert "| 7.25 ms |" in report
    with zipfile.ZipFile(tmp_path / "out" / "raw.zip") as packed:
        assert "no room on the device" in packed.read("logs/broken.err").decode()


def test_a_time_limit_ends_all_processes_of_a_part_whatever_they_do_about_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_process, "GRACE", 0.5)
    code = python("""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        children = [subprocess.Popen(sleeper, start_new_session=new) for new in (False, True)]
        pathlib.Path(sys.argv[1]).write_text(" ".join(str(child.pid) for child in children))
        print("measured 42", flush=True)
        time.sleep(600)
    """)
    numbers = tmp_path / "numbers"
    started = time.monotonic()
    monkeypatch.setattr(Part, "limit", 4.0)
    report = run(tmp_path, Part("endless", "costs", (*code, str(numbers)), 1))
    assert time.monotonic() - started < 60
    assert outcomes(tmp_path) == {"endless": "out of time"}
    assert "measured 42" in report
    for number in map(int, numbers.read_text().split()):
        assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_a_part_leaves_behind_is_ended_too(tmp_path):
    code = python("""
        import pathlib, subprocess, sys
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        pathlib.Path(sys.argv[1]).write_text(str(left.pid))
    """)
    run(tmp_path, Part("leaving", "tests", (*code, str(tmp_path / "number")), 1))
    assert outcomes(tmp_path) == {"leaving": "done"}
    number = int((tmp_path / "number").read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_budget_drops_what_takes_longer_than_is_left_and_cuts_what_it_can(tmp_path):
    wanted = [
        Part("important", "tests", python("print('ok')"), 1),
        Part("long", "bench", python("print('ok')"), 500),
        Part("sleepy", "costs", python("import time; time.sleep(600)"), 2),
        Part("late", "bench", python("print('ok')"), 1),
    ]
    report = run(tmp_path, *wanted, seconds=8, jobs=1)
    assert outcomes(tmp_path) == {"important": "done", "long": "dropped", "sleepy": "out of time", "late": "dropped"}
    assert "s were left, it takes about 500" in report


def test_what_measures_time_runs_alone_and_the_rest_side_by_side(tmp_path):
    file = tmp_path / "times"
    code = python("""
        import pathlib, sys, time
        start = time.time()
        time.sleep(1.5)
        with open(sys.argv[1], "a") as file:
            print(sys.argv[2], start, time.time(), file=file)
    """)
    wanted = [
        Part(name, "tests", (*code, str(file), name), 1, needs, name == "c")
        for name, needs in (("a", ()), ("b", ()), ("c", ()), ("d", ()), ("e", ("d",)))
    ]
    run(tmp_path, *wanted, jobs=4)
    times = {name: (float(start), float(end)) for name, start, end in map(str.split, file.read_text().splitlines())}
    assert times["b"][0] < times["a"][1]
    assert max(times["a"][1], times["b"][1]) <= times["c"][0]
    assert times["c"][1] <= times["d"][0]
    assert times["d"][1] <= times["e"][0]


def test_a_second_call_with_the_same_scratch_runs_only_what_is_not_done(tmp_path):
    count = python("import sys; open(sys.argv[1], 'a').write('x')")
    good = Part("good", "tests", (*count, str(tmp_path / "good")), 1)
    bad = Part("bad", "tests", python("raise SystemExit(3)"), 1)
    run(tmp_path, good, bad)
    report = run(tmp_path, good, bad)
    assert (tmp_path / "good").read_text() == "x"
    assert outcomes(tmp_path) == {"good": "done", "bad": "failed"}
    assert "| bad | failed |" in report
    run(tmp_path, Part("good", "tests", (*count, str(tmp_path / "good"), "other"), 1))
    assert (tmp_path / "good").read_text() == "xx"


def test_a_result_of_an_earlier_try_is_not_taken_for_this_one_s(tmp_path):
    stale = tmp_path / "scratch" / "prove.json"
    stale.parent.mkdir()
    stale.write_text('{"machine": {"dtype": "float32"}, "drafts": "d", "checks": []}')
    run(tmp_path, Part("prove", "exactness", python("raise SystemExit(1)"), 1, keeps=(stale,)))
    assert not stale.exists()


def test_a_log_that_cannot_be_read_costs_its_section_only(tmp_path):
    file = tmp_path / "scratch" / "prove.json"
    cut = python("import sys; open(sys.argv[1], 'w').write('{\"checks\": [')")
    wanted = [
        Part("prove", "exactness", (*cut, str(file)), 1, keeps=(file,)),
        Part("t", "tests", python("print(7)"), 1),
    ]
    report = run(tmp_path, *wanted)
    assert "What was found could not be read (JSONDecodeError" in report
    assert report.index("### Tests") > report.index("could not be read")


def test_memory_on_a_gpu_is_shown_beside_what_was_predicted(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "plan: GPU memory: 3.50 GiB at most, 130.00 GiB there (target 2.30 GiB)\n"
        "plan: memory: 900.00 MiB at most, 100.00 GiB there (process 850.00 MiB)\n"
        "peak: GPU memory 3.25 GiB, memory 1.50 GiB\n"
    )
    lines = training([Found("train eagle3", log, ())])
    assert lines[2:4] == [
        "| train eagle3 | GPU memory | 3.50 GiB | 3.25 GiB |",
        "| train eagle3 | memory | 900.00 MiB | 1.50 GiB |",
    ]


def test_ctrl_c_ends_the_parts_and_keeps_the_report(tmp_path):
    script = python(f"""
        import sys, threading
        sys.path.insert(0, {str(SCRIPT.parent)!r})
        import everything
        from gpu_parts import Part
        sleeper = Part("sleeper", "tests", ("-c", "import time; print(1, flush=True); time.sleep(600)"), 1)
        everything.parts = lambda *unused: [Part("quick", "tests", ("-c", "print(5)"), 1, alone=True), sleeper]
        sys.exit(everything.main(["--small", "--out", sys.argv[1], "--scratch", sys.argv[2]]))
    """)
    command = [sys.executable, *script, str(tmp_path / "out"), str(tmp_path / "scratch")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "scratch" / "logs" / "sleeper.out"
    for _ in range(600):
        if log.is_file() and log.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; what was found is in" in errors
    assert outcomes(tmp_path) == {"quick": "done", "sleeper": "stopped"}
    assert "| quick | done |" in (tmp_path / "out" / "report.md").read_text()


def test_stopping_starts_nothing_more(tmp_path):
    wanted = [Part("a", "tests", python("print(1)"), 1)]
    results = Results(tmp_path / "out", tmp_path / "scratch", wanted, FACTS, everything.ROOT)
    stop = threading.Event()
    stop.set()
    Runner(results, 1, {}, stop=stop).run(wanted)
    assert outcomes(tmp_path) == {"a": "stopped"}


@pytest.mark.parametrize("scale", [FULL, SMALL])
@pytest.mark.parametrize("smollm2", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_every_command_is_one_that_its_program_takes(monkeypatch, tmp_path, scale, smollm2, trained):
    monkeypatch.chdir(everything.ROOT)
    prompts = (Path("data/prompts/held_out.jsonl"), Path("data/prompts/repeat.jsonl"))
    place = Place(tmp_path)
    if smollm2:
        head = tmp_path / "head" if trained else None
        place = Place(tmp_path, Path("models/s"), None if trained else Path("a.jsonl"), head, prompts)
    every = parts(scale, place)
    names = [part.name for part in every]
    assert len(set(names)) == len(names)
    parsers = {"data.distill": data.distill.create_parser, "decode.tune": decode.tune.parser}
    parsers |= {"decode.prove": decode.prove.parser, "decode.bench": decode.bench.parser}
    for number, part in enumerate(every):
        assert set(part.needs) <= set(names[:number]), part
        match part.command:
            case ("-m", "pytest", *_):
                continue
            case ("-m", module, *words):
                parsers[module]().parse_args(words)
            case (str(script), *words) if script.startswith("train/"):
                trainer = {"train/medusa.py": medusa, "train/eagle.py": eagle}[script]
                load_config(trainer.HEADS, [word for word in words if word not in ("--plan", "--throughput")], "")
            case (script, *_):
                assert (everything.ROOT / script).is_file()


def test_parts_are_chosen_with_what_they_need():
    every = parts(FULL, Place(Path("/s")))
    names = [part.name for part in choose(every, ["costs random p"])]
    assert names == ["machine", "target", "answers", "train medusa", "costs random plain"]
    with pytest.raises(ValueError, match="no part is called nothing; there are machine, target, "):
        choose(every, ["nothing"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--small", "--smollm2", "."], "--small is without SmolLM2"),
        (["--small", "--head", "."], "--data and --head are SmolLM2's"),
        (["--smollm2", ".", "--head", ".", "--data", "."], "give one of them"),
        (["--smollm2", "nowhere"], "nowhere is not there"),
        (["--small", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--small", "--parts", "none"], "no part is called none"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, capsys, options, message):
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert everything.main(["--out", str(tmp_path / "out"), *options]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
