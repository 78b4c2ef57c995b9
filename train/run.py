"""One training run from its config to its last checkpoint, for any kind of head.

A run is a folder, `<run.dir>/<run.name>/`: `run.yaml` (the config), `metrics.jsonl`, `checkpoints/`, and the head
folders `best/` (highest eval/tokens_per_step) and `last/`. The same command on the same folder continues it.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed

from data.batches import BatchPlan
from data.conversations import Conversation, Encoded, encode_all, load_conversations
from data.features import OnlineFeatures
from decode import Target
from decode.prompts import to_token_ids
from heads.base import Head
from heads.checkpoint import HeadNotes, save_head
from heads.files import write_atomically
from train.checkpoints import Checkpoints, Progress
from train.config import ConfigError, RunConfig, differences, flat, read_flat, to_yaml
from train.evaluate import Evaluation
from train.journal import Journal, check_tracker
from train.loop import Trainer, schedule_factor
from train.model_folder import recover

CONFIG = "run.yaml"
BuildHead = Callable[[RunConfig, Target, Sequence[Encoded], Callable[[str], None]], Head]
"""Makes the untrained head from the config, the target and the training data; the last argument prints a line."""


class SaveHead(Protocol):
    """Writes a head folder; `heads.save_head` is one."""

    def __call__(self, head: Head, path: Path, *, target: Target, notes: HeadNotes) -> None:
        """Write `head`, trained for `target`, to `path`, replacing what is there."""
        ...


@dataclass(frozen=True)
class Inputs:
    """What is trained on and what is evaluated with."""

    samples: Sequence[Encoded]
    prompts: Sequence[list[int]]
    """Token ids, the opening of the answer included."""


def train(config: RunConfig, build_head: BuildHead, save: SaveHead = save_head) -> None:
    """Make the run that `config` describes, or continue it, and save its head with `save`.

    Raises:
        ValueError: If the config, the data, the target or what the run's folder holds do not allow it; nothing was
        changed. FloatingPointError: If a loss or gradient is not finite.
    """
    check_tracker(config.run.tracker)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=config.run.tracker,
        project_dir=str(config.run.folder),
        step_scheduler_with_optimizer=False,  # else accelerate takes a schedule step for each process
    )
    _check_processes(accelerator, config)
    checkpoints = Checkpoints(config.run.folder / "checkpoints", config.run.keep)
    with _open_folder(accelerator, config, checkpoints):
        set_seed(config.run.seed)
        journal = Journal(accelerator, config.run.folder / "metrics.jsonl")
        target = Target.from_pretrained(config.target.name, dtype=config.target.dtype, device=accelerator.device)
        inputs = load_inputs(config, target)
        _say_inputs(journal, inputs)
        progress = _progress(checkpoints, inputs_hash(target, inputs.samples))
        total = config.optim.total_steps(len(inputs.samples))
        if progress.step >= total and (not inputs.prompts or progress.evaluated_step == progress.step):
            journal.say(f"run {config.run.name} was finished before: {_result(config, progress)}")
            journal.say("Raise optim.steps or optim.epochs to train longer, or start another with --run.name.")
        else:
            head = build_head(config, target, inputs.samples, journal.say)
            if _fit(accelerator, config, target, head, save, inputs, checkpoints, journal, progress, total):
                journal.say(f"run {config.run.name} is finished: {_result(config, progress)}")
            else:
                journal.say(
                    f"stopped at step {progress.step} of {total}, which is saved; the same command continues it"
                )
        # the DDP wrapper must be gone before the process group, or gloo can deadlock
        accelerator.free_memory()
        gc.collect()
        accelerator.end_training()


def load_inputs(config: RunConfig, target: Target) -> Inputs:
    """Load and encode the conversations, and set the evaluation's prompts apart.

    Raises:
        ValueError: If the data do not suit the target, or nothing is left to train on.
    """
    if target.tokenizer is None:
        raise ConfigError(f"target {target.name} has no tokenizer; give a folder or name that has one")
    if config.data.max_length > target.max_length:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}, but {target.name} was made for {target.max_length} tokens"
        )
    conversations = load_conversations(config.data.source, limit=config.data.limit)
    wanted = config.eval.num_prompts
    if wanted == 0:
        held_out = []
    elif config.data.eval_prompts is not None:
        held_out = load_conversations(config.data.eval_prompts, limit=wanted)
    else:
        if len(conversations) <= wanted:
            raise ConfigError(
                f"{config.data.source} has {len(conversations)} conversations, and eval.num_prompts={wanted} of them "
                "are held out: nothing is left to train on; lower eval.num_prompts, or set data.eval_prompts"
            )
        # by a hash of the id: files are sorted by length or topic, and their ends are not like the rest
        chosen = {c.id for c in sorted(conversations, key=lambda c: hashlib.sha256(c.id.encode()).digest())[:wanted]}
        held_out = [conversation for conversation in conversations if conversation.id in chosen]
        conversations = [conversation for conversation in conversations if conversation.id not in chosen]
    prompts = [_prompt_ids(config, target, conversation) for conversation in held_out]
    samples = encode_all(conversations, target.tokenizer, max_length=config.data.max_length)
    return Inputs(samples, prompts)


def _prompt_ids(config: RunConfig, target: Target, conversation: Conversation) -> list[int]:
    """Return the tokens of a conversation without its last answer, followed by the opening of an answer."""
    messages = conversation.messages
    token_ids = to_token_ids(target, messages[:-1] if messages[-1]["role"] == "assistant" else messages, raw=False)
    if len(token_ids) + config.eval.max_new_tokens > target.max_length:
        raise ConfigError(
            f"evaluation prompt {conversation.id} has {len(token_ids)} tokens: with eval.max_new_tokens="
            f"{config.eval.max_new_tokens} that is more than the target's {target.max_length}; remove it"
        )
    return token_ids


def inputs_hash(target: Target, samples: Sequence[Encoded]) -> str:
    """Return a hash of the target's weights and of all tokens and masks, in order."""
    digest = hashlib.sha256(target.fingerprint.encode())
    for sample in samples:
        digest.update(array("q", sample.token_ids).tobytes())
        digest.update(bytes(sample.loss_mask))
    return digest.hexdigest()[:16]


