"""Memory that runs out: how it is said, and trying once more with what was kept for later given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from node.machine.heap import give_back_freed_memory

T = TypeVar("T")

# torch's ways to say that an allocation failed; a limit set by ulimit is met so
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def free_caches() -> None:
    """Give back what is kept for later allocations, here and on a GPU."""
    give_back_freed_memory()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def retried(work: Callable[[], T]) -> T:
    """`work()`, once more with caches emptied when memory runs out: it must change nothing when it fails so."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    free_caches()
    return work()
