"""Files that a crash leaves whole: written beside their place, synced to disk, renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, sync it, rename it to `path`: a crash leaves the old file or the new.

    Whoever the umask allows may read it; safetensors makes files for their owner alone.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    mode = stat.S_IMODE(temporary.stat().st_mode)
    write(temporary)
    temporary.chmod(mode)
    sync_entry(temporary)
    temporary.replace(path)
    sync_entry(path.parent)


def sync_entry(path: Path) -> None:
    """Wait until one file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> None:
    """Make sure, before hours of work, that a report can be written to `path`.

    Raises:
        OSError: If it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{path.parent} is a file, but should be a folder, for {path.name}") from None
    path.open("a").close()
