"""Two processes share a target: python sharded.py TARGET OUT writes OUT/0.json and OUT/1.json, what each has seen."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from data import features, stored_features
from data.conversations import Encoded
from data.feature_plan import contents_for, prepare_folder
from data.features import OnlineFeatures
from data.stored_features import StoredFeatures
from decode import PromptLookup, Target, generate

PROMPT = [5, 6, 7, 8, 5, 6, 7]


def local_bytes(target: Target) -> int:
    parts = (part.to_local() if isinstance(part, DTensor) else part for part in target.model.parameters())
    return sum(part.untyped_storage().nbytes() for part in parts)


def most(numbers: Any) -> list[int]:
    found = torch.tensor(list(numbers))
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return found.tolist()


def text(target: Target, proposer: PromptLookup | None = None) -> list[int]:
    return generate(target, PROMPT, proposer=proposer, max_new_tokens=16).token_ids


def see(rank: int, name: str, out: Path) -> dict[str, object]:
    whole = Target.from_pretrained(name, dtype="float32", device="cpu", pack=False)
    target = Target.from_pretrained(name, dtype="float32", device="cpu", shard=True)
    seen: dict[str, object] = {"loaded": local_bytes(target), "whole": local_bytes(whole)}
    ids = torch.tensor([PROMPT])

    def states() -> str:
        pairs = zip(target.encode_features(ids, [7], (1,)), whole.encode_features(ids, [7], (1,)), strict=True)
        return "same" if all(torch.equal(*pair) for pair in pairs) else "other"

    seen["states"] = [states()]
    seen["texts"] = [text(target)]
    seen["states"].append(states())
    seen["texts"].append(text(target, PromptLookup()))
    seen["expected"] = text(whole)
    weight = torch.ones(16, requires_grad=True)
    (target.encode(ids, [7]) * weight).sum().backward()
    seen["gradient"] = bool(weight.grad.abs().sum() > 0)
    seen["after passes"] = local_bytes(target)
    seen["fingerprint"] = target.fingerprint == whole.fingerprint
    return seen | lock_step(rank, target, out)


def lock_step(rank: int, target: Target, out: Path) -> dict[str, object]:
    samples = [Encoded([40 + n, 41, 42, 43 + n], [False, False, True, True]) for n in range(8)]
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return compute(*args)

    compute = features.compute_states
    features.compute_states = stored_features.compute_states = counted
    source = OnlineFeatures(target, samples, 10**6, (), most)
    first, second = ([0, 1], [2, 3]) if rank == 0 else ([4, 5], [6, 7])
    source.batch(first)  # two passes
    source.batch([first[0], second[0]] if rank == 0 else [second[0], first[0]])  # one lacks the second, one the first
    source.batch(first)  # none
    online = len(calls)
    wanted = contents_for(target, samples, (), inputs="x", dtype="target")
    wanted = wanted.__class__(**{**vars(wanted), "bounds": (0, 3, 4)})
    if rank == 0:
        prepare_folder(target, samples[:4], out / "features", wanted, say=lambda line: None)
    distributed.barrier()
    stored = StoredFeatures(target, samples[:4], out / "features", wanted)
    stored.fill(rank, 2, hide=True, most=most)
    return {"passes online": online, "passes to fill": len(calls) - online}


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                distributed.init_process_group("gloo", init_method=f"file://{out / 'meet'}", rank=rank, world_size=2)
                (out / f"{rank}.json").write_text(json.dumps(see(rank, name, out)))
                code = 0
            finally:
                sys.stdout.flush()
                sys.excepthook(*sys.exc_info()) if code else None
                os._exit(code)
        children.append(child)
    raise SystemExit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
