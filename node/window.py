"""How many microbatches of the next inner step run forward before this one is applied. Pure.

While a gradient is on its way back, the device computes other microbatches. It never waits when those in flight
keep it busy for as long as an answer takes. What an answer takes is the least of the last ones: the mean would count
the queue that the microbatches in flight are themselves, and grow with it (Cardwell et al., BBR, ACM Queue 14(5),
2016).
"""

from __future__ import annotations

import math
from collections import deque

MEASURED = 16
LEAST = 2  # one is computed while the next is fetched, whatever was measured


class Window:
    """Mutable state: the last answer times."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._answers: deque[float] = deque(maxlen=MEASURED)

    def ahead(self, answer_seconds: float, compute_seconds: float) -> int:
        """After another answer, given the time that this device computes for one microbatch; at most a batch."""
        self._answers.append(answer_seconds)
        hidden = min(self._answers) / max(compute_seconds, 1e-6)
        return max(LEAST, min(self._batch, math.ceil(hidden) + 1))
