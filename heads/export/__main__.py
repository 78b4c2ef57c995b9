"""Write a head as vLLM, SGLang, llama.cpp and others load it, and print the commands that serve it."""

from __future__ import annotations

import argparse
import sys

import torch

from heads.export.write import DTYPES, OPTIONS, write

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m heads.export", description=__doc__)
    p.add_argument("head", help="head folder, or the folder of a draft model")
    p.add_argument("out", help="folder to write, or the file for gguf; an earlier export there is replaced")
    p.add_argument("--to", required=True, choices=list(OPTIONS), help="format; of a draft model it is hf")
    p.add_argument("--target", metavar="DIR", help="folder or hub name of the target (default: as the head names it)")
    p.add_argument("--for", dest="engine", choices=["vllm", "sglang"], help="with eagle: which engine")
    p.add_argument("--tokens", type=int, metavar="N", help="with speculators: drafted in each step (default 4)")
    p.add_argument("--dtype", choices=list(NAMES), help="precision of the weights (default: the head's)")
    p.add_argument("--llama-cpp", metavar="DIR", help="with gguf: folder of llama.cpp's source")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    options = {name: vars(args)[name] for name in ("target", "engine", "tokens", "llama_cpp")}
    dtype: torch.dtype | None = NAMES[args.dtype] if args.dtype else None
    try:
        written = write(args.head, args.out, to=args.to, options={**options, "dtype": dtype})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out} ({args.to})")
    for note in written.notes:
        print(f"note: {note}")
    for engine, command in written.commands:
        print(f"\n{engine}:\n    {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
