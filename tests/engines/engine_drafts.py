"""What an engine drafts with an exported head, against what we draft with the head itself.

    python tests/engines/engine_drafts.py TARGET HEAD --to eagle3 --prompts FILE --num 20
    python tests/engines/engine_drafts.py TARGET HEAD --to gguf --prompts FILE --num 20 --llama-cpp DIR

The first runs vLLM in the environment that `make test-engines` builds, the second a llama.cpp whose
llama-speculative-simple is built. Both decode greedily in float32 and draft chains. Draft vocabularies that vLLM does
not use are not used here either.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llama_cpp_drafts
import torch
from transformers import LlamaForCausalLM

import heads
from decode import Chain, Drafting, DraftModel, Target, generate
from decode.measure import read_sets, to_ids
from decode.recorded import Recorded
from heads import Head, create_head, load_head

ENGINES = Path(os.environ.get("GORGON_ENGINES", Path(__file__).parents[2] / ".venv-engines"))
"""The environment of vLLM and speculators."""
ALL_TOKENS = ("medusa", "eagle")
"""Formats whose draft vocabulary vLLM does not use."""
METHODS = {"eagle3": "eagle3", "speculators": "eagle3", "medusa": "medusa", "eagle": "eagle", "hf": "draft_model"}
"""How vLLM calls what a format holds."""


@dataclass(frozen=True)
class Run:
    """What a decoder did with prompts."""

    texts: list[list[int]]
    """New tokens of each."""
    steps: list[list[tuple[int, list[int]]]]
    """For each prompt and step, how many new tokens there were, and what was drafted behind them."""

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a step; the one that was there before the first is not counted."""
        new = sum(len(text) - steps[0][0] for text, steps in zip(self.texts, self.steps, strict=True) if steps)
        return new / sum(map(len, self.steps))


def ours(
    target: Target,
    folder: Path,
    prompts: list[list[int]],
    *,
    tokens: int,
    limits: list[int],
    all_tokens: bool = False,
    **options: Any,
) -> Run:
    """Decode with a head or a draft model of ours, one prompt after the other, in chains.

    Args:
        target: The target.
        folder: Of the head or the draft model.
        prompts: Token ids.
        tokens: Drafted in each step.
        limits: New tokens of each prompt.
        all_tokens: Draft from all tokens, whatever the head's draft vocabulary is.
        options: Of `decode.generate`.
    """
    if "model_type" in json.loads((folder / "config.json").read_text()):
        drafts = DraftModel(Target(LlamaForCausalLM.from_pretrained(folder)), target)
    else:
        drafts = load_head(folder, target)
        drafts = without_vocabulary(drafts, target) if all_tokens else drafts
    recorded = Recorded(Drafting(drafts, Chain(tokens)))
    texts, steps = [], []
    for prompt, limit in zip(prompts, limits, strict=True):
        texts.append(generate(target, prompt, proposer=recorded, max_new_tokens=limit, **options).token_ids)
        steps.append([(step.context - len(prompt), step.token_ids) for step in recorded.rows[0]])
    return Run(texts, steps)


def without_vocabulary(head: Head, target: Target) -> Head:
    """Return a head that drafts from all tokens; of those that borrow the target's lm_head."""
    whole = create_head(head.kind, replace(head.config, draft_vocab_size=None), target)
    whole.load_state_dict({name: tensor for name, tensor in head.state_dict().items() if name != "vocabulary"})
    return whole.eval()


def run_job(script: str, job: dict[str, Any]) -> Any:
    """Run a script of this folder in the engines' environment and return what it found."""
    python = ENGINES / "bin" / "python"
    if not python.is_file():
        raise FileNotFoundError(f"{python} is not there: make test-engines builds it, GORGON_ENGINES names another one")
    with TemporaryDirectory() as folder:
        wants, gives = Path(folder, "job.json"), Path(folder, "found.json")
        wants.write_text(json.dumps(job))
        command = [str(python), str(Path(__file__).with_name(script)), str(wants), str(gives)]
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return json.loads(gives.read_text())


def vllm(
    model: str, prompts: list[list[int]], *, speculative: dict[str, Any] | None, rows: list[int], **job: Any
) -> list[Run]:
    """Decode in vLLM; see `vllm_drafts.py`. A step that only drafts behind the last token is left out."""
    job = {"eos_ids": [], "max_length": 256, **job}
    wants = {"model": model, "prompts": prompts, "speculative": speculative, "rows": rows, **job}
    return [Run(found["texts"], _steps(found)) for found in run_job("vllm_drafts.py", wants)]


