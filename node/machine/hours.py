"""Hours of the week in which something is allowed, as people write them: "22-07", "mon-fri 22-07, sat-sun".

They go by the clock on the wall. In the night in which clocks go forward, 22-07 is an hour shorter, and what lies in
the hour that is left out does not come; when they go back it is an hour longer, and the hour that comes twice counts
twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
STEP_MINUTES = 15  # time zones differ by quarters of an hour
LOOK_AHEAD = timedelta(days=8)  # a week, and the hour that a change of clocks may have left out
_MIDNIGHT = time()


@dataclass(frozen=True)
class Window:
    """Hours from `start` until before `end` on each of these days, 0 being Monday.

    Over midnight when `end` is no later than `start`: the hours after it belong to the day on which the window began.
    """

    days: frozenset[int]
    start: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read "22-07", "mon-fri 22:30-07:15" or "sat-sun", which is all day. Raises `ValueError`."""
        *days, last = text.split()
        if not re.match(r"\d", last):
            days, last = [*days, last], "00-24"
        found = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", last)
        if found is None or len(days) > 1:
            raise ValueError
        return cls(
            _days(days[0] if days else "mon-sun"), _time(found[1], found[2]), _time(found[3], found[4])
        )

    def covers(self, now: datetime) -> bool:
        """Return whether `now`, by its own clock, lies within it."""
        moment, today = now.time(), now.weekday()
        if self.start < self.end:
            return today in self.days and self.start <= moment < self.end
        began_today = today in self.days and moment >= self.start
        return began_today or ((today - 1) % 7 in self.days and moment < self.end)


@dataclass(frozen=True)
class Hours:
    """Hours of the week: those of any of the windows. `text` is how people wrote them."""

    windows: tuple[Window, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read windows with commas between them: "mon-fri 22-07, sat-sun". Raises `ValueError`."""
        parts = re.sub(r"\s*-\s*", "-", text.strip().lower()).split(",")
        try:
            return cls(tuple(Window.parse(part) for part in parts), text.strip())
        except ValueError:
            raise ValueError(
                f"{text!r} are no hours: write them as 22-07, 22:30-07:15 or mon-fri 22-07, sat-sun"
            ) from None

    def covers(self, now: datetime) -> bool:
        """Return whether `now`, by its own clock, lies within these hours: local time, if that is what it is."""
        return any(window.covers(now) for window in self.windows)

    def begins(self, now: datetime) -> datetime | None:
        """The moment after `now` at which these hours begin, by the same clock, also beyond a change of clocks.

        `now` is in a `ZoneInfo`, else in the zone of this machine. None where they do not begin within `LOOK_AHEAD`.
        """
        zone = now.tzinfo if isinstance(now.tzinfo, ZoneInfo) else None
        step = timedelta(minutes=math.gcd(STEP_MINUTES, *(window.start.minute for window in self.windows)))
        present = now.astimezone(UTC)
        moment = present.replace(minute=0, second=0, microsecond=0)
        for _ in range((LOOK_AHEAD + timedelta(hours=1)) // step):
            moment += step
            local = moment.astimezone(zone)
            if moment > present and self.covers(local):
                return local
        return None


def _days(text: str) -> frozenset[int]:
    """The days of "mon", "mon-fri" or "sat-mon". Raises `ValueError`."""
    first, *others = text.split("-", 1)
    begin, end = DAYS.index(first), DAYS.index(others[0] if others else first)
    return frozenset((begin + day) % 7 for day in range((end - begin) % 7 + 1))


def _time(hour: str, minute: str | None) -> time:
    return _MIDNIGHT if int(hour) == 24 and not int(minute or 0) else time(int(hour), int(minute or 0))
