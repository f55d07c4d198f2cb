"""The run's step at a later stage: what the learning rate and the sentences for people go by.

A stage of one replica behind a stage of two takes two inner steps for each of theirs. With `inner.clock = "run"` each
microbatch carries the step of the replica that drew it, so that stages of unequal width keep one schedule.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from protocol.windows import window

SEEN = 15  # microbatches: one sender that reports another step, among others, moves their median by little
# Estimates that must agree before the clock holds to a step for good, or in a short run as many as half of its steps.
# By chance a sender of a quarter has most of SEEN microbatches, fifteen times in a row: the clock would be at
# the run's end ever after.
AGREED = 4 * SEEN


class RunClock:
    """Estimates the run's step from the steps that microbatches carry. It never goes back.

    Of two replicas of the first stage the quick one ends first, and the slow one's last microbatches carry earlier
    steps: a learning rate that rose again for these would undo what was learned.

    Mutable state: for each of the last microbatches, how far the step it carried was from this replica's; the last
    estimates; the step that all of these agreed on; and the first pair of this replica's step and the run's.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._ahead = deque[int](maxlen=SEEN)
        self._estimates = deque[int](maxlen=max(SEEN, min(AGREED, total_steps // 2)))
        self._reached = 0
        self._first: tuple[int, int] | None = None

    @window
    def __repr__(self) -> str:
        return f"Run: {self._total_steps} steps | Reached: {self._reached} | Seen: {list(self._ahead)}"

    def note(self, carried: int, own: int) -> None:
        """Record that a microbatch of the run's step `carried` counted when this replica had taken `own` steps."""
        self._ahead.append(carried - own)
        self._estimates.append(self._estimate(own))
        if len(self._estimates) == self._estimates.maxlen:
            self._reached = max(self._reached, min(self._estimates))
        if self._first is None:
            self._first = own, carried

    def step(self, own: int) -> int:
        """Return the run's step, from 0 to its end, when this replica has taken `own`: those, while none is known."""
        return max(self._reached, self._estimate(own))

    def _estimate(self, own: int) -> int:
        ahead = (
            median_low(self._ahead.copy()) if self._ahead else 0
        )  # the loop adds while the device's thread reads
        return min(max(0, own + ahead), self._total_steps)

    def own_steps_each(self, own: int) -> float:
        """Return the inner steps that this replica takes for each step of the run; 1 while that is not known."""
        if self._first is None:
            return 1.0
        passed = self.step(own) - self._first[1]
        return max(1, own - self._first[0]) / passed if passed > SEEN else 1.0

    def has_ended(self, own: int) -> bool:
        """Return whether the run is at its last step, as nearly as these microbatches show it."""
        nearly = min(len(self._ahead), self._total_steps // 8)
        return self.step(own) + nearly >= self._total_steps
