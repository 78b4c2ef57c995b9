"""One training run from its config to its last checkpoint, for any kind of head.

A run is a folder, `<run.dir>/<run.name>/`: `run.yaml` (the config), `metrics.jsonl`, `checkpoints/`, and the head
folders `best/` (highest eval/tokens_per_step) and `last/`. The same command on the same folder continues it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from data.batches import BatchPlan
from data.conversations import Encoded
from data.features import size_text
from data.vocabulary import SupervisedTokens
from decode import Target, UnsupportedTargetError
from heads.base import Head, HeadConfig
from heads.checkpoint import HeadNotes, save_head
from train.checkpoints import Checkpoints, Progress, writing_run
from train.command_line import PLAN, THROUGHPUT, load_config
from train.config import ConfigError, OptimConfig, RunConfig, naming, require
from train.config_file import flat
from train.distributed import WholeHead, prepare, start_accelerator
from train.drift import make_evaluation
from train.evaluate import Evaluation
from train.frozen import find_features, load_target
from train.inputs import Inputs, load_inputs
from train.journal import Journal
from train.loop import Evaluate, Trainer, make_optimizer, schedule_factor
from train.memory_plan import Work
from train.pace import Pace
from train.plan import Plan, check_loading, make_plan
from train.probe import probe
from train.room import peaks
from train.run_folder import open_folder
from train.start import start_from
from train.throughput import throughput
from train.tracking import check_tracker

BuildHead = Callable[[RunConfig, Target, Sequence[Encoded], Callable[[str], None]], Head]
"""Makes the untrained head from the config, the target and the training data; the last argument prints a line."""


Rehearsal = Callable[[Accelerator, Plan, Callable[[str], None]], None]
"""What is done instead of a run: it prints with the last argument, and writes nothing."""
REHEARSALS: Mapping[str, Rehearsal] = {PLAN: probe, THROUGHPUT: throughput}


class SaveHead(Protocol):
    """Writes a head folder; `heads.save_head` is one."""

    def __call__(self, head: Head, path: Path, *, target: Target, notes: HeadNotes) -> None:
        """Write `head`, trained for `target`, to `path`, replacing what is there."""
        ...


def train(
    config: RunConfig, build_head: BuildHead, save: SaveHead = save_head, rehearsal: Rehearsal | None = None
) -> None:
    """Make the run that `config` describes, or continue it, and save its head with `save`; or do `rehearsal` instead.

    Raises:
        ValueError: If the config, the data, the target or what the run's folder holds do not allow it; nothing was
        changed. FloatingPointError: If a loss or gradient is not finite.
    """
    check_tracker(config.run.tracker)
    accelerator = start_accelerator(config)
    checkpoints = Checkpoints(config.run.folder / "checkpoints", config.run.keep)
    with naming("run.dir", "choose another --run.dir or --run.name"):
        lock = open_folder(accelerator, config, checkpoints, dry=rehearsal is not None)
    with lock:
        set_seed(config.run.seed)
        journal = Journal(accelerator, config.run.folder / "metrics.jsonl")
        with naming(f"target.name={config.target.name}", "name a folder or a model of the hub"):
            check_loading(config, accelerator)
            target = load_target(config, accelerator)
        inputs = load_inputs(config, target)
        journal.say(inputs.describe())
        progress = _progress(checkpoints, inputs.hash(target))
        total = config.optim.total_steps(len(inputs.samples))
        if progress.step >= total and (not inputs.prompts or progress.evaluated_step == progress.step):
            journal.say(f"run {config.run.name} was finished before: {_result(config, progress)}")
            journal.say("Raise optim.steps or optim.epochs to train longer, or start another with --run.name.")
        else:
            head = build_head(config, target, inputs.samples, journal.say)
            if config.run.init is not None and checkpoints.newest() is None:
                start_from(head, config.run.init, target)
                journal.say(f"the head starts from {config.run.init}")
            steps = range(progress.step, total)
            plan = make_plan(accelerator, config, target, head, inputs, steps, build_head, journal.say)
            if rehearsal is not None:
                rehearsal(accelerator, plan, journal.say)
            elif _fit(accelerator, config, target, head, save, inputs, checkpoints, journal, progress, plan.work):
                journal.say(f"run {config.run.name} is finished: {_result(config, progress)}")
            else:
                journal.say(
                    f"stopped at step {progress.step} of {total}, which is saved; the same command continues it"
                )
            held = [f"{place} {size_text(count)}" for place, count in peaks(target.device).items()]
            journal.say(f"peak: {', '.join(held)}")
        # the DDP wrapper must be gone before the process group, or gloo can deadlock
        accelerator.free_memory()
        gc.collect()
        accelerator.end_training()


def run_command(
    heads: Mapping[str, type[HeadConfig]],
    build_head: BuildHead,
    description: str,
    argv: Sequence[str] | None,
    save: SaveHead = save_head,
) -> None:
    """Run a trainer's command line; errors a user can mend are printed without a traceback.

    Args:
        heads: Head types and their configs, the default first.
        build_head: Makes the untrained head.
        description: Shown by `--help`.
        argv: Arguments; None for those of the process.
        save: Writes a head folder.
    """
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        asked = [word for word in words if word in REHEARSALS]
        require(len(asked) <= 1, f"{' and '.join(asked)} are two commands; give one")
        config = load_config(heads, [word for word in words if word not in REHEARSALS], description)
        train(config, build_head, save, REHEARSALS[asked[0]] if asked else None)
    except (ValueError, OSError, FloatingPointError, UnsupportedTargetError) as error:
        raise SystemExit(f"error: {error}") from error


def _progress(checkpoints: Checkpoints, inputs: str) -> Progress:
    newest = checkpoints.newest()
    if newest is None:
        return Progress(inputs=inputs)
    progress = checkpoints.read(newest)
    if progress.inputs != inputs:
        raise ConfigError(
            f"the target or the data of {checkpoints.folder.parent} have changed since it was started, so it cannot be "
            "continued; start another run with --run.name, or delete the folder"
        )
    return progress


def _result(config: RunConfig, progress: Progress) -> str:
    best = f", best {progress.best:.3f} tokens per step at step {progress.best_step}" if progress.best_step >= 0 else ""
    name = "best" if progress.best_step >= 0 else "last"
    return f"{progress.step} steps{best}; the head is {config.run.folder / name}"


def _fit(
    accelerator: Accelerator,
    config: RunConfig,
    target: Target,
    head: Head,
    save: SaveHead,
    inputs: Inputs,
    checkpoints: Checkpoints,
    journal: Journal,
    progress: Progress,
    work: Work,
) -> bool:
    """Train and return whether the run came to its end. What is prepared for several processes lives in here only."""
    optim, total_steps = config.optim, work.steps.stop
    whole = WholeHead(accelerator, head)
    prepared, optimizer, scheduler = prepare(accelerator, head, *_optimizer(optim, head, total_steps))
    newest = checkpoints.newest()
    if newest is not None:
        checkpoints.load(accelerator, newest, config.run.seed)
        journal.say(f"continuing at step {progress.step} from {newest}")
    decoded = whole.head
    evaluation = make_evaluation(accelerator, target, decoded, inputs.prompts, config.eval) if inputs.prompts else None
    source = find_features(accelerator, config, target, head.feature_layers, inputs, journal.say)
    journal.say(source.describe())
    parameters = sum(parameter.numel() for parameter in whole.head.parameters())
    journal.say(f"head: {head.kind}, {parameters:,} trained parameters; {total_steps} steps of {optim.batch_size}")

    fixed = _training_notes(config, target, head, inputs)

    def write_head(name: str, measured: Mapping[str, float]) -> None:
        whole.gather()
        if accelerator.is_main_process:
            notes = HeadNotes(training={**fixed, "step": progress.step}, measured=dict(measured))
            with writing_run():
                save(whole.head, config.run.folder / name, target=target, notes=notes)

    trainer = Trainer(
        accelerator=accelerator,
        head=prepared,
        optimizer=optimizer,
        scheduler=scheduler,
        source=source,
        plan=BatchPlan(len(inputs.samples), optim.batch_size, config.run.seed),
        config=config,
        total_steps=total_steps,
        progress=progress,
        checkpoints=checkpoints,
        journal=journal,
        evaluate=None if evaluation is None else _showing(evaluation, journal, progress),
        save_head=write_head,
        pace=Pace(work, source, journal.say),
        gather=whole.gather,
    )
    facts = {"head.parameters": parameters, "data.samples": len(inputs.samples)}
    with journal.opened(config, progress, total_steps, facts):
        return trainer.run()


def _showing(evaluation: Evaluation, journal: Journal, progress: Progress) -> Evaluate:
    """Return `evaluation`, with the texts that it saw shown."""

    def evaluate(give_up: Callable[[], bool]) -> Mapping[str, float] | None:
        measured = evaluation(give_up)
        if measured is not None:
            journal.show(progress.step, evaluation.samples)
        return measured

    return evaluate


def _optimizer(
    optim: OptimConfig, head: Head, total_steps: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return the optimiser, with a group for each learning rate, and the schedule of all."""
    optimizer = make_optimizer(head, optim)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factor(optim, total_steps))


def _training_notes(config: RunConfig, target: Target, head: Head, inputs: Inputs) -> dict[str, object]:
    """Return what a head folder records of the run that made it."""
    kept = {key: value for key, value in flat(config).items() if key.partition(".")[0] in ("data", "optim")}
    notes = {**kept, "precision": config.precision, "target.precision": target.precision, "seed": config.run.seed}
    if config.run.init is not None:
        notes["init"] = config.run.init
    if head.vocabulary is not None:
        measured = SupervisedTokens(inputs.samples, target.vocab_size).measure(head.vocabulary.cpu())
        notes["vocabulary"] = measured.notes()
    return notes
