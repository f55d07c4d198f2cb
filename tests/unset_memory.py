"""Memory that nobody has set, as bad as it can be: torch fills it with NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unset_memory_is_nan() -> Iterator[None]:
    """Have torch fill what `torch.empty` and its like return, which it does where it is to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
