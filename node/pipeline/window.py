"""How many microbatches are in flight at a time: between their forward and backward passes here. Pure.

While a gradient is on its way back, the device computes other microbatches. It never waits when those in flight
keep it busy for as long as an answer takes, and each more only takes memory. What an answer takes is the least of a
batch's: the mean would count the queue that the microbatches in flight are themselves, and grow with it (Cardwell et
al., BBR, ACM Queue 14(5), 2016); the first of a batch finds no queue.
"""

from __future__ import annotations

import math
from collections import deque

SPARE = 3  # times what hides the shortest answer: links stall, and peers that others use too take longer
MEASURED = 16


class Window:
    """Mutable state: the last answer times. `most` is what the memory allows."""

    def __init__(self, batch: int, most: int) -> None:
        self._most = most
        self._answers: deque[float] = deque(maxlen=max(MEASURED, batch))

    def in_flight(self, answer_seconds: float, compute_seconds: float) -> int:
        """After another answer, given the time that this device computes for one microbatch."""
        self._answers.append(answer_seconds)
        hidden = math.ceil(min(self._answers) / max(compute_seconds, 1e-6))
        return max(1, min(self._most, SPARE * (hidden + 1)))
