"""Let the target answer prompts, so that heads are trained on what it would say itself.

Everything that can be wrong with the prompts, the settings or the output is found before the model is loaded. A run
that was killed is continued by the same command: finished batches are on disk and are not made again. A row depends on
its prompt and the settings, not on when it was made or on the other rows of its batch (but for rounding).

`accelerate launch -m data.distill ...` (or torchrun) shares the batches among its processes, which may be others when
the run is continued; the output is that of one process.

With --server an OpenAI-compatible server (vLLM, SGLang, llama.cpp's, TGI) answers. --target still names the model: its
tokenizer and chat template say which prompts fit, and how many tokens the server must make of each, so that answers to
prompts in another format are refused. Same rows, same way to go on; the texts are the server's, whose arithmetic and
random numbers are not ours.
"""

import argparse
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.answers import AnswerFile, load_meta, read_answers
from data.ask_server import ask_all
from data.card import describe_run, now, save_provenance
from data.conversations import Conversation
from data.decontaminate import Exclusion, exclude
from data.distill_config import DistillConfig, Summary, Tally
from data.in_process import answer_batches
from data.processes import Processes, find_parts
from data.questions import count_tokens, drop_long, hash_prompts, list_ids, load_limits, load_prompts, sort_windows
from data.server import Server, ServerError
from decode import Target, UnsupportedTargetError


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a run has to do, found out without loading the target."""

    batches: list[list[Conversation]]
    """All prompts in the order of their answers, done or not: batches do not depend on where a run stopped."""
    lengths: dict[str, int]
    settings: dict[str, object]
    """What may not change while one output is filled."""
    counts: dict[str, object]
    exclusion: Exclusion
    tokenizer: PreTrainedTokenizerBase
    server: Server | None
    model: dict[str, Any]
    """What the server says of the model that answers."""


def distill(config: DistillConfig, target: Target | None = None, processes: Processes | None = None) -> Summary:
    """Answer the prompts that have no answer in `config.out` yet.

    Rows are `{"id", "source" (if the prompt has one), "messages", "finish_reason"}` with the answer as the last message
    and "stop" (the target ended it) or "length". How they were made is written to `<out>.meta.json` first, and as a
    dataset card to `<out>.README.md`.

    Args:
        config: Target, prompts, output and how to answer.
        target: A loaded target; by default `config.target` is loaded, unless a server answers.
        processes: Those that share the prompts; by default this one is alone.

    Returns:
        What was done, by all processes; the first one knows all finish reasons, others only their own.

    Raises:
        ValueError: If a prompt is broken, empty, answered or too long; if the output cannot be written, is corrupt, or
            was begun with other settings. Answers on disk stay as they are.
        ServerError: If the server does not answer, or not as the target would. Answers that came are on disk.
    """
    start, tally, processes = time.perf_counter(), Tally(), processes or Processes()
    job = _prepare(config, target, processes)
    with ExitStack() as stack:
        parts = find_parts(config.out) if processes.is_first else []
        out = stack.enter_context(closing(AnswerFile(config.out))) if processes.is_first else None
        if out is not None:
            load_meta(out, job.settings, parts)
            if parts:
                out.take_over(parts)
        processes.add_up()
        if target is None and job.server is None:
            target = Target.from_pretrained(config.target, dtype=config.dtype, device=processes.device(config.device))
        record = None if out is None else _begin_record(job, config, out, target, processes.count)
        processes.add_up()
        try:
            own = _answer(job, config, out, target, processes, tally)
            new_answers, new_tokens = processes.add_up(tally.new_answers, tally.new_tokens)
            if out is not None and (parts or processes.count > 1 or job.server is not None):
                out.take_over(find_parts(config.out))
                out.arrange([prompt.id for batch in job.batches for prompt in batch])
        finally:
            if out is not None and record is not None:
                _end_record(record, job, out, tally)
    reasons = dict(Counter((own if out is None else out.finish_reasons).values()))
    left_out = len(job.exclusion.matches) if config.exclude else None
    return Summary(reasons, new_answers, new_tokens, time.perf_counter() - start, tally.failed, left_out)


def _prepare(config: DistillConfig, target: Target | None, processes: Processes) -> _Job:
    """Check prompts, settings and the server."""
    if config.server is not None and (target is not None or processes.count > 1):
        raise ValueError(
            "with a server, no target is loaded and one process asks; raise --concurrency for more at once"
        )
    loaded = load_prompts(config.prompts, limit=config.limit)
    compared, exclusion = exclude(loaded, config.exclude)
    tokenizer, context = load_limits(config.target) if target is None else (target.tokenizer, target.max_length)
    if tokenizer is None:
        raise ValueError("the target has no tokenizer to encode prompts with; give it one: Target(model, tokenizer)")
    server, model = None, {}
    if config.server is not None:
        key = os.environ.get("OPENAI_API_KEY")
        server = Server(config.server, key=key, timeout=config.timeout, retries=config.retries)
        model = server.find_model(config.server_model)
        context = min(context, model.get("max_model_len") or context)
    lengths = count_tokens(compared, tokenizer)
    prompts = drop_long(compared, lengths, context, config)
    ordered, size = (sort_windows(prompts, lengths), config.batch_size) if server is None else (prompts, 1)
    settings: dict[str, object] = {
        name: vars(config)[name] for name in ("max_new_tokens", "temperature", "top_p", "seed")
    }
    settings |= {"prompts_sha256": hash_prompts(config.prompts, loaded), "exclude_sha256": exclusion.sha256}
    settings["server_model"] = model.get("id")
    return _Job(
        batches=[ordered[first : first + size] for first in range(0, len(ordered), size)],
        lengths=lengths,
        settings=settings,
        counts={
            "prompts": len(prompts), "too_long": len(compared) - len(prompts), "left_out": len(exclusion.matches),
        },
        exclusion=exclusion,
        tokenizer=tokenizer,
        server=server,
        model=model,
    )  # fmt: skip


def _answer(
    job: _Job,
    config: DistillConfig,
    out: AnswerFile | None,
    target: Target | None,
    processes: Processes,
    tally: Tally,
) -> dict[str, str]:
    """Answer this process's share of what is left; return how the answers of its file ended."""
    done = read_answers(config.out) if out is None else out.finish_reasons
    rest = ([prompt for prompt in batch if prompt.id not in done] for batch in job.batches)
    batches = processes.share([batch for batch in rest if batch])
    finished = sum(prompt.id in done for batch in job.batches for prompt in batch)
    total = finished + sum(map(len, batches))
    with ExitStack() as stack:
        if out is not None and processes.count == 1:
            answers = out
        else:
            answers = stack.enter_context(closing(AnswerFile(processes.part(config.out))))
        progress: tqdm[NoReturn] = stack.enter_context(
            tqdm(
                total=total, initial=finished, desc="distill", unit=" prompts", smoothing=0,
                disable=not processes.is_first,
            )
        )  # fmt: skip
        answers.drop_torn_line()
        if job.server is not None:
            prompts = [prompt for batch in batches for prompt in batch]
            ask_all(prompts, job.lengths, answers, job.server, job.model, config, tally, progress)
        else:
            assert target is not None  # loaded where no server is asked
            answer_batches(batches, answers, target, job.tokenizer, config, tally, progress)
        return answers.finish_reasons


