"""What the plan of a run says, what it refuses and the way out it names, and that it changes nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.state import AcceleratorState

from train import eagle, memory_plan, plan, run
from train.memory_plan import Memory, Work
from train.plan import Plan, make_plan

Launch = Callable[..., Path]
PARAMETERS = 2 * (16 * 16 + 16)
"""Of the two Medusa heads of `launch`."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that runs make."""
    made: list[Plan] = []

    def planned(*args: object) -> Plan:
        made.append(make_plan(*args))
        return made[-1]

    monkeypatch.setattr(run, "make_plan", planned)
    return made


def test_the_parts_of_a_known_case(launch: Launch, plans: list[Plan], target_folder: Path):
    launch("--optim.accumulation=2", "--run.keep=3", "--plan")
    (memory,), (disk,) = plans[0].memory, plans[0].disk
    work = plans[0].work
    assert memory.parts["head"] == memory.parts["gradients"] == 4 * PARAMETERS
    assert memory.parts["optimiser"] == 8 * PARAMETERS
    assert memory.parts["target"] == 4 * (320 * 16 * 3 + 16 * 16 * 4 + 3 * 16 * 32 + 3 * 16)  # lm_head plain and packed
    assert memory.parts["kept states"] == sum(len(sample.token_ids) for sample in work.samples) * 16 * 4
    assert sum(memory.parts.values()) == memory.total
    assert work.micro_batch == 2
    longest = max(len(sample.token_ids) for sample in work.samples)
    assert max(len(sample.token_ids) for sample in work.largest[0]) == longest
    logits = 3 * 64 * 64 * 2 * 4  # three times [n, K, U]; n is at least what is supervised in one conversation
    assert memory.parts["batch and activations"] > logits * 0.3
    assert disk.needed == 4 * PARAMETERS * (3 * 4 + 3)


def test_memory_kept_is_bounded_by_what_is_allowed_and_by_what_is_seen(launch: Launch, plans: list[Plan]):
    launch("--data.feature_memory=0.000001", "--plan")
    launch("--optim.steps=1", "--plan")
    few, seen = (made.memory[0].parts["kept states"] for made in plans)
    assert few == int(0.000001 * 2**30)
    samples = plans[1].work.samples
    assert few < seen < sum(len(sample.token_ids) for sample in samples) * 64


def test_where_the_states_of_a_micro_batch_are_counted(launch: Launch, plans: list[Plan], tmp_path: Path):
    launch("--data.feature_memory=0", "--plan")
    launch("--plan")
    launch(f"--data.feature_dir={tmp_path / 'features'}", "--plan")
    computed, kept, read = (made.work for made in plans)
    padded, own = memory_plan.padded_bytes(kept), memory_plan.own_bytes(kept)
    assert 0 < own <= padded
    for on_cpu in (True, False):
        assert memory_plan.batch_bytes(computed, on_cpu=on_cpu) == padded + own
        assert memory_plan.batch_bytes(kept, on_cpu=on_cpu) == padded
    assert memory_plan.batch_bytes(read, on_cpu=True) == padded + own
    assert memory_plan.batch_bytes(read, on_cpu=False) == padded  # its own are in the host's memory


@pytest.mark.parametrize("options", [("--data.feature_memory=4",), ("--head.type=hydra", "--head.prefix_layer=true")])
def test_a_plan_alone_prints_memory_disk_and_time_and_leaves_nothing(
    launch: Launch, capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path, options: tuple[str, ...]
):
    before = sorted(tmp_path.rglob("*"))
    folder = launch("--plan", *options, f"--data.feature_dir={tmp_path / 'features'}")
    output = capsys.readouterr().out
    assert len(re.findall("^plan: ", output, flags=re.MULTILINE)) == 5
    assert re.search(r"^peak: memory [\d.]+ .iB$", output, flags=re.MULTILINE)
    assert re.search(r"plan: memory: [\d.]+ .iB at most, [\d.]+ GiB there \(process .*", output)
    assert re.search(r"plan: disk: 0.\d\d MiB of features in .*features, ", output)
    assert re.search(r"plan: [\d,]+ tokens per second, [\d,]+ where .* are kept; about \d\d:\d\d for 8 steps", output)
    assert not folder.exists()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_of_a_run_that_was_started_counts_what_is_left_and_changes_nothing(
    launch: Launch, capsys: pytest.CaptureFixture[str]
):
    folder = launch("--optim.schedule=constant", "--optim.steps=3")
    assert re.search(r"tokens per second.*\n(.*\n)*.*is finished", capsys.readouterr().out)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    launch("--optim.schedule=constant", "--optim.steps=5", "--plan")
    assert "plan: 2 steps of 4" in capsys.readouterr().out
    launch("--optim.schedule=constant", "--optim.steps=3", "--plan")
    assert "was finished before" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds a run with another config"):
        launch("--optim.lr=1", "--plan")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_with_a_plan_is_bit_for_bit_one_without(
    config_file: Path, fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch
):
    def launch(name: str) -> bytes:
        config = yaml.safe_load(config_file.read_text())
        config["head"] = {"type": "eagle"}  # which draws random numbers in every step
        path = config_file.with_name("eagle.yaml")
        path.write_text(yaml.safe_dump(config))
        AcceleratorState._reset_state(True)
        eagle.main(["--config", str(path), f"--run.name={name}", "--optim.steps=3"])
        return (config_file.parent / "runs" / name / "last" / "model.safetensors").read_bytes()

    def unplanned(accelerator, config, target, head, inputs, steps, build_head, say) -> Plan:
        common = {"config": config, "target": target, "head": head, "samples": inputs.samples, "steps": steps}
        return Plan(Work(**common, processes=1, dtype=target.dtype, target_pass=0), [], [], 0)

    planned = launch("planned")
    monkeypatch.setattr(run, "make_plan", unplanned)
    assert launch("unplanned") == planned


