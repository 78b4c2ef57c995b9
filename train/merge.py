"""Make one model of a target and the adapter that was trained with its heads.

OUT/target is a plain Hugging Face model with its tokenizer, OUT/head are the heads, which decode, tune, bench, export
and publish then use with it as any heads with any target. The sums are made in float32 and rounded to the precision of
the target's own weights; --dtype float32 does not round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from decode import Target, UnsupportedTargetError
from decode.loading import find_dtype, load_model
from heads.base import Head
from heads.checkpoint import HeadNotes, load_head, read_notes, save_head, stored_dtype
from heads.fingerprint import fingerprint
from train.adapter import CONFIG, FOLDER, NAME, WEIGHTS, AdaptedTarget
from train.checkpoints import sync_folder
from train.config import naming
from train.model_folder import no_progress_bars, share_weights

DTYPES = ("float32", "bfloat16", "float16")
DAMAGED = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What reading a damaged adapter can raise."""


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
        ValueError: If the folder has no adapter, or a damaged one, `target` is not the one it was trained on, or `out`
            exists or is inside the folder.
    """
    folder, out = Path(head), Path(out)
    for needed in (WEIGHTS, CONFIG):
        if not (folder / FOLDER / needed).is_file():
            raise ValueError(f"{folder} has no {FOLDER}/{needed}; give a head trained with --head.type=medusa2")
    if out.exists():
        raise ValueError(f"{out} exists; choose another folder, or delete it")
    if folder.resolve() in out.resolve().parents:
        raise ValueError(f"{out} is inside {folder}, which its run replaces when it goes on; choose another folder")
    notes = read_notes(folder)
    with _reading(folder):
        config, weights = LoraConfig.from_pretrained(str(folder / FOLDER)), load_file(folder / FOLDER / WEIGHTS)
    name = str(config.base_model_name_or_path) if target is None else target
    with naming(f"the target of {folder}", "if it has moved, say where it is with --target"):
        model, tokenizer = load_model(name, "auto", torch.device("cpu"), "sdpa")
    own = model.dtype
    heads = _load_heads(folder, Target(model, tokenizer, name=name, pack=False), weights)
    wanted = own if dtype is None else find_dtype(dtype)
    assert isinstance(wanted, torch.dtype)
    merged = _merge(model, folder, config, weights, notes).to(wanted)  # type: ignore[arg-type]
    result = Target(merged, tokenizer, name=str(out / "target"), pack=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        new = Path(temporary) / "merged"
        new.mkdir()
        with no_progress_bars():
            merged.save_pretrained(new / "target")
        tokenizer.save_pretrained(new / "target")
        share_weights(new / "target", like=new / "target" / "config.json")
        save_head(heads, new / "head", target=result, notes=notes)
        sync_folder(new)
        new.rename(out)
    kind = str(wanted).removeprefix("torch.")
    rounded = "" if wanted == torch.float32 else ", to which the sums were rounded; --dtype float32 keeps them"
    return f"wrote {out}/target, in {kind}{rounded}, and {out}/head"


def _reading(folder: Path) -> AbstractContextManager[None]:
    return naming(f"{folder / FOLDER} is damaged", "copy the folder again, or train the head again", *DAMAGED)


def _load_heads(folder: Path, target: Target, weights: Mapping[str, Tensor]) -> Head:
    recorded = str(json.loads((folder / "config.json").read_text())["target"]["fingerprint"])  # read_notes checked it
    found = []
    for base in _fingerprints(target):
        adapted = AdaptedTarget.of(AdaptedTarget(target.name, base, target.embed, target.lm_head), weights)
        if adapted.fingerprint == recorded:
            return load_head(folder, adapted, dtype=stored_dtype(folder))
        found.append(adapted.fingerprint)
    raise ValueError(
        f"{folder} was not trained on {target.name}: with the adapter its fingerprint is {found[0]}, and {recorded} is "
        "recorded; give the original target with --target, or, if it is that, copy the folder again, whose parts are "
        "of two heads"
    )


def _fingerprints(target: Target) -> Iterator[str]:
    """Yield the fingerprint of the target as it is stored, and as a run with target.dtype=float16 has rounded it."""
    yield target.fingerprint
    parts, layers = dict(target.model.named_parameters()), int(target.model.config.get_text_config().num_hidden_layers)
    yield fingerprint(target.vocab_size, target.hidden_size, layers, parts, lambda name: parts[name].half())


def _merge(
    model: PreTrainedModel, folder: Path, config: LoraConfig, weights: Mapping[str, Tensor], notes: HeadNotes
) -> PreTrainedModel:
    """Add the adapter to the weights of `model`, in float32, if all of it is as it was trained."""
    with _reading(folder):
        joint = notes.training["joint"]
        adapted = PeftModel.from_pretrained(model.to(torch.float32), str(folder / FOLDER), config=config)  # type: ignore[arg-type]
        scales = {layer.scaling[NAME] for layer in adapted.modules() if isinstance(layer, LoraLayer)}
        trained = joint["alpha"] / joint["rank"]
        if scales != {trained} or get_peft_model_state_dict(adapted).keys() != weights.keys():
            raise ValueError(f"its {CONFIG} is of other layers than {WEIGHTS}, or scales them otherwise than {trained}")
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
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
