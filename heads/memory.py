"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import platform


def give_back() -> None:
    """Let the C library return what was freed: glibc keeps memory that is freed in pieces, as weights are, for itself.

    Elsewhere nothing is done.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
