"""When the rounds of two replicas can end together, told by each in seconds from now. Pure.

No clock is compared: each side says how long its own inner steps still take, and the answer is as good as the
replicas' steps are even. A round ends between two inner steps, so the one with the longer steps decides at which
of its own the two meet; the other, with more ends of steps to choose from, follows within one of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST = 1e7  # seconds; the bound of the fields on the wire
SHORTEST_STEP = 1e-6  # seconds; below that a replica does not train, it waits


@dataclass(frozen=True)
class RoundProgress:
    """How far a replica is in its round, at `now` seconds of its own clock."""

    now: float
    steps: int  # inner steps done in this round
    step_seconds: float  # that one takes
    into_step: float = 0.0  # seconds that the present one has taken so far

    def until(self, steps: int) -> float:
        """Seconds until the end of that inner step; of the present one when that step is over."""
        ahead = max(steps, self.steps + 1) - self.steps
        return ahead * self.step_seconds - min(self.into_step, self.step_seconds)


@dataclass(frozen=True)
class Meeting:
    """When a round may end: seconds from now to the first, the nominal and the last end of a step that will do."""

    opens_in: float
    due_in: float
    ends_in: float
    step_seconds: float

    @property
    def is_possible(self) -> bool:
        """Whether it makes sense at all; it came from somebody else."""
        return 0 <= self.opens_in <= self.due_in <= self.ends_in <= LONGEST

    def match(self, other: Meeting, patience: float = 0.0) -> float | None:
        """In how many seconds the two rounds should end: half way between the nominal ends. None when they cannot.

        It is an end of a step of the replica with the longer steps. The other may miss its window by one
        step, and by `patience` more of its steps: that long one of them then waits.
        """
        slow, fast = (self, other) if self.step_seconds >= other.step_seconds else (other, self)
        earliest = max(slow.opens_in, fast.opens_in - fast.step_seconds * (1 + patience))
        latest = min(slow.ends_in, fast.ends_in + fast.step_seconds * (1 + patience))
        wanted = (slow.due_in + fast.due_in) / 2
        if slow.step_seconds < SHORTEST_STEP:  # both wait for the other already
            return None if earliest > latest else min(max(wanted, earliest), latest)
        first = math.ceil((earliest - slow.opens_in) / slow.step_seconds - 1e-9)
        last = math.floor((latest - slow.opens_in) / slow.step_seconds + 1e-9)
        if first > last:
            return None
        steps = round((wanted - slow.opens_in) / slow.step_seconds)
        return slow.opens_in + min(max(steps, first), last) * slow.step_seconds


@dataclass(frozen=True)
class Bounds:
    """After how many inner steps a round may end, should end and has to end."""

    opens_at: int
    nominal: int
    ends_at: int

    @classmethod
    def of(cls, inner_steps: int, window: float) -> Bounds:
        """From k·(1 − window) to k·(1 + window), at least one step."""
        return cls(
            max(1, round(inner_steps * (1 - window))),
            inner_steps,
            max(inner_steps, round(inner_steps * (1 + window))),
        )

    def meeting(self, here: RoundProgress) -> Meeting:
        """Of the round that is going on."""
        return Meeting(
            min(here.until(self.opens_at), LONGEST),
            min(here.until(self.nominal), LONGEST),
            min(here.until(self.ends_at), LONGEST),
            min(here.step_seconds, LONGEST),
        )

    def meeting_after(self, begins_in: float, step_seconds: float) -> Meeting:
        """Of a round that begins in so many seconds."""
        return Meeting(
            min(begins_in + self.opens_at * step_seconds, LONGEST),
            min(begins_in + self.nominal * step_seconds, LONGEST),
            min(begins_in + self.ends_at * step_seconds, LONGEST),
            min(step_seconds, LONGEST),
        )
