"""Write a head as vLLM, SGLang, llama.cpp and others load it, and print the commands that serve it."""

from __future__ import annotations

import argparse
import sys

import torch

from decode.exported import NO_GGUF, compare_export
from decode.prompts import Prompt, read_prompts
from decode.support import UnsupportedTargetError
from decode.target import Target
from heads.checkpoint import read_target
from heads.export.write import DTYPES, OPTIONS, write

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m heads.export", description=__doc__)
    p.add_argument("head", help="head folder, or the folder of a draft model; or a name on the hub")
    p.add_argument("out", help="folder to write, or the file for gguf; an earlier export of a head there is replaced")
    p.add_argument("--to", required=True, choices=list(OPTIONS), help="format; of a draft model it is hf")
    p.add_argument("--target", metavar="DIR", help="folder or hub name of the target (default: as the head names it)")
    p.add_argument("--for", dest="engine", choices=["vllm", "sglang"], help="with eagle: which engine")
    p.add_argument("--tokens", type=int, metavar="N", help="with speculators: drafted in each step (default 4)")
    p.add_argument("--dtype", choices=list(NAMES), help="precision of the weights (default: the head's)")
    p.add_argument("--llama-cpp", metavar="DIR", help="with gguf: folder of llama.cpp's source")
    p.add_argument(
        "--check",
        metavar="FILE",
        help="reload what was written and compare its drafts with the head's, on prompts of a JSONL file with "
        "`messages`, `conversations`, `turns` or `prompt` in each row; exit status 1 if they differ and should not "
        "(hf needs --target for it, and gguf cannot be checked)",
    )
    p.add_argument("--num", type=int, default=8, metavar="N", help="with --check: prompts (default 8)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    options = {name: vars(args)[name] for name in ("target", "engine", "tokens", "llama_cpp")}
    dtype: torch.dtype | None = NAMES[args.dtype] if args.dtype else None
    try:
        prompts = _read_prompts(args)
        written = write(args.head, args.out, to=args.to, options={**options, "dtype": dtype})
        print(f"wrote {args.out} ({args.to})")
        for note in (*written.notes, *written.left):
            print(f"note: {note}")
        for engine, command in written.commands:
            print(f"\n{engine}:", *command.splitlines(), sep="\n    ")
        sys.stdout.flush()
        return _check(args, prompts) if prompts else 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, UnsupportedTargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts to check with, none if nothing is checked; refuse what cannot be checked before it is written.

    Raises:
        ValueError: If it cannot be checked, or the prompts are broken.
    """
    if args.check is None:
        return []
    if args.to == "gguf":
        raise ValueError(NO_GGUF)
    if args.to == "hf" and args.target is None:
        raise ValueError("--check needs the target that the draft model drafts for (--target)")
    return read_prompts(args.check, limit=args.num)


def _check(args: argparse.Namespace, prompts: list[Prompt]) -> int:
    """Compare drafts and return the exit status."""
    target = Target.from_pretrained(args.target or read_target(args.head)[1])
    found = compare_export(target, args.head, args.out, prompts, to=args.to)
    print("\ncheck:", *found.lines(), sep="\n    ", flush=True)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
