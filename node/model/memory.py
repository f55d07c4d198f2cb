"""How the process holds its memory: what it frees it keeps, for it will soon need as much again."""

from __future__ import annotations

import ctypes
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
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_MMAP_THRESHOLD: _LARGEST_IN_THE_HEAP, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _TAKEN_AT_A_TIME}
    taken = [mallopt(setting, value) == 1 for setting, value in settings.items()]
    return all(taken)