def _check_processes(accelerator: Accelerator, config: RunConfig) -> None:
    known = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in known:
        raise ConfigError(
            f"launched as {accelerator.distributed_type.value}: the loop splits batches itself and supports one "
            "process or plain data parallelism (accelerate launch --multi_gpu)"
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", accelerator.mixed_precision):
        raise ConfigError(
            f"accelerate was launched with mixed precision {launched}, but precision is {config.precision}; set the "
            "precision in the config (--precision=bf16) and leave it out of the launch"
        )
    pieces = accelerator.num_processes * config.optim.accumulation
    if config.optim.batch_size % pieces:
        raise ConfigError(
            f"optim.batch_size ({config.optim.batch_size}) must be a multiple of processes x optim.accumulation "
            f"({accelerator.num_processes} x {config.optim.accumulation})"
        )


def _open_folder(accelerator: Accelerator, config: RunConfig, checkpoints: Checkpoints) -> TextIO:
    """Make the run's folder, or check that what is in it can be continued; return the lock that keeps others out."""
    folder = config.run.folder
    probe = folder / f".writable-{os.getpid()}"
    try:
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose another --run.dir or --run.name"
        ) from error
    if checkpoints.newest() is not None:
        changed = differences(read_flat(folder / CONFIG), flat(config))
        if changed:
            lines = "".join(f"\n  {line}" for line in changed)
            raise ConfigError(
                f"{folder} holds a run with another config:{lines}\nStart another run with --run.name, delete the "
                "folder, or undo the change"
            )
    lock = (folder / ".lock").open("w")
    if accelerator.is_main_process:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training {folder}; wait for it or stop it (SIGTERM to the trainer itself, not to "
                "accelerate launch, saves first), or choose another --run.name"
            ) from None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoints.remove_incomplete()
        for name in ("best", "last"):
            recover(config.run.folder / name)
        write_atomically(folder / CONFIG, lambda new: new.write_text(to_yaml(config)))
    accelerator.wait_for_everyone()
    return lock


def _progress(checkpoints: Checkpoints, inputs: str) -> Progress:
    newest = checkpoints.newest()
    if newest is None:
        return Progress(inputs=inputs, tracker_id=uuid.uuid4().hex[:12])
    progress = checkpoints.read(newest)
    if progress.inputs != inputs:
        raise ConfigError(
            f"the target or the data of {checkpoints.folder.parent} have changed since it was started, so it cannot be "
            "continued; start another run with --run.name, or delete the folder"
        )
    return progress


def _say_inputs(journal: Journal, inputs: Inputs) -> None:
    tokens = sum(len(sample.token_ids) for sample in inputs.samples)
    supervised = sum(sum(sample.loss_mask) for sample in inputs.samples)
    journal.say(
        f"data: {len(inputs.samples)} conversations, {tokens} tokens, {supervised / tokens:.1%} of them supervised; "
        f"{len(inputs.prompts)} prompts held out for evaluation"
    )


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
    total_steps: int,
) -> bool:
    """Train and return whether the run came to its end. What is prepared for several processes lives in here only."""
    optim = config.optim
    optimizer = torch.optim.AdamW(head.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factor(optim, total_steps))
    prepared, optimizer, scheduler = accelerator.prepare(head.train(), optimizer, scheduler)
    newest = checkpoints.newest()
    if newest is not None:
        accelerator.load_state(str(newest))
        journal.say(f"continuing at step {progress.step} from {newest}")
    source = OnlineFeatures(target, inputs.samples, int(config.data.feature_memory * 2**30))
    journal.say(source.describe())
    parameters = sum(parameter.numel() for parameter in head.parameters())
    journal.say(f"head: {head.kind}, {parameters:,} trained parameters; {total_steps} steps of {optim.batch_size}")

    def write_head(name: str, measured: Mapping[str, float]) -> None:
        if accelerator.is_main_process:
            kept = {key: value for key, value in flat(config).items() if key.partition(".")[0] in ("data", "optim")}
            training = {**kept, "precision": config.precision, "seed": config.run.seed, "step": progress.step}
            notes = HeadNotes(training=training, measured=dict(measured))
            save(head, config.run.folder / name, target=target, notes=notes)

    journal.open(config, progress, total_steps, {"head.parameters": parameters, "data.samples": len(inputs.samples)})
    try:
        return Trainer(
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
            evaluate=Evaluation(accelerator, target, head, inputs.prompts, config.eval) if inputs.prompts else None,
            save_head=write_head,
        ).run()
    finally:
        journal.close()