def test_each_way_out_of_too_little_memory_is_one(
    launch: Launch, plans: list[Plan], monkeypatch: pytest.MonkeyPatch, config_file: Path
):
    options = ("--optim.batch_size=8", "--head.chunk_size=64", "--eval.num_prompts=0")
    launch("--plan", *options)
    free = plans[0].memory[0].added - 2000
    monkeypatch.setattr(memory_plan, "free_memory", lambda: free)
    with pytest.raises(SystemExit, match=r"1\.95 KiB|0\.00 MiB too little") as refused:
        launch(*options)
    ways = re.findall(r"\n  (--\S+): ", str(refused.value))
    assert {way.partition("=")[0] for way in ways} >= {
        *("--optim.accumulation", "--data.feature_memory", "--data.feature_dir", "--head.chunk_size")
    }
    for number, way in enumerate(ways):
        if "target." not in way:  # whose process would hold less to begin with
            launch("--plan", *options, way, f"--run.name=way-{number}")
            assert plans[-1].memory[0].added <= free


def test_where_no_single_change_is_enough_several_are_named_or_none(
    launch: Launch, plans: list[Plan], monkeypatch: pytest.MonkeyPatch
):
    options = ("--optim.batch_size=8", "--head.chunk_size=64")
    together = ("--data.feature_memory=0", "--optim.accumulation=8", "--head.chunk_size=32")
    launch("--plan", *options)
    launch("--plan", *options, *together)
    free = plans[1].memory[0].added
    assert free < plans[0].memory[0].added * 0.6
    monkeypatch.setattr(memory_plan, "free_memory", lambda: free)
    with pytest.raises(SystemExit, match=r"No single change is enough; together these are:\n  --data\.feature_memory"):
        launch(*options)
    monkeypatch.setattr(memory_plan, "free_memory", lambda: 10)
    with pytest.raises(SystemExit, match=r"No setting makes it fit \(tried --.*take a smaller target or more memory"):
        launch(*options)


def test_a_target_that_does_not_fit_is_not_loaded(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    count = 320 * 16 * 2 + 16 * 16 * 4 + 3 * 16 * 32 + 3 * 16
    monkeypatch.setattr(plan, "free_memory", lambda: 8 * count - 1)
    with pytest.raises(SystemExit, match=rf"has {count:,} weights.*in float32.*--target\.dtype=bfloat16 would fit"):
        launch("--plan")
    monkeypatch.setattr(plan, "free_memory", lambda: 8 * count)
    launch("--plan")
    monkeypatch.setattr(plan, "free_memory", lambda: count)
    with pytest.raises(SystemExit, match="there: take a smaller target"):
        launch("--plan")


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(plan, "disk_of", lambda path: (1, 20_000))
    with pytest.raises(SystemExit, match=r"MiB of checkpoints .* do not fit on the disk of .* lower run\.keep"):
        launch()
    folder = tmp_path / "features"
    monkeypatch.setattr(plan, "disk_of", lambda path: (1, 25_000))
    with pytest.raises(SystemExit, match=r"checkpoints .* and 0\.\d+ MiB of features .*; choose a data\.feature_dir"):
        launch("--run.keep=1", f"--data.feature_dir={folder}")
    assert not folder.exists()


def test_bytes_of_a_gpu_and_of_the_host_are_told_apart():
    full = Memory("GPU memory", {"target": 3 * 2**30, "head": 2**20}, held=2**30, free=2**30)
    assert full.total == 3 * 2**30 + 2**20
    assert full.excess == 2**30 + 2**20
    assert Memory("memory", {"process": 5}, held=1, free=None).excess == 0
    assert full.describe().startswith("GPU memory: 3.00 GiB at most, 2.00 GiB there (target 3.00 GiB + head 1.00 MiB)")
