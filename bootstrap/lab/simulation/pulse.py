"""How far a simulated run is, told each ten seconds while it trains."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from node.watch.words import duration

PATIENCE = 10.0  # seconds between two lines


def to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Pulse:
    """Reports step, loss and time left of one run.

    Mutable state: when it began, when something was told last, and the last loss.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        steps: int,
        tell: Callable[[str], None] = to_standard_error,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = (
            f"{facts['method']} {facts['replicas']} × {facts['stages']} k={facts['k']} seed {facts['seed']}"
        )
        self._steps, self._tell, self._clock = steps, tell, clock
        self._began = self._told = clock()
        self.loss: float | None = None

    def look(self, step: int) -> None:
        """Tell how far it is, if nothing was told for `PATIENCE`."""
        now = self._clock()
        if now - self._told < PATIENCE:
            return
        self._told = now
        loss = "" if self.loss is None else f", loss {self.loss:.3f}"
        left = f", about {duration((now - self._began) * (self._steps - step) / step)} left" if step else ""
        self._tell(f"{self._name}: step {step:,} of {self._steps:,}{loss}{left}")
