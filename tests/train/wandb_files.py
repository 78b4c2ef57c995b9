"""Reads the file that an offline run of wandb leaves."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2


@dataclass
class WandbRun:
    run_id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    system: set[str] = field(default_factory=set)
    """Names of the system's metrics."""
    artifacts: list[Any] = field(default_factory=list)
    """wandb's ArtifactRecord, of those that the run made."""
    exit_code: int | None = None


def records(path: Path) -> Iterator[Any]:
    """LevelDB log framing behind a header of 7 bytes."""
    data, position, buffer = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        buffer += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(buffer)
            buffer = b""
            yield record


def values(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def read(path: Path) -> WandbRun:
    run = WandbRun()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.project = record.run.run_id, record.run.project
            run.config |= values(record.run.config.update)
        elif kind == "config":
            run.config |= values(record.config.update)
        elif kind == "history":
            run.history.append(values(record.history.item))
        elif kind == "stats":
            run.system |= {item.key for item in record.stats.item}
        elif kind == "artifact":
            run.artifacts.append(record.artifact)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def read_ended(folder: Path) -> list[WandbRun]:
    """Return what each start of the run in `folder` left, once wandb's own process has ended the last."""
    deadline = time.monotonic() + 60
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)
    assert files
    while True:
        runs = [read(path) for path in files]
        if runs[-1].exit_code is not None or time.monotonic() > deadline:
            return runs
        time.sleep(0.1)
