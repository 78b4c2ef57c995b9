"""Let the target answer prompts, so that heads are trained on what it would say itself.

Everything that can be wrong with the prompts, the settings or the output is found before the model is loaded. A run
that was killed is continued by the same command: finished batches are on disk and are not made again. A row depends on
its prompt and the settings, not on when it was made or on the other rows of its batch (but for rounding).
"""

import argparse
import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from data.answers import AnswerFile, load_meta, save_meta
from data.conversations import Conversation, load_conversations, render
from decode import Generation, Sampling, Target, UnsupportedTargetError, generate

WINDOW = 1024
"""Prompts are sorted by length within windows of so many, so that little of a batch is padding."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Settings of one run; `python -m data.distill --help` explains each."""

    target: str
    prompts: str | Path
    out: Path
    max_new_tokens: int = 512
    batch_size: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None
    dtype: str = "auto"
    device: str | None = None
    skip_long: bool = False

    def __post_init__(self) -> None:
        for name, value in {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}; leave it out to answer all prompts")
        Sampling(temperature=self.temperature, top_p=self.top_p)  # refuses impossible values


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    finish_reasons: dict[str, int]
    """Number of rows in the output by how they ended, those of earlier runs included."""
    new_answers: int
    new_tokens: int
    seconds: float

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.finish_reasons.items()))
        return (
            f"answers {sum(self.finish_reasons.values())} ({reasons}) | new {self.new_answers} | new tokens "
            f"{self.new_tokens:,} | {self.seconds:.1f} s | {self.new_tokens / max(self.seconds, 1e-9):.1f} tokens/s"
        )


def distill(config: DistillConfig, target: Target | None = None) -> Summary:
    """Answer the prompts that have no answer in `config.out` yet.

    Rows are `{"id", "source" (if the prompt has one), "messages", "finish_reason"}` with the answer as the last message
    and "stop" (the target ended it) or "length". How they were made is written to `<out>.meta.json` first.

    Args:
        config: Target, prompts, output and how to answer.
        target: A loaded target; by default `config.target` is loaded.

    Raises:
        ValueError: If a prompt is broken, empty, answered or too long; if the output cannot be written, is corrupt, or
            was begun with other settings. Answers on disk stay as they are.
    """
    prompts = load_prompts(config.prompts, limit=config.limit)
    tokenizer, context = _load_limits(config.target) if target is None else (target.tokenizer, target.max_length)
    if tokenizer is None:
        raise ValueError("the target has no tokenizer to encode prompts with; give it one: Target(model, tokenizer)")
    ordered = _order_prompts(prompts, tokenizer, context, config)
    names = ("max_new_tokens", "temperature", "top_p", "seed")
    settings: dict[str, object] = {name: vars(config)[name] for name in names}
    settings["prompts_sha256"] = _hash_prompts(config.prompts, prompts)
    with closing(AnswerFile(config.out)) as answers:
        load_meta(answers, settings)
        if target is None:
            target = Target.from_pretrained(config.target, dtype=config.dtype, device=config.device)
        settings |= {"fingerprint": target.fingerprint, "dtype": str(target.dtype).removeprefix("torch.")}
        meta = load_meta(answers, settings) or {"settings": settings, "created": _now(), "runs": []}
        meta["runs"].append(_describe_run(config, target))
        meta["counts"] = {"prompts": len(ordered), "too_long": len(prompts) - len(ordered)}
        save_meta(config.out, meta)
        summary = _answer_all(ordered, answers, target, tokenizer, config)
        save_meta(config.out, meta | {"counts": meta["counts"] | {"finish_reasons": summary.finish_reasons}})
    return summary


def load_prompts(source: str | Path, *, limit: int | None = None) -> list[Conversation]:
    """Load conversations that wait for an answer.

    Raises:
        ValueError: If a row is broken, or a conversation does not end on a user turn with text; it names them all.
    """
    prompts = load_conversations(source, limit=limit)
    answered = [prompt.id for prompt in prompts if prompt.messages[-1]["role"] == "assistant"]
    empty = [prompt.id for prompt in prompts if not prompt.messages[-1]["content"].strip()]
    other = [prompt.id for prompt in prompts if prompt.messages[-1]["role"] == "system"]
    if answered:
        raise ValueError(f"{source}: already answered: {_list_ids(answered)}; remove the last assistant turns")
    if other or empty:
        raise ValueError(f"{source}: no question to answer: {_list_ids(other or empty)}; end each on a user turn")
    return prompts


