"""What this machine has left: memory and disk."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


def resident() -> int:
    """Return the bytes of memory that this process holds; where the system does not say, the most it ever held."""
    return _of_this_process("VmRSS")


def peaks(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process held so far in each place: "memory", and "GPU memory" on a GPU."""
    most = {"memory": _of_this_process("VmHWM")}
    return {"GPU memory": torch.cuda.max_memory_allocated(device), **most} if device.type == "cuda" else most


def _of_this_process(name: str) -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return _kib(status, name) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(system: Path = Path("/")) -> int | None:
    """Return the bytes of memory that processes can still have, within the control group's limit; None if unknown.

    Args:
        system: Root of the file system, for tests.
    """
    info = system / "proc/meminfo"
    found = [_kib(info, "MemAvailable") * 1024] if info.exists() else []
    for folder, limit, used in _groups(system):
        text = (folder / limit).read_text().strip()
        if text.isdigit():  # else there is none: "max"
            found.append(max(0, int(text) - int((folder / used).read_text()) + _reclaimable(folder)))
    return min(found) if found else None


def free_on_device(device: torch.device) -> int:
    """Return the bytes that torch can still have of a GPU."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def disk_of(path: Path) -> tuple[int, int]:
    """Return number and free bytes of the file system on which `path`, which need not exist, would be."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return os.stat(there).st_dev, shutil.disk_usage(there).free


def _kib(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def _groups(system: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each control group around this process that may limit memory, and its files of limit and use."""
    listing = system / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = system / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = system / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / path.strip("/")
        for folder in (own, *own.parents):  # a container may see its own group as the root
            if folder.is_relative_to(root) and all((folder / name).exists() for name in names):
                yield folder, *names


def _reclaimable(folder: Path) -> int:
    """Return the bytes of files' pages that the group could drop."""
    stat = folder / "memory.stat"
    lines = [line.split() for line in stat.read_text().splitlines()] if stat.exists() else []
    return sum(int(line[1]) for line in lines if line[0] == "inactive_file")
