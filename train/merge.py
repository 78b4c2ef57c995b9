"""Make one model of a target and the adapter that was trained with its heads.

OUT/target is a plain Hugging Face model with its tokenizer, OUT/head are the heads, which decode, tune, bench, export
and publish then use with it as any heads with any target. The sums are made in float32 and rounded to the precision of
the target's own weights; --dtype float32 does not round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from decode import Target, UnsupportedTargetError
from decode.loading import find_dtype, load_model
from heads.base import Head
from heads.checkpoint import load_head, read_notes, save_head, stored_dtype
from train.adapter import FOLDER, WEIGHTS, AdaptedTarget
from train.checkpoints import sync_folder
from train.model_folder import no_progress_bars

DTYPES = ("float32", "bfloat16", "float16")


def merge(head: str | Path, out: str | Path, *, target: str | None = None, dtype: str | None = None) -> str:
    """Write the merged model to `out`/target and its heads to `out`/head.

    Args:
        head: Head folder with an adapter, from `--head.type=medusa2`.
        out: A folder that does not exist yet.
        target: Folder or hub name of the original target; that which the adapter names by default.
        dtype: Precision of the merged weights; the target's own by default.

    Returns:
        What was written, for people.

    Raises:
        ValueError: If the folder has no adapter, `target` is not the one it was trained on, or `out` exists.
    """
    folder, out = Path(head), Path(out)
    if not (folder / FOLDER / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {FOLDER}/{WEIGHTS}; give a head trained with --head.type=medusa2")
    if out.exists():
        raise ValueError(f"{out} exists; choose another folder, or delete it")
    config = json.loads((folder / FOLDER / "adapter_config.json").read_text())
    name = str(config["base_model_name_or_path"]) if target is None else target
    model, tokenizer = load_model(name, "auto", torch.device("cpu"), "sdpa")
    own = model.dtype
    heads = _load_heads(folder, Target(model, tokenizer, name=name, pack=False))
    wanted = own if dtype is None else find_dtype(dtype)
    assert isinstance(wanted, torch.dtype)
    merged = _merge(model, folder / FOLDER).to(wanted)  # type: ignore[arg-type]
    result = Target(merged, tokenizer, name=str(out / "target"), pack=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        new = Path(temporary) / "merged"
        new.mkdir()
        with no_progress_bars():
            merged.save_pretrained(new / "target")
        tokenizer.save_pretrained(new / "target")
        save_head(heads, new / "head", target=result, notes=read_notes(folder))
        sync_folder(new)
        new.rename(out)
    kind = str(wanted).removeprefix("torch.")
    rounded = "" if wanted == torch.float32 else ", to which the sums were rounded; --dtype float32 keeps them"
    return f"wrote {out}/target, in {kind}{rounded}, and {out}/head"


def _load_heads(folder: Path, target: Target) -> Head:
    adapted = AdaptedTarget.of(target, load_file(folder / FOLDER / WEIGHTS))
    recorded = json.loads((folder / "config.json").read_text())["target"]["fingerprint"]
    if recorded != adapted.fingerprint:
        raise ValueError(
            f"{folder} was not trained on {target.name}: with the adapter its fingerprint is {adapted.fingerprint}, "
            f"and {recorded} is recorded; give the original target with --target, or, if it is that, copy the folder "
            "again, whose parts are of two heads"
        )
    return load_head(folder, adapted, dtype=stored_dtype(folder))


def _merge(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Add the adapter to the weights of `model`, in float32."""
    with_adapter = PeftModel.from_pretrained(model.to(torch.float32), str(adapter))  # type: ignore[arg-type]
    merged: PreTrainedModel = with_adapter.merge_and_unload(safe_merge=True)
    return merged


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m train.merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("head", help="head folder with an adapter/ in it")
    p.add_argument("out", help="folder to write target/ and head/ to; must not exist")
    p.add_argument("--target", metavar="DIR", help="folder or hub name of the original target, if it has moved")
    p.add_argument("--dtype", choices=DTYPES, help="precision of the merged weights; by default the target's own")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        print(merge(args.head, args.out, target=args.target, dtype=args.dtype))
    except (ValueError, OSError, UnsupportedTargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\npython -m decode {args.out}/target PROMPT --head {args.out}/head")
    return 0


if __name__ == "__main__":
    sys.exit(main())