def _begin_record(
    job: _Job, config: DistillConfig, out: AnswerFile, target: Target | None, processes: int
) -> dict[str, Any]:
    """Return the record of how the answers are made, which is on disk before the first of them."""
    places: dict[str, object] = {"target": config.target}
    if target is not None:
        job.settings.update({"fingerprint": target.fingerprint, "dtype": target.precision})
        places = {"target": target.name, "device": str(target.device)}
    if job.server is not None:
        places["server"] = job.server.host
    record = load_meta(out, job.settings) or {"settings": job.settings, "created": now(), "runs": []}
    record["runs"].append(describe_run(config, places, processes))
    record["counts"] = job.counts | {"finish_reasons": dict(Counter(out.finish_reasons.values()))}
    record.pop("failed", None)
    if job.server is not None:
        record.setdefault("template", {"same": 0, "other": 0})
    if config.exclude:
        record["decontamination"] = job.exclusion.describe()
    save_provenance(config.out, record)
    return record


def _end_record(record: dict[str, Any], job: _Job, out: AnswerFile, tally: Tally) -> None:
    """Write what came of the run, however it ended."""
    reasons = Counter(out.finish_reasons.values())
    for part in find_parts(out.path):  # still there if the run was stopped
        reasons.update(read_answers(part).values())
    record["counts"] = job.counts | {"finish_reasons": dict(reasons)}
    if tally.failed:
        record["failed"] = tally.failed
    if job.server is not None:
        record["template"]["same"] += tally.same_lengths
        record["template"]["other"] += tally.other_lengths
    save_provenance(out.path, record)


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m data.distill`; its names are those of `DistillConfig`."""
    parser = argparse.ArgumentParser(
        prog="python -m data.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shown = "(default: %(default)s)"
    add("--target", required=True, help="model that answers: folder or name on the hub")
    add("--prompts", required=True, help="JSONL or Parquet file, folder, or name on the hub (name:split)")
    add(
        "--out", required=True, type=Path,
        help="JSONL file to write, or to continue; OUT.meta.json and OUT.README.md (a dataset card) say how",
    )  # fmt: skip
    add("--exclude", nargs="+", default=(), metavar="FILE", help="evaluation prompts; prompts that match are left out")
    add("--max-new-tokens", type=int, default=512, help=f"longest answer in tokens {shown}")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default); 1 samples from the target as it is")
    add("--top-p", type=float, default=1.0, help=f"sample from the likeliest tokens of this total probability {shown}")
    add("--seed", type=int, default=0, help=f"with a prompt's id it fixes the prompt's answer {shown}")
    add("--limit", type=int, help="answer only the first so many prompts; may be raised later to go on")
    add("--skip-long", action="store_true", help="leave out prompts that do not fit into the context with their answer")
    add = parser.add_argument_group("the target decodes here").add_argument
    add("--batch-size", type=int, default=32, help=f"prompts answered at once; memory grows with it {shown}")
    add("--dtype", default="auto", help="float32, bfloat16, float16, or auto, the checkpoint's own (default)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one; with several processes, one each)")
    add = parser.add_argument_group("a server answers; OPENAI_API_KEY is its key, if it wants one").add_argument
    add("--server", metavar="URL", help="such as http://localhost:8000/v1")
    add("--server-model", metavar="NAME", help="model to ask, as the server names it (default: the only one it serves)")
    add("--concurrency", type=int, default=64, help=f"prompts asked at once {shown}")
    add("--timeout", type=float, default=600.0, help=f"seconds to wait for an answer {shown}")
    add(
        "--retries",
        type=int,
        default=10,
        help=f"how often a failed request is repeated, waiting longer each time {shown}",
    )
    add("--any-template", action="store_true", help="accept a server that renders prompts otherwise than the target")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run `python -m data.distill`."""
    parser = create_parser()
    options = vars(parser.parse_args(argv))
    processes = Processes.join()
    go_on = "answers that came are kept; run the same command to go on"
    try:
        summary = distill(DistillConfig(**options | {"exclude": tuple(options["exclude"])}), processes=processes)
    except (ValueError, OSError, UnsupportedTargetError) as error:
        parser.exit(1, f"error: {error}\n")
    except ServerError as error:
        parser.exit(1, f"error: {error}\n{go_on}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; run the same command to go on\n")
    finally:
        processes.leave()
    if processes.is_first:
        print(summary)
    if summary.failed:
        reasons = "".join(f"  {name}: {reason}\n" for name, reason in list(summary.failed.items())[:10])
        parser.exit(1, f"error: without an answer: {list_ids(list(summary.failed))}\n{reasons}{go_on}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    main()
