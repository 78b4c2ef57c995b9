"""`python -m decode.memory TARGET [--head HEAD] --prompts FILE`: the memory that decoding takes, beside transformers'.

Each way of decoding runs in a process of its own on the same prompts: transformers' `generate`, our plain decoding, and
decoding with the head or prompt lookup. Shown are the memory after loading and the peak while decoding: of a CPU the
process's resident set (on Linux its peak is reset after loading; elsewhere it includes the loading), of a GPU what
torch has allocated.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decode.generation import generate
from decode.loading import find_device, find_dtype, load_model
from decode.lookup import PromptLookup
from decode.measure import markdown, show, write_report
from decode.options import add_target_options, load_target
from decode.prompts import read_prompts, to_token_ids, token_limits
from decode.support import UnsupportedTargetError
from heads import load_head
from heads.files import check_writable
from heads.transfer import to_device

THEIRS, PLAIN, HEAD, LOOKUP = "transformers", "plain", "head", "prompt lookup"
MIB = 1 << 20


def peak(device: torch.device) -> float:
    """Return the most memory that was in use since `reset_peak`, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def reset_peak(device: torch.device) -> float:
    """Start a new peak and return the memory in use, in MiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def run_one(args: argparse.Namespace) -> dict[str, float]:
    """Decode all prompts in one way, in this process, and return the memory it took."""
    run, device = _theirs(args) if args.one == THEIRS else _ours(args)
    loaded = reset_peak(device)
    tokens = run()
    return {"loaded": loaded, "peak": peak(device), "tokens": tokens}


def _theirs(args: argparse.Namespace) -> tuple[Callable[[], int], torch.device]:
    device, dtype = find_device(args.device), find_dtype(args.dtype)
    loaded, tokenizer = load_model(args.target, dtype, device, "sdpa", quantize=args.quantize)
    model: Any = loaded.eval()  # type: ignore[no-untyped-call]
    prompts = json.load(sys.stdin)
    ends, longest = [tokenizer.eos_token_id], int(model.config.get_text_config().max_position_embeddings)

    def run() -> int:
        total = 0
        for ids in prompts:
            prompt = to_device([ids], device)
            options = {"max_new_tokens": min(args.max_new_tokens, longest - len(ids)), "do_sample": False}
            options |= {"pad_token_id": ends[0] or 0, "eos_token_id": None}
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            total += out.shape[1] - len(ids)
        return total

    return run, device


def _ours(args: argparse.Namespace) -> tuple[Callable[[], int], torch.device]:
    target = load_target(args)
    head = load_head(args.head, target, keep_weights=False) if args.one == HEAD else None
    proposer = PromptLookup() if args.one == LOOKUP else None
    prompts = json.load(sys.stdin)

    def run() -> int:
        total = 0
        for ids in prompts:
            out = generate(target, ids, head=head, proposer=proposer, max_new_tokens=args.max_new_tokens, eos_ids=())
            assert not isinstance(out, list)
            total += len(out.token_ids)
        return total

    return run, target.device


def compare(args: argparse.Namespace, prompts: list[list[int]]) -> list[dict[str, object]]:
    """Run every way in a process of its own and return a row for each.

    Raises:
        RuntimeError: If one fails; its errors have been shown.
    """
    ways = [THEIRS, PLAIN, LOOKUP] + ([HEAD] if args.head else [])
    rows: list[dict[str, object]] = []
    first = 0.0
    for way in ways:
        command = [sys.executable, "-m", "decode.memory", args.target, "--one", way]
        command += ["--dtype", args.dtype, "--max-new-tokens", str(args.max_new_tokens)]
        command += ["--head", args.head] if args.head else []
        command += ["--device", args.device] if args.device else []
        command += ["--compile"] if args.compile else []
        command += ["--quantize", args.quantize] if args.quantize else []
        done = subprocess.run(command, input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{way} failed with exit status {done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1])
        first = first or found["peak"]
        rows.append(
            {
                "way": way,
                "loaded, MiB": round(found["loaded"]),
                "peak while decoding, MiB": round(found["peak"]),
                "over transformers": f"{found['peak'] / first:.2f}",
                "new tokens": found["tokens"],
            }
        )
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_options(p)
    p.add_argument("--head", metavar="DIR", help="head folder")
    p.add_argument("--prompts", help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`")
    p.add_argument("--num", type=int, default=4, help="first prompts of the file (default 4)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--out", type=Path, help="write the table as JSON")
    p.add_argument("--one", choices=[THEIRS, PLAIN, LOOKUP, HEAD], help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    if args.one is not None:
        print(json.dumps(run_one(args)))
        return 0
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("stopped; nothing is kept", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        if args.prompts is None:
            raise ValueError("give --prompts, a JSONL file")
        if args.device_map is not None:
            raise ValueError("--device-map: the memory of one device is measured here; leave it out")
        if args.out is not None:
            check_writable(args.out)
        texts = read_prompts(args.prompts, limit=args.num)
        target = load_target(args)
        prompts = [to_token_ids(target, text, raw=False) for text in texts]
        token_limits(target, prompts, args.max_new_tokens)
        if args.head is not None:
            load_head(args.head, target)
        del target
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the others want it
        rows = compare(args, prompts)
    except (ValueError, OSError, RuntimeError, UnsupportedTargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    written = args.out is None or write_report(args.out, {"rows": rows})
    return 0 if show(markdown(rows)) and written else 2


if __name__ == "__main__":
    sys.exit(main())
