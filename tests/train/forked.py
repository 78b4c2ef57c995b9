"""Runs trainers in processes that share one import of torch: python forked.py JOBS.json, a list of `Job`s.

They are forked before anything was computed, with the environment that `accelerate launch --config_file` gives them.
"""

import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from train import journal

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """One run of `train/<trainer>.py <arguments>`, from its start, or where it is, to its end."""

    trainer: str
    arguments: list[str]
    folder: str
    """Of the run."""
    launch: str | None = None
    """Name of a file in configs/accelerate, None for `python train/...` itself."""
    processes: int = 1
    signals: list[int] = field(default_factory=list)
    """Sent at random moments, each to a new start of the run."""
    timeout: float = 100


def launch_environment(launch: str, processes: int) -> dict[str, str]:
    """Return what `accelerate launch` sets for the processes that it starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--config_file", str(ROOT / "configs" / "accelerate" / f"{launch}.yaml"), "train.py"]
    parsed = launch_command_parser().parse_args(["--main_process_port", port, *options])
    args, defaults, _ = _validate_launch_command(parsed)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    environment = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}


def start(job: Job) -> list[int]:
    """Fork the job's processes and return their numbers."""
    environment = launch_environment(job.launch, job.processes) if job.launch else {}
    numbers = []
    for rank in range(job.processes):
        number = os.fork()
        if number == 0:
            if job.launch:
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
            be_the_trainer(job)
        numbers.append(number)
    return numbers


def be_the_trainer(job: Job) -> None:
    """Run the command line, and end."""
    code = 1
    try:
        importlib.import_module(f"train.{job.trainer}").main(job.arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(numbers: list[int], timeout: float) -> list[int]:
    """Return the exit codes, negative for signals; what takes longer is killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(numbers):
        for number in set(numbers) - codes.keys():
            found, status = os.waitpid(number, os.WNOHANG)
            if found:
                codes[number] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(number, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[number] for number in numbers]


def interrupt(job: Job, number: int, chance: random.Random) -> list[int]:
    """Start the job, send a signal to all its processes after a few more steps, and return their exit codes."""
    metrics = Path(job.folder) / "metrics.jsonl"
    before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    numbers = start(job)
    end, wanted = time.monotonic() + job.timeout, before + chance.randint(0, 3)
    while time.monotonic() < end and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= wanted):
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.05))
    for process in numbers:
        os.kill(process, number)
    return wait(numbers, job.timeout)


def check(folder: Path) -> None:
    """Fail unless every checkpoint and head of the run is whole."""
    checkpoints = [path for path in (folder / "checkpoints").iterdir() if path.suffix == ""]
    assert checkpoints
    for path in checkpoints:
        assert json.loads((path / "state.json").read_text())["step"] == int(path.name.removeprefix("step_"))
    for path in [*folder.glob("checkpoints/step_*[0-9]/model.safetensors"), *folder.glob("*/model.safetensors")]:
        assert load_file(path)


def share_imports(jobs: list[Job]) -> None:
    """Import what every process would import, and leave out what costs more than the training."""
    for name in ("train.medusa", "train.eagle", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"):
        importlib.import_module(name)
    if any((job.launch or "").startswith("zero") for job in jobs):
        importlib.import_module("deepspeed")
    journal.draw_curves = lambda *files: None
    gc.freeze()


def main() -> None:
    """Run all jobs and print the exit codes of each start."""
    jobs = [Job(**settings) for settings in json.loads(Path(sys.argv[1]).read_text())]
    share_imports(jobs)
    for job in jobs:
        chance = random.Random(0)
        codes = []
        for number in job.signals:
            codes.append(interrupt(job, number, chance))
            check(Path(job.folder))
        codes.append(wait(start(job), job.timeout))
        print(f"JOB {json.dumps(codes)}", flush=True)
        if any(codes[-1]):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
