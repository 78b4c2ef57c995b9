"""`python -m decode.bench compare HEAD [HEAD …] --prompts FILE … --out DIR`: heads side by side, with intervals.

Compares the heads, each as a chain and as its own tree (a small one if it has none), with prompt lookup, a draft
model's chain and plain decoding, on the same prompts and one target object, greedy and sampled. Every prompt is decoded
by every method in turn, in an order that rotates, and each text is compared with plain decoding's of the same
temperature and seed, token for token. Intervals are 95 % bootstrap intervals over prompts.

DIR gets raw.jsonl (a line for each prompt and temperature), comparison.json and comparison.png. A run that was killed,
or found the disk full, continues with the same command. The exit status is 1 if a text differs without a near tie, 2
for bad input and for files that cannot be written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from decode.chart import save_chart
from decode.comparison_log import ComparisonLog, Key
from decode.comparison_table import Summary, summarise, tables
from decode.counting import Counting
from decode.draft_model import DraftModel
from decode.measure import Result, longest, machine, measure, read_sets, to_ids
from decode.methods import check_proposers, name_heads, our_runs, rivals
from decode.propose import Drafting, Proposer
from decode.sampling import Sampling
from decode.target import Target
from heads import load_head, read_notes
from heads.checkpoint import CONFIG, WEIGHTS
from heads.files import check_writable

WARM_UP = 8
"""New tokens of each method before anything is measured."""


@dataclass(frozen=True)
class Comparison:
    """What is compared: every proposer on every prompt at every temperature."""

    target: Target
    proposers: Mapping[str, Proposer | None]
    """By name; "plain" must be there."""
    sets: Mapping[str, Sequence[list[int]]]
    """Prompt ids by prompt set."""
    temperatures: Sequence[float]
    seed: int
    max_new_tokens: int

    def run(self, log: ComparisonLog) -> dict[float, list[Result]]:
        """Decode what is not in the log, write it there, and return all results by temperature."""
        keys = [
            Key(name, number, temperature)
            for name, prompts in self.sets.items()
            for number in range(len(prompts))
            for temperature in self.temperatures
        ]
        counting = {name: Counting(proposer) for name, proposer in self.proposers.items() if proposer is not None}
        samplings = {
            temperature: Sampling(temperature=temperature, seed=self.seed) for temperature in self.temperatures
        }
        runs = {
            temperature: our_runs(self.target, {"plain": None, **counting}, sampling, self.max_new_tokens)
            for temperature, sampling in samplings.items()
        }
        todo = [key for key in keys if not self.proposers.keys() <= log.answers.get(key, {}).keys()]
        if todo:
            self._warm_up(samplings)
        progress = tqdm(todo, total=len(keys), initial=len(keys) - len(todo), desc="compare", unit="prompt")
        for key in progress:
            progress.set_postfix_str(f"{key.prompts}, T={key.temperature:g}", refresh=False)
            ids, sampling = self.sets[key.prompts][key.number], samplings[key.temperature]
            answers = measure(self.target, runs[key.temperature], ids, sampling, turn=key.number)
            answers |= {name: replace(answers[name], counts=counts.take()) for name, counts in counting.items()}
            log.append(key, answers)
        return {temperature: self._results(log, temperature) for temperature in self.temperatures}

    def _warm_up(self, samplings: Mapping[float, Sampling]) -> None:
        ids = next(iter(self.sets.values()))[0]
        for sampling in samplings.values():
            for run in our_runs(self.target, self.proposers, sampling, WARM_UP).values():
                run(ids)

    def _results(self, log: ComparisonLog, temperature: float) -> list[Result]:
        return [
            Result(method, name, [log.answers[Key(name, n, temperature)][method] for n in range(len(prompts))])
            for name, prompts in self.sets.items()
            for method in self.proposers
        ]


def find_target(heads: Sequence[str]) -> str:
    """Return the name of the target that all these head folders were trained for.

    Raises:
        ValueError: If a folder holds no head, or their targets differ.
    """
    targets = {}
    for folder in heads:
        read_notes(folder)  # refuses what is not a head's folder
        targets[folder] = json.loads((Path(folder) / CONFIG).read_text())["target"]
    if len({trained["fingerprint"] for trained in targets.values()}) > 1:
        lines = [f"{folder} for {t['name']} (fingerprint {t['fingerprint']})" for folder, t in targets.items()]
        raise ValueError(f"the heads were trained for different targets: {'; '.join(lines)}; compare those of one")
    name: str = targets[heads[0]]["name"]
    return name


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m decode.bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("heads", nargs="+", metavar="HEAD", help="head folders, all of one target")
    p.add_argument("--target", help="model folder or hub name (default: the one that the heads name)")
    p.add_argument("--draft-model", metavar="DIR", help="small model with the target's tokenizer; drafts a chain")
    p.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL rows with `messages`, `conversations`, `turns` or `prompt`"
    )
    p.add_argument("--num", type=int, default=20, help="first prompts of each file (default 20)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="default: 0 1")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--chain", type=int, default=4, help="tokens in the heads' and the draft model's chains (default 4)")
    p.add_argument("--lookup", type=int, default=6, help="tokens proposed by prompt lookup (default 6)")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results, table and picture go")
    return p


def load(args: argparse.Namespace) -> tuple[Comparison, ComparisonLog]:
    """Load everything, and refuse what cannot be decoded before anything is."""
    if len(set(args.temperature)) < len(args.temperature):
        raise ValueError(f"temperatures must differ, got {args.temperature}")
    samplings = [Sampling(temperature=temperature, seed=args.seed) for temperature in args.temperature]
    files = read_sets(args.prompts, args.num)
    name = find_target(args.heads)
    check_writable(args.out / "raw.jsonl")
    try:
        target = Target.from_pretrained(args.target or name, dtype=args.dtype, device=args.device)
    except OSError as error:
        way_out = "correct --target" if args.target else "the heads were trained for it; give --target if it has moved"
        raise ValueError(f"cannot load the target {args.target or name} ({way_out}): {error}") from error
    sets = to_ids(target, files, args.max_new_tokens)
    draft_model = None if args.draft_model is None else DraftModel.from_pretrained(args.draft_model, target)
    loaded = [load_head(folder, target) for folder in args.heads]
    heads = dict(zip(name_heads(args.heads, [head.kind for head in loaded]), loaded, strict=True))
    proposers = rivals(heads, draft_model=draft_model, lookup=args.lookup, chain=args.chain)
    check_proposers(target, proposers, longest(sets), samplings[0], args.max_new_tokens)
    comparison = Comparison(target, proposers, sets, args.temperature, args.seed, args.max_new_tokens)
    settings = {
        "methods": {name: repr(_shape(proposer)) for name, proposer in proposers.items()},
        "heads": [_digest((Path(folder) / WEIGHTS).read_bytes()) for folder in args.heads],
        "target": target.fingerprint,
        "draft_model": None if draft_model is None else draft_model.model.fingerprint,
        "prompts": _digest(json.dumps(sets).encode()),
        "temperature": args.temperature,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "machine": machine(target),
    }
    return comparison, ComparisonLog(args.out / "raw.jsonl", settings)


def _shape(proposer: Proposer | None) -> object:
    return proposer.grow if isinstance(proposer, Drafting) else proposer


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    try:
        comparison, log = load(args)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        results = comparison.run(log)
        report = _report(args.out, comparison, results, " ".join(["python -m decode.bench compare", *argv]))
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: cannot write to {args.out} ({error}); the same command continues", file=sys.stderr)
        return 2
    print(report)
    return 1 if any(result.unexcused for found in results.values() for result in found) else 0


def _report(folder: Path, comparison: Comparison, results: Mapping[float, Sequence[Result]], command: str) -> str:
    """Write the results to `folder` and return them for people."""
    rows = summarise(results)
    differences = [
        f"T={temperature:g}, {result.method}: {line}"
        for temperature, found in results.items()
        for result in found
        for line in result.differences
    ]
    place = machine(comparison.target)
    _write(folder, rows, results, {"command": command, "machine": place})
    written = f"wrote comparison.json and comparison.png to {folder}"
    return "\n".join(map(str, [tables(rows), "", *differences, place, written]))


def _write(
    folder: Path, rows: Sequence[Summary], results: Mapping[float, Sequence[Result]], facts: Mapping[str, Any]
) -> None:
    raw = [{"temperature": temperature, **asdict(result)} for temperature, found in results.items() for result in found]
    report = {**facts, "rows": [asdict(row) for row in rows], "raw": raw}
    (folder / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")
    save_chart(rows, folder / "comparison.png")
