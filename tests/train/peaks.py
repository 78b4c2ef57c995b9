"""`python tests/train/peaks.py FOLDER`: predicted and measured peak memory of short runs, each in a process of its own.

Reads FOLDER/cases.json, [[name, trainer, [argument, ...]], ...], and prints {name: {parts, predicted, measured, held}}.
Processes are forked after the imports, which cost more than the runs.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 - once for all children

from decode.memory import peak, reset_peak
from train import draft_model, eagle, journal, medusa, run
from train.imagined import Imagined
from train.plan import make_plan

MAINS = {"medusa": medusa.main, "eagle": eagle.main, "draft_model": draft_model.main}


def measure(trainer: str, arguments: list[str], out: Path) -> None:
    found: dict[str, object] = {}

    def planned(*args: object) -> object:
        plan = make_plan(*args)
        (memory,) = plan.memory
        found.update(parts=dict(memory.parts), predicted=memory.total, held=memory.held)
        reset_peak(torch.device("cpu"))  # loading the target is another matter
        return plan

    run.make_plan = planned
    journal.draw_curves = lambda *files: None  # which costs more than the training
    MAINS[trainer](arguments)
    found["measured"] = int(peak(torch.device("cpu")) * 2**20)
    out.write_text(json.dumps(found))


def main() -> None:
    folder = Path(sys.argv[1])
    with Imagined(torch.device("cpu")):
        torch.ones(2, dtype=torch.float32) * 2  # loads what counting needs
    results = {}
    for number, (name, trainer, arguments) in enumerate(json.loads((folder / "cases.json").read_text())):
        out = folder / f"{number}.json"
        child = os.fork()
        if child == 0:
            with (folder / f"{number}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                try:
                    measure(trainer, arguments, out)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        os.waitpid(child, 0)
        if not out.exists():
            raise SystemExit(f"{name} failed:\n" + (folder / f"{number}.log").read_text())
        results[name] = json.loads(out.read_text())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
