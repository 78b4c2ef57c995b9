"""Memory that was freed goes back to the system."""

import platform
from pathlib import Path

import pytest
import torch

from heads.memory import give_back


def resident() -> int:
    """MiB of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed and can be told")
def test_what_was_freed_in_pieces_goes_back():
    give_back()
    before = resident()
    pieces = [torch.ones(1 << 14) for _ in range(2048)]  # 64 KiB each, which the system does not give one by one
    kept = pieces[::64]
    del pieces
    assert resident() - before > 96  # freed, but kept for later
    give_back()
    assert resident() - before < 32
    assert all(piece.sum() == 1 << 14 for piece in kept)


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr("heads.memory.ctypes", None)
    give_back()