def _load_limits(name: str) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer and the context length of a target, without loading its weights."""
    config = AutoConfig.from_pretrained(name).get_text_config()
    return AutoTokenizer.from_pretrained(name), int(config.max_position_embeddings)


def _order_prompts(
    prompts: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, context: int, config: DistillConfig
) -> list[Conversation]:
    """Return the prompts in the order in which they are answered; refuse (or leave out) those that are too long."""
    progress = tqdm(prompts, desc="check prompts", unit=" prompts", delay=2)
    lengths = {prompt.id: len(_encode_prompt(prompt, tokenizer)) for prompt in progress}
    too_long = [name for name, length in lengths.items() if length + config.max_new_tokens > context]
    if too_long and not config.skip_long:
        raise ValueError(
            f"{config.prompts}: longer than {context - config.max_new_tokens} tokens (the target's context of "
            f"{context} less max_new_tokens={config.max_new_tokens}): {_list_ids(too_long)}; shorten them, lower "
            "max_new_tokens, or leave them out with --skip-long"
        )
    fitting = [prompt for prompt in prompts if lengths[prompt.id] + config.max_new_tokens <= context]
    windows = (fitting[start : start + WINDOW] for start in range(0, len(fitting), WINDOW))
    # longest first: if a batch does not fit into memory, it is the first one
    return [prompt for window in windows for prompt in sorted(window, key=lambda prompt: -lengths[prompt.id])]


def _answer_all(
    prompts: Sequence[Conversation],
    answers: AnswerFile,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    config: DistillConfig,
) -> Summary:
    answers.drop_torn_line()
    start, new_answers, new_tokens = time.perf_counter(), 0, 0
    done = sum(prompt.id in answers.finish_reasons for prompt in prompts)
    with tqdm(total=len(prompts), initial=done, desc="distill", unit=" prompts", smoothing=0) as progress:
        for first in range(0, len(prompts), config.batch_size):
            # batches are cut before finished prompts are left out: a resumed run then has the same batches
            batch = prompts[first : first + config.batch_size]
            batch = [prompt for prompt in batch if prompt.id not in answers.finish_reasons]
            if not batch:
                continue
            seeds = [prompt_seed(config.seed, prompt.id) for prompt in batch]
            sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=seeds)
            token_ids = [_encode_prompt(prompt, tokenizer) for prompt in batch]
            generations = generate(target, token_ids, sampling=sampling, max_new_tokens=config.max_new_tokens)
            assert isinstance(generations, list)  # a list of prompts was passed
            answers.append([_to_row(*pair) for pair in zip(batch, generations, strict=True)])
            new_answers += len(batch)
            new_tokens += sum(len(generation.token_ids) for generation in generations)
            progress.set_postfix_str(f"{new_tokens / (time.perf_counter() - start):.1f} tokens/s", refresh=False)
            progress.update(len(batch))
    reasons = dict(Counter(answers.finish_reasons.values()))
    return Summary(reasons, new_answers, new_tokens, time.perf_counter() - start)


def _to_row(prompt: Conversation, generation: Generation) -> dict[str, object]:
    is_cut = generation.finish_reason == "length"
    # a cut can fall inside a character of several tokens
    text = generation.text.rstrip("\ufffd") if is_cut else generation.text
    source = {} if prompt.source is None else {"source": prompt.source}
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    return {"id": prompt.id, **source, "messages": messages, "finish_reason": "length" if is_cut else "stop"}


def _encode_prompt(prompt: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = render(prompt.messages, tokenizer, name=prompt.id, generation_prompt=True)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids


def prompt_seed(seed: int, name: str) -> int:
    """Return a prompt's own seed, so that its text does not depend on which prompts are answered with it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) >> 1


def _hash_prompts(source: str | Path, prompts: Sequence[Conversation]) -> str:
    """Return the SHA-256 of the prompts' file, or of the loaded prompts if they are not in one file."""
    if Path(source).is_file():
        with Path(source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps([(prompt.id, prompt.messages) for prompt in prompts]).encode()).hexdigest()


def _describe_run(config: DistillConfig, target: Target) -> dict[str, object]:
    """Return what may change from one run into the same output to the next, for the record."""
    own = {name: vars(config)[name] for name in ("batch_size", "limit", "skip_long")}
    versions = {"python": platform.python_version()} | dict(_versions("torch", "transformers", "gorgon"))
    places = {"target": target.name, "prompts": str(config.prompts), "device": str(target.device)}
    return {"started": _now(), **places, **own, "versions": versions}


def _versions(*packages: str) -> Iterator[tuple[str, str]]:
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _list_ids(names: Sequence[str]) -> str:
    return f"{len(names)} prompts ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run `python -m data.distill`."""
    parser = argparse.ArgumentParser(
        prog="python -m data.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shown = "(default: %(default)s)"
    add("--target", required=True, help="model that answers: folder or name on the hub")
    add("--prompts", required=True, help="JSONL or Parquet file, folder, or name on the hub (name:split)")
    add("--out", required=True, type=Path, help="JSONL file to write, or to continue; provenance goes to OUT.meta.json")
    add("--max-new-tokens", type=int, default=512, help=f"longest answer in tokens {shown}")
    add("--batch-size", type=int, default=32, help=f"prompts answered at once; memory grows with it {shown}")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default); 1 samples from the target as it is")
    add("--top-p", type=float, default=1.0, help=f"sample from the likeliest tokens of this total probability {shown}")
    add("--seed", type=int, default=0, help=f"with a prompt's id it fixes the prompt's answer {shown}")
    add("--limit", type=int, help="answer only the first so many prompts; may be raised later to go on")
    add("--dtype", default="auto", help="float32, bfloat16, float16, or auto, the checkpoint's own (default)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--skip-long", action="store_true", help="leave out prompts that do not fit into the context with their answer")
    try:
        print(distill(DistillConfig(**vars(parser.parse_args(argv)))))
    except (ValueError, OSError, UnsupportedTargetError) as error:
        parser.exit(1, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; run the same command to go on\n")


if __name__ == "__main__":
    main()
