"""A target spread over two processes: each holds half of its layers, and runs are bit for bit those on a whole one."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from decode import Drafting, Target, generate
from heads import load_head
from train import medusa
from train.command_line import load_config
from train.config import ConfigError
from train.frozen import load_target

SCRIPT, ROOT = Path(__file__).with_name("sharded.py"), Path(__file__).parents[2]
Read = Callable[[Path], list[dict[str, float]]]
EVALUATED = ("--eval.num_prompts=3", "--eval.max_new_tokens=6")
WIDE = "--target.dtype=float64"  # which is computed alike, packed or not
SHARD = "--target.shard=true"
FEW = "--data.feature_memory=0.00002"  # a third of the conversations: some processes have what others lack


def same_run(one: dict, other: dict, read_metrics: Read) -> None:
    folders = [Path(part["folder"]) for part in (one, other)]
    assert read_metrics(folders[0]) == read_metrics(folders[1])
    for name in ("last", "best"):
        weights = [(folder / name / "model.safetensors").read_bytes() for folder in folders]
        assert weights[0] == weights[1]


@pytest.mark.parametrize("trainer", [pytest.param("medusa", marks=pytest.mark.long), "eagle"])
def test_runs_are_those_on_a_whole_target_stopped_or_not(
    run_all, job, read_metrics: Read, target_folder: Path, tmp_path: Path, trainer: str
):
    common = (WIDE, *EVALUATED, "--run.eval_every=4")
    whole = job("whole", trainer, "--optim.steps=7", *common, launch="cpu_2")
    cut = [
        job("cut", trainer, f"--optim.steps={steps}", *common, SHARD, FEW, launch="cpu_2", timeout=60)
        for steps in (4, 7)
    ]
    stored = job(
        "stored", trainer, "--optim.steps=7", *common, SHARD, f"--data.feature_dir={tmp_path / 'f'}", launch="cpu_2"
    )
    assert run_all([whole, *cut, stored]) == [[[0, 0]]] * 4
    same_run(whole, cut[1], read_metrics)
    same_run(whole, stored, read_metrics)
    target = Target.from_pretrained(str(target_folder), dtype="float64", device="cpu")
    drafting = Drafting.of(load_head(Path(stored["folder"]) / "best", target))
    texts = [generate(target, list(range(40, 60)), proposer=p, max_new_tokens=12) for p in (None, drafting)]
    assert texts[0].token_ids == texts[1].token_ids
    assert load_file(Path(stored["folder"]) / "best" / "model.safetensors")


def test_a_run_stops_on_sigterm_and_goes_on(run_all, job, read_metrics: Read):
    often = (WIDE, "--optim.steps=16", "--run.eval_every=3", "--run.save_every=1", *EVALUATED, SHARD, FEW)
    whole = job("whole", "medusa", *often, launch="cpu_2")
    cut = job("cut", "medusa", *often, launch="cpu_2", signals=[signal.SIGTERM])
    codes = run_all([whole, cut])
    assert codes == [[[0, 0]], [[0, 0]] * 2]
    same_run(whole, cut, read_metrics)


@pytest.mark.long
def test_a_plan_alone_makes_its_steps_and_says_what_is_not_known(run_all, job):
    only = job("only", "medusa", "--optim.steps=4", "--plan", SHARD, launch="cpu_2")
    assert run_all([only]) == [[[0, 0]]]
    assert not Path(only["folder"]).exists()


@pytest.fixture(scope="module")
def found(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What two processes say of the target that they share."""
    folder = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(target_folder), str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
    assert done.returncode == 0, done.stdout.decode()[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_each_process_holds_its_part_of_the_layers_only(found: list[dict[str, object]]):
    layer = 4 * (16 * 16 * 4 + 3 * 16 * 32 + 2 * 16)
    ends = 4 * (320 * 16 * 2 + 16)
    for process in found:
        for moment in ("loaded", "after passes"):
            assert ends + layer // 2 <= process[moment] <= ends + layer // 2 + 64
        assert process["whole"] == ends + layer


def test_decoding_and_states_are_the_whole_targets_in_any_order(found: list[dict[str, object]]):
    for process in found:
        assert process["texts"] == [process["expected"]] * 2
        assert process["states"] == ["same", "same"]
        assert process["gradient"]
        assert process["fingerprint"]


def test_processes_that_lack_different_conversations_make_the_same_passes(found: list[dict[str, object]]):
    assert [process["passes online"] for process in found] == [4, 4]  # 0 and 1 lack one each of two, then all
    assert [process["passes to fill"] for process in found] == [3, 3]  # the first lacks three, the second one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SHARD, "--target.quantize=8bit"], "target.shard spreads layers as they are stored"),
        ([SHARD, "--target.device_map=auto"], "leave target.quantize and target.device_map out"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_the_config(config_file: Path, words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(medusa.HEADS, ["--config", str(config_file), *words], "")


@pytest.mark.parametrize(
    ("kind", "head", "message"),
    [
        (DistributedType.NO, "medusa", "this is NO with medusa; launch several processes with DDP"),
        (DistributedType.FSDP, "medusa", "this is FSDP with medusa"),
        (DistributedType.MULTI_CPU, "medusa2", "with medusa2; launch several processes with DDP for another head"),
    ],
)
def test_launches_that_cannot_share_a_target_are_refused(config_file: Path, kind: DistributedType, head: str, message):
    text = re.sub(r"^head: .*?(?=^\w)", "", config_file.read_text(), flags=re.M | re.S)
    config_file.write_text(text)
    config = load_config(medusa.HEADS, ["--config", str(config_file), SHARD, f"--head.type={head}"], "")
    with pytest.raises(ConfigError, match=message):
        load_target(config, SimpleNamespace(num_processes=2, distributed_type=kind))
