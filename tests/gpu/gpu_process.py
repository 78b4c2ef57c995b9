"""A command with a time limit, none of whose processes outlives it."""

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "GORGON_GPU_PART"
"""In the environment of a command and of all that it starts, whatever session they move to."""
GRACE = 5.0
"""Seconds to end in, before what is still there is killed."""
POLL = 0.2


@dataclass(frozen=True)
class Outcome:
    """What became of a command."""

    status: str
    """done, failed, out of time, stopped; or of a part that was not started, dropped or missing something."""
    code: int | None
    """Exit status, where it came to one."""
    seconds: float


def run(
    command: Sequence[str],
    *,
    output: Path,
    errors: Path,
    limit: float,
    stop: threading.Event,
    folder: Path,
    environment: Mapping[str, str],
) -> Outcome:
    """Run a command to its end, for at most `limit` seconds and until `stop` is set.

    Args:
        command: Program and arguments.
        output: File for what it prints.
        errors: File for what it complains about.
        limit: Seconds.
        stop: Ends it early.
        folder: Where it runs.
        environment: Variables besides those of this process.
    """
    mark = uuid.uuid4().hex
    start = time.monotonic()
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env={**os.environ, **environment, MARK: mark},
            start_new_session=True,
        )
        status = None
        while process.poll() is None and status is None:
            left = limit - (time.monotonic() - start)
            if stop.wait(max(0.0, min(POLL, left))):
                status = "stopped"
            elif left <= 0:
                status = "out of time"
        seconds = time.monotonic() - start
        code = process.poll() if status is None else None
        end(mark)
        process.wait()
    return Outcome(status or ("done" if code == 0 else "failed"), code, seconds)


def end(mark: str) -> None:
    """End all processes that carry a mark: ask, wait, kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        found = marked(mark)
        for process in found:
            try:
                process.send_signal(number)
            except psutil.Error:  # it has just ended
                continue
        psutil.wait_procs(found, timeout=GRACE)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that carry a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # ended, or of another user
            continue
    return found
