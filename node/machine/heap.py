"""How the process holds its memory: what it frees it keeps, for it will soon need as much again."""

from __future__ import annotations

import ctypes
import gc
import sys

MIB = 2**20
# glibc's mallopt(3); other C libraries have none of it
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = 2**31 - 1
_LARGEST_IN_THE_HEAP = 32 * MIB  # as far as glibc lets it be set
_TAKEN_AT_A_TIME = 16 * MIB


def keep_freed_memory() -> bool:
    """Let memory of tensors and messages that was freed stay with the process; False where that cannot be set.

    glibc gives large blocks back to the system at once and takes them anew a moment later, page by page, each page
    filled with zeros: a sixth of the time of an exchange. The process then stays as large as it was at its largest.
    """
    libc = _glibc()
    if libc is None:
        return False
    settings = {_MMAP_THRESHOLD: _LARGEST_IN_THE_HEAP, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _TAKEN_AT_A_TIME}
    taken = [libc.mallopt(setting, value) == 1 for setting, value in settings.items()]
    return all(taken)


def give_back_freed_memory() -> None:
    """What was freed until now goes to the system, so that what the process holds is what it uses."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def freed_memory() -> int:
    """Bytes that were freed and may be used again without asking the system; 0 where glibc does not tell."""
    libc = _glibc()
    try:
        tell = libc.mallinfo2 if libc is not None else None  # since 2.33
    except AttributeError:
        return 0
    if tell is None:
        return 0
    tell.restype = _HeapFigures
    return int(tell().free)


class _HeapFigures(ctypes.Structure):
    """`struct mallinfo2`, mallinfo(3)."""

    _fields_ = (
        ("beside", ctypes.c_size_t * 8),
        ("free", ctypes.c_size_t),
        ("at_the_top", ctypes.c_size_t),
    )


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None
