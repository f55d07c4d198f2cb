"""How much of a text a local swarm's losses are measured on: training needs the processors. Pure."""

from __future__ import annotations

SHARE = 1 / 20  # of the time that goes to measuring while the nodes train
LEAST_PAUSE = 30.0  # seconds between two measurements
LAST_SECONDS = 20.0  # that the measurements at the end may take together
FEWEST = 8  # sequences: fewer tell nothing, so a slower machine measures more rarely


class EvaluationBudget:
    """Decides by the seconds that measurements took.

    Mutable state: the seconds that a sequence is expected to take, 0 before the first measurement, and those of the
    last measurement.
    """

    def __init__(self) -> None:
        self._each = 0.0
        self._last = 0.0

    def note(self, sequences: int, seconds: float) -> None:
        """Note a measurement; one that was much quicker than expected is believed by half."""
        each = seconds / max(1, sequences)
        self._each = max(each, (self._each + each) / 2)
        self._last = seconds

    def on_the_way(self, wanted: int) -> int:
        """The sequences, at most `wanted`, of a measurement while the nodes train."""
        return self._within(LEAST_PAUSE * SHARE, wanted)

    def at_the_end(self, wanted: int, times: int) -> int:
        """The sequences, at most `wanted`, that can be measured so many `times` at the end."""
        return self._within(LAST_SECONDS / times, wanted)

    def pause(self) -> float:
        """Seconds to wait after the last measurement, so that measuring keeps to its share of the time."""
        return max(LEAST_PAUSE, self._last * (1 / SHARE - 1))

    def _within(self, seconds: float, wanted: int) -> int:
        if not self._each:
            return min(wanted, FEWEST)
        return min(wanted, max(FEWEST, int(seconds / self._each)))
