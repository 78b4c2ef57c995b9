"""Check and measure everything on a GPU, in one go, and write a report that keeps what was found if it is cut off.

    make gpu
    python tests/gpu/everything.py --out DIR --smollm2 models/smollm2-135m-instruct --budget-seconds 840
    python tests/gpu/everything.py --out DIR --small     # tiny, on a CPU: does the script work?

Runs the project's own commands, each a part with a time limit: exactness (decode.prove), training and its speed, the
cost of target passes with and without --compile (decode.tune), decode.bench, and pytest -m gpu. They need a target
of random weights of the shape of Llama-3.2-1B, which is made first, and SmolLM2 if it is given.

DIR gets, after every part, report.md (for docs/benchmarks.md), results.json, and raw.zip with all logs and what the
parts wrote. A part that fails or takes too long is reported with the end of its log, and the others go on. The most
important come first; with --budget-seconds those for which no time is left are dropped. With --scratch, what is done
is not done again by the same command. The exit status is 1 if a part failed or was not run.
"""

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_parts import FULL, SMALL, Part, Place, parts
from gpu_process import Outcome, run
from gpu_report import Results

ROOT = Path(__file__).parents[2]
HEAD = ROOT / "tests/assets/medusa-smollm2-135m"


@dataclass
class Runner:
    """Runs parts, one after the other or side by side, and keeps the results up to date."""

    results: Results
    jobs: int
    environment: Mapping[str, str]
    deadline: float = float("inf")
    """On the clock of `time.monotonic`."""
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, wanted: Sequence[Part]) -> None:
        """Run the parts that are not done yet; `wanted` is in order of importance."""
        pending = [part for part in wanted if not self.results.is_done(part)]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while pending:
                    wave = self._wave(pending)
                    pending = pending[len(wave) :]
                    list(pool.map(self._part, wave))
            except BaseException:  # Ctrl-C: what was measured is written, then it goes on
                self.stop.set()
                raise

    def _wave(self, pending: Sequence[Part]) -> list[Part]:
        """Return the first parts that may run side by side: none alone, none waiting for another of them."""
        first, *others = pending
        if first.alone:
            return [first]
        waiting = {part.name for part in pending}
        return [first, *itertools.takewhile(lambda part: not part.alone and waiting.isdisjoint(part.needs), others)]

    def _part(self, part: Part) -> None:
        left = self.deadline - time.monotonic()
        missing = [name for name in part.needs if not self.results.has(name)]
        if missing:
            outcome = Outcome(f"not run: it needs {', '.join(missing)}", None, 0.0)
        elif self.stop.is_set():
            outcome = Outcome("stopped", None, 0.0)
        elif left < part.seconds:
            outcome = Outcome(f"dropped: {left:.0f} s were left, it takes about {part.seconds:.0f}", None, 0.0)
        else:
            print(f"{part.name} …", flush=True)
            self.results.begin(part)
            output, errors = self.results.logs(part)
            outcome = run(
                [sys.executable, *part.command],
                output=output,
                errors=errors,
                limit=min(part.limit, left),
                stop=self.stop,
                folder=ROOT,
                environment=self.environment,
            )
        print(f"{part.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        self.results.add(part, outcome)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="where report and results go")
    p.add_argument("--smollm2", type=Path, metavar="DIR", help="folder of SmolLM2-135M-Instruct")
    p.add_argument("--data", type=Path, metavar="FILE", help="answers of SmolLM2 to train a Medusa head on")
    p.add_argument(
        "--head", type=Path, metavar="DIR", help=f"trained head of SmolLM2 (default {HEAD.relative_to(ROOT)})"
    )
    p.add_argument("--prompts", type=Path, nargs="+", metavar="FILE", default=[ROOT / "data/prompts/held_out.jsonl"])
    p.add_argument("--small", action="store_true", help="tiny sizes, without SmolLM2")
    p.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="default cuda, cpu for --small; CUDA_VISIBLE_DEVICES chooses among GPUs",
    )
    p.add_argument("--budget-seconds", type=float, default=float("inf"), metavar="S", help="drop what takes longer")
    p.add_argument("--scratch", type=Path, metavar="DIR", help="keep targets, heads and logs here (3 GB)")
    p.add_argument("--jobs", type=int, default=5, help="parts side by side that measure no time (default 5)")
    p.add_argument("--parts", nargs="+", metavar="NAME", help="only parts whose names begin so, and what they need")
    p.add_argument("--commit", help="what is measured, where there is no git")
    return p


def environment(device: str, scratch: Path) -> dict[str, str]:
    """Return the variables of all parts."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    caches = {name: str(scratch / "compiled" / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    return {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        **caches,
        **hidden,
    }


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work.

    Raises:
        ValueError: With the way out.
    """
    if args.small and args.smollm2 is not None:
        raise ValueError("--small is without SmolLM2; leave out --smollm2")
    if args.smollm2 is None and (args.data is not None or args.head is not None):
        raise ValueError("--data and --head are SmolLM2's; give its folder by --smollm2")
    if args.data is not None and args.head is not None:
        raise ValueError("--data trains a head and --head takes one; give one of them")
    for path in filter(None, [args.smollm2, args.data, args.head, *args.prompts]):
        if not path.exists():
            raise ValueError(f"{path} is not there")
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("this torch sees no GPU; --device cpu --small tries the script on a CPU")


def choose(every: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """Return the parts whose names begin so, and those that they need, in order.

    Raises:
        ValueError: If there is none of a name.
    """
    if names is None:
        return list(every)
    for name in names:
        if not any(part.name.startswith(name) for part in every):
            raise ValueError(f"--parts: no part is called {name}; there are {', '.join(part.name for part in every)}")
    wanted = {part.name for part in every if part.name == "machine" or part.name.startswith(tuple(names))}
    for part in reversed(every):  # those that are needed stand before
        wanted |= set(part.needs) if part.name in wanted else set()
    return [part for part in every if part.name in wanted]


def place_of(args: argparse.Namespace, scratch: Path) -> Place:
    """Return where things are; a trained head is copied, as decode.tune writes into its folder."""
    if args.smollm2 is None:
        return Place(scratch)
    head = None
    if args.data is None:
        head = scratch / "heads" / "smollm2"
        shutil.copytree(args.head or HEAD, head, dirs_exist_ok=True)
    paths = {name: None if vars(args)[name] is None else vars(args)[name].resolve() for name in ("smollm2", "data")}
    return Place(scratch, head=head, prompts=tuple(path.resolve() for path in args.prompts), **paths)


def revision() -> str:
    """Return the commit."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    """Yield a folder for large files, which is deleted afterwards unless it was given."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with TemporaryDirectory(prefix="gorgon-gpu-") as made:
        yield Path(made).resolve()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    start = time.monotonic()
    args = parser().parse_args(argv)
    args.device = args.device or ("cpu" if args.small else "cuda")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    try:
        check(args)
        with scratch_folder(args.scratch) as scratch:
            every = parts(SMALL if args.small else FULL, place_of(args, scratch))
            wanted = choose(every, args.parts)
            facts = {
                "commit": args.commit or revision(),
                "device": args.device,
                "size": "small" if args.small else "full",
            }
            results = Results(args.out, scratch, every, facts, ROOT)
            runner = Runner(results, args.jobs, environment(args.device, scratch), start + args.budget_seconds)
            runner.run(wanted)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; what was found is in {args.out}", file=sys.stderr)
        return 130
    print(f"wrote {args.out / 'report.md'}")
    return 0 if all(results.is_done(part) for part in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
