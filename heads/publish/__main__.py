"""Publish a head or a draft model on the Hugging Face Hub, with a model card.

Without --to, the head folder itself is published: `python -m decode TARGET PROMPT --head USER/NAME` loads it. With
--to, an export is, which inference engines load by its name. Files of an earlier publication are replaced or deleted in
the same commit; the hub keeps them in the history.
"""

from __future__ import annotations

import argparse
import sys

from heads.export.write import DTYPES, OPTIONS
from heads.publish.stage import stage
from heads.publish.upload import listed, publish

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m heads.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", help="head folder, or the folder of a draft model")
    p.add_argument("repo", metavar="USER/NAME", help="repository on the hub; made if missing")
    p.add_argument("--private", action="store_true", help="make it a private one")
    p.add_argument("--license", metavar="NAME", help="for the card, such as apache-2.0; none is written otherwise")
    p.add_argument("--card", metavar="FILE", help="a card of your own, such as an edited one of --dry-run")
    p.add_argument("--dry-run", metavar="DIR", help="write what would be published to this folder, and publish nothing")
    group = p.add_argument_group("export", "What to publish in place of the head folder; see python -m heads.export.")
    group.add_argument("--to", choices=list(OPTIONS), help="format; of a draft model it is hf")
    group.add_argument(
        "--target", metavar="DIR", help="folder or hub name of the target, also for the card (default: as recorded)"
    )
    group.add_argument("--for", dest="engine", choices=["vllm", "sglang"], help="with eagle: which engine")
    group.add_argument("--tokens", type=int, metavar="N", help="with speculators: drafted in each step (default 4)")
    group.add_argument("--dtype", choices=list(NAMES), help="precision of the weights (default: the head's)")
    group.add_argument("--llama-cpp", metavar="DIR", help="with gguf: folder of llama.cpp's source")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    options = {name: vars(args)[name] for name in ("target", "engine", "tokens", "llama_cpp")}
    options["dtype"] = NAMES[args.dtype] if args.dtype else None
    more = {"to": args.to, "options": options, "license": args.license, "card": args.card}
    try:
        if args.dry_run is not None:
            notes = stage(args.folder, args.dry_run, args.repo, **more)
            files, done = listed(args.dry_run), f"{args.repo} would be what is in {args.dry_run}; nothing was published"
        else:
            published = publish(args.folder, args.repo, private=args.private, **more)
            notes, files, done = published.notes, published.files, f"published {published.url}"
        print(done, ", ".join(files), *(f"note: {note}" for note in notes), sep="\n", flush=True)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
