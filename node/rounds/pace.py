"""How long inner steps take, and how many of them make a round: k, or what fits into the others' time for k. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Literal

from node.rounds.meeting import Bounds, RoundProgress

TIMED_STEPS = 16
# Times the median: longer steps count as this long. The first step waits for others to start, and one that meets a
# dead peer for its deadline; but where microbatches come at random, long steps belong to the mean.
LONGEST_STEP = 4.0
TIMED_PAUSES = 5
STALLED_STEPS = 3  # a step that takes this many times its time, and more than the window, says nothing
FURTHEST = 4  # times k, or a part of it: beyond that a replica's progress would no longer be comparable


class Tempo:
    """Mutable state: the times of the last inner steps and ends of rounds, and when the present step began."""

    def __init__(self, now: float) -> None:
        self._steps: deque[float] = deque(maxlen=TIMED_STEPS)
        self._pauses: deque[float] = deque(maxlen=TIMED_PAUSES)
        self._step_began = self._round_ended = now

    def step_done(self, seconds: float, now: float) -> None:
        self._steps.append(seconds)
        self._step_began = now

    def round_ended(self, now: float) -> None:
        self._round_ended = now

    def round_began(self, now: float) -> None:
        self._pauses.append(now - self._round_ended)
        self._step_began = now

    @property
    def is_known(self) -> bool:
        """Whether there was a step to time."""
        return bool(self._steps)

    @property
    def pause(self) -> float:
        """Seconds between the last inner step of a round and the beginning of the next round."""
        return median(self._pauses) if self._pauses else 0.0

    def progress(self, now: float, steps: int) -> RoundProgress:
        """After so many inner steps of the round."""
        return RoundProgress(now, steps, self._step_seconds(), now - self._step_began)

    def _step_seconds(self) -> float:
        if not self._steps:
            return 0.0
        longest = LONGEST_STEP * median(self._steps)
        return fmean(min(seconds, longest) for seconds in self._steps)

    def is_stalled(self, now: float, bounds: Bounds) -> bool:
        """Whether nobody can say when this round will end."""
        here = self.progress(now, 0)
        slack = max(STALLED_STEPS, bounds.ends_at - bounds.nominal)
        return not self.is_known or here.into_step > slack * here.step_seconds


def steps_of_round(
    pace: Literal["steps", "time"], inner_steps: int, own_rate: float, rates: Sequence[float]
) -> int:
    """The nominal number of inner steps of a replica's next round, from k/4 to 4k; k with the pace "steps".

    `rates` are the speeds of the stage's other replicas as they announce them, in any one unit per second;
    not positive means not known yet. The median step time decides, so that a few replicas which announce
    nonsense change little.
    """
    known = [rate for rate in rates if rate > 0]
    if pace == "steps" or own_rate <= 0 or not known:
        return inner_steps
    step_seconds = median(1 / rate for rate in [own_rate, *known])
    fitting = inner_steps * step_seconds * own_rate
    return max(1, round(min(max(fitting, inner_steps / FURTHEST), inner_steps * FURTHEST)))
