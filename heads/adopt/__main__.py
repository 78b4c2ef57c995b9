"""Make a head folder of a head from elsewhere.

Read are SafeAILab's EAGLE-1 and EAGLE-3, those of SpecForge, ModelOpt and the speculators library, and Medusa heads of
FasterDecoding and vLLM; in safetensors, or in pickles, of which no code is run.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from heads.adopt import adopt
from heads.formats.eagle3 import MEANINGS


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m heads.adopt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("src", help="folder of a head in an engine's format, or its name on the hub")
    p.add_argument("out", help="head folder to write")
    p.add_argument("--target", required=True, metavar="DIR", help="folder or hub name of the target it was trained for")
    p.add_argument("--aux", choices=MEANINGS, help="whose meaning the layers in eagle_config have; asked for if needed")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        notes = adopt(args.src, args.out, target=args.target, aux=args.aux)
        print(f"wrote {args.out}", *(f"note: {note}" for note in notes), sep="\n")
        print(f"\n{shlex.join(['python', '-m', 'decode', args.target, 'PROMPT', '--head', args.out])}", flush=True)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