def _steps(found: dict[str, Any]) -> list[list[tuple[int, list[int]]]]:
    return [
        [(step["text"], step["drafts"]) for step in row if step["text"] < len(text)]
        for text, row in zip(found["texts"], found["steps"], strict=True)
    ]


def llama_cpp(
    folder: Path, target: Target, head: Path, prompts: list[list[int]], *, tokens: int, max_new_tokens: int
) -> tuple[list[list[int]], Run]:
    """Decode in llama.cpp, which drafts behind the prompt's last token too; return what was decoded after that step.

    Args:
        folder: Of llama.cpp.
        target: The target.
        head: GGUF file of the head.
        prompts: Token ids.
        tokens: Drafted in each step.
        max_new_tokens: Limit for each prompt.

    Returns:
        The prompts, longer by all but the last token of the first step, and the rest.
    """
    texts, steps = [], []
    longer = []
    with TemporaryDirectory() as place:
        model = Path(place, "target.gguf")
        llama_cpp_drafts.convert_target(folder, Path(target.name), model)
        for prompt in prompts:
            words = target.tokenizer.decode(prompt)
            limit = {"tokens": tokens, "max_new_tokens": max_new_tokens}
            text, found = llama_cpp_drafts.run(folder, model, head, words, Path(place), **limit)
            skipped = found[1][0] - 1 if len(found) > 1 else len(text)
            longer.append(prompt + text[:skipped])
            texts.append(text[skipped:])
            steps.append([(count - skipped, drafts) for count, drafts in found[1:]])
    return longer, Run(texts, steps)


def table(first: Run, second: Run) -> list[str]:
    """Compare two runs of the same prompts in lines of text."""
    same = [a == b for a, b in zip(first.texts, second.texts, strict=True)]
    steps = [pair for a, b in zip(first.steps, second.steps, strict=True) for pair in zip(a, b, strict=False)]
    equal = sum(place == at and drafts[: len(made)] == made for (place, drafts), (at, made) in steps)
    ratio = second.tokens_per_step / first.tokens_per_step
    return [
        f"texts equal: {sum(same)} of {len(same)}",
        f"steps equal (place and drafts): {equal} of {max(sum(map(len, run.steps)) for run in (first, second))}",
        f"tokens per step: {first.tokens_per_step:.3f} ours, {second.tokens_per_step:.3f} the engine's ({ratio:.3f})",
    ]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("target")
    p.add_argument("head", type=Path)
    p.add_argument("--to", required=True, choices=[*METHODS, "gguf"])
    p.add_argument("--prompts", nargs="+", required=True)
    p.add_argument("--num", type=int, default=20, help="of each file")
    p.add_argument("--tokens", type=int, default=4, help="drafted in a step")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--max-length", type=int, default=1024)
    p.add_argument("--rows", type=int, default=1, help="prompts that vLLM decodes together")
    p.add_argument("--llama-cpp", type=Path, metavar="DIR")
    return p


def main() -> None:
    """Run the command."""
    args = parser().parse_args()
    target = Target.from_pretrained(args.target, dtype="float32", device="cpu")
    limit = args.max_length - args.max_new_tokens - args.tokens - 1
    sets = to_ids(target, read_sets(args.prompts, args.num), args.max_new_tokens)
    prompts = [ids for items in sets.values() for ids in items if len(ids) < limit]
    with TemporaryDirectory() as folder:
        out = Path(folder, "exported")
        options: dict[str, Any] = {"eagle": {"engine": "vllm"}, "gguf": {"llama_cpp": args.llama_cpp}}.get(args.to, {})
        if args.to != "hf":
            options = {**options, "dtype": torch.float32}
        for note in heads.export(args.head, out, to=args.to, target=args.target, **options):
            print(f"note: {note}")
        if args.to == "gguf":
            limit = {"tokens": args.tokens, "max_new_tokens": args.max_new_tokens}
            prompts, theirs = llama_cpp(args.llama_cpp, target, out, prompts, **limit)
            limits = [max(1, len(text)) for text in theirs.texts]
        else:
            speculative = {"method": METHODS[args.to], "model": str(out), "num_speculative_tokens": args.tokens}
            job = {"eos_ids": sorted(target.eos_ids), "rows": [args.rows], "max_length": args.max_length}
            limits = [args.max_new_tokens] * len(prompts)
            job |= {"speculative": speculative, "max_new_tokens": args.max_new_tokens}
            (theirs,) = vllm(args.target, prompts, **job)
    how = {"tokens": args.tokens, "limits": limits, "all_tokens": args.to in ALL_TOKENS}
    print("\n".join(table(ours(target, args.head, prompts, **how), theirs)))


if __name__ == "__main__":
    sys.exit(main())
