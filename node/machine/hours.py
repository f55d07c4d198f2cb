"""Hours of the day in which a machine may be used, as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time


@dataclass(frozen=True)
class Hours:
    """Hours from `start` until before `end`, over midnight when that is earlier. The same twice is all day."""

    start: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read "22-07" or "22:30-07:15". Raises `ValueError`."""
        found = re.fullmatch(r"\s*(\d{1,2})(?::(\d\d))?\s*-\s*(\d{1,2})(?::(\d\d))?\s*", text)
        try:
            if found is None:
                raise ValueError
            return cls(_time(found[1], found[2]), _time(found[3], found[4]))
        except ValueError:
            raise ValueError(f"{text!r} are no hours: write them as 22-07 or 22:30-07:15") from None

    def covers(self, now: datetime) -> bool:
        """Return whether `now`, by its own clock, lies within these hours: local time, if that is what it is."""
        moment = now.time()
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end


def _time(hour: str, minute: str | None) -> time:
    return time(int(hour) % 24 if int(hour) == 24 else int(hour), int(minute or 0))
