"""Runs on several processes and runs that are killed: every kind of launch makes the steps of one process."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decode import Target, generate

Read = Callable[[Path], list[dict[str, float]]]
Run = Callable[..., Path]
AGAIN = {"eagle": ("--head.activation_checkpointing=true",)}
"""What may change when a run goes on."""
LAUNCHES = ("cpu_2", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
FIRST, ALL = "--optim.steps=3", "--optim.steps=5"
EVALUATED = ("--eval.num_prompts=2", "--eval.temperatures=[0]", "--eval.max_new_tokens=6")


@pytest.mark.long
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_processes_continue_to_the_bits_of_an_uninterrupted_run(run_all, job, read_metrics: Read, launch: str):
    whole = job("whole", "medusa", ALL, launch=launch)
    parts = [job("cut", "medusa", steps, launch=launch) for steps in (FIRST, ALL)]
    run_all([whole, *parts])
    folders = [Path(part["folder"]) for part in (whole, parts[1])]
    assert read_metrics(folders[0]) == read_metrics(folders[1])
    weights = [(folder / "last" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


@pytest.mark.long
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_plan_alone_makes_its_steps_as_launched_and_leaves_nothing(run_all, job, launch: str):
    only = job("only", "medusa", ALL, "--plan", launch=launch)
    assert run_all([only]) == [[[0, 0]]]
    assert not Path(only["folder"]).exists()


def assert_same_curve(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def assert_decodes(folder: Path, kind: str, target_folder: Path) -> None:
    target = Target.from_pretrained(str(target_folder), dtype="float32", device="cpu")
    drafts = {"draft_model" if kind == "draft_model" else "head": folder / "last"}
    prompt = list(range(40, 60))
    drafted = generate(target, prompt, max_new_tokens=12, **drafts)
    assert drafted.token_ids == generate(target, prompt, max_new_tokens=12).token_ids
    assert sum(drafted.stats.offered) > 0


@pytest.mark.parametrize(
    ("head", "launches"),
    [
        ("medusa", ("cpu_2", "fsdp2", "zero2")),
        ("eagle", ("fsdp2", "zero2")),
        pytest.param("medusa", LAUNCHES, marks=pytest.mark.long),
        pytest.param("eagle", LAUNCHES, marks=pytest.mark.long),
        pytest.param("hydra", LAUNCHES, marks=pytest.mark.long),
        pytest.param("eagle-1", LAUNCHES, marks=pytest.mark.long),
        pytest.param("draft_model", LAUNCHES, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}",
)
def test_two_processes_train_stop_and_continue_as_one_process_and_their_heads_decode(
    run_all, job, read_metrics: Read, target_folder: Path, head: str, launches: Sequence[str]
):
    whole = job("whole", head, ALL, *EVALUATED)
    further = (ALL, *AGAIN.get(head, ()))
    parts = [job(name, head, *steps, *EVALUATED, launch=name) for name in launches for steps in ([FIRST], further)]
    codes = run_all([whole, *parts])
    assert codes == [[[0]], *([[[0, 0]]] * len(parts))]
    expected = read_metrics(Path(whole["folder"]))
    assert [line["step"] for line in expected if "train/loss" in line] == [1, 2, 3, 4, 5]
    weights = load_file(Path(whole["folder"]) / "last" / "model.safetensors")
    for part in parts[1::2]:
        folder = Path(part["folder"])
        assert (folder / "checkpoints" / "step_000003" / "random_states_1.pkl").exists()  # there were two
        # a run that ends at step 3 is evaluated there
        assert_same_curve([line for line in read_metrics(folder) if not is_evaluation(line, 3)], expected)
        found = load_file(folder / "last" / "model.safetensors")
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
        assert_decodes(folder, head, target_folder)


def is_evaluation(line: dict[str, float], step: int) -> bool:
    return line["step"] == step and "eval/mismatches" in line


@pytest.mark.long
def test_fsdp2_goes_on_with_another_number_of_processes(run_all, job, read_metrics: Read):
    whole = job("whole", "medusa", ALL)
    sizes = {"grown": (1, 2), "shrunk": (2, 1)}
    parts = [
        job(name, "medusa", steps, launch="fsdp2") | {"processes": processes}
        for name, pair in sizes.items()
        for steps, processes in zip((FIRST, ALL), pair, strict=True)
    ]
    assert run_all([whole, *parts]) == [[[0]], [[0]], [[0, 0]], [[0, 0]], [[0]]]
    for part in parts[1::2]:
        assert_same_curve(read_metrics(Path(part["folder"])), read_metrics(Path(whole["folder"])))


def test_a_run_goes_on_with_another_number_of_processes(run_all, job, read_metrics: Read):
    whole = job("whole", "medusa", ALL)
    grown = [job("grown", "medusa", FIRST), job("grown", "medusa", ALL, launch="cpu_2")]
    shrunk = [job("shrunk", "medusa", FIRST, launch="cpu_2"), job("shrunk", "medusa", ALL)]
    run_all([whole, *grown, *shrunk])
    for part in (grown[1], shrunk[1]):
        assert_same_curve(read_metrics(Path(part["folder"])), read_metrics(Path(whole["folder"])))
    saved = Path(grown[1]["folder"]) / "checkpoints"
    assert not (saved / "step_000003" / "random_states_1.pkl").exists()
    assert (saved / "step_000005" / "random_states_1.pkl").exists()


def kills(number: int) -> list[int]:
    """Three SIGKILLs to one SIGTERM."""
    return [signal.SIGTERM if n % 4 == 3 else signal.SIGKILL for n in range(number)]


@pytest.mark.parametrize("launch", [None, pytest.param("cpu_2", marks=pytest.mark.long)])
def test_a_run_killed_at_random_moments_ends_in_the_bits_of_an_uninterrupted_one(
    run_all, job, read_metrics: Read, launch: str | None
):
    often = ("--optim.steps=200", "--run.save_every=1")
    whole = job("whole", "medusa", *often, launch=launch)
    cut = job("cut", "medusa", *often, launch=launch, signals=kills(20))
    codes = run_all([whole, cut])[1]
    ends = [0 if sent == signal.SIGTERM else -sent for sent in cut["signals"]]
    assert codes == [[end] * cut["processes"] for end in [*ends, 0]]  # none came after the run's end
    folders = [Path(part["folder"]) for part in (whole, cut)]
    assert read_metrics(folders[1]) == read_metrics(folders[0])
    for name in ("last/model.safetensors", "checkpoints/step_000200/model.safetensors"):
        assert (folders[1] / name).read_bytes() == (folders[0] / name).read_bytes()
