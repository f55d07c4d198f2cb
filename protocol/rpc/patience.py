"""The patience with a request: so many seconds in all, or so many of silence.

Whoever works on a request, or has it in its queue, says so every second or two: slow work is waited for, and a peer
that is frozen or gone is found as quickly as one that has to answer at once. What a peer says buys it time within a
bound that the asker knows beforehand, and none beyond it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.messages import Progress

# What a frame has at least once it has begun, whatever the deadline of its request: cut short, it ends the stream and
# with it every other request under way.
FRAME_SECONDS = 10.0
FEW_SIGNS = (
    64  # of progress, beside one a second: those of a minute and a half may come at once, after a freeze
)
MOST_STALLS = 4.0  # standstills that a request may take in all, unless its asker names another bound


def ignore(progress: Progress) -> None:
    """Do nothing with what a peer says of its progress."""


class Patience:
    """The time that one request may take.

    Mutable state: when it was asked and sent, when it last got on, the longest silence so far.

    Without `stall` it ends `seconds` after it was made. With it, after `seconds` without a byte from the peer, after
    `stall` seconds in which the request did not get on, however often the peer says that it lives, and after `most`
    seconds in all, whatever the peer says. `told` is called with each `Progress`. All times are of the loop that
    runs when it is made.
    """

    def __init__(
        self,
        seconds: float,
        stall: float | None = None,
        told: Callable[[Progress], None] = ignore,
        most: float | None = None,
    ) -> None:
        """`most` is `MOST_STALLS` times `stall` unless it is given; a request that has no `stall` needs none."""
        self.seconds = seconds
        self._stall = stall
        self._told = told
        self._clock = asyncio.get_running_loop().time
        self._began = self._sign = self._clock()
        self._last = self._began + (
            seconds if stall is None else MOST_STALLS * stall if most is None else most
        )
        self._advanced = float("inf")  # until it is sent
        self._done = self._signs = 0
        self.longest_silence = 0.0  # seconds between two signs of life of this request

    def sent(self) -> None:
        """Note that all of the request was handed to the network."""
        self._sign = self._advanced = self._clock()

    @property
    def signs_left(self) -> float:
        """The signs of progress that may still come of this request: whoever is honest sends fewer."""
        return FEW_SIGNS + self._clock() - self._began - self._signs

    def note(self, progress: Progress) -> None:
        """Note how far the peer says that the request is."""
        self.heard()
        self._signs += 1
        if progress.done > self._done:
            self._done, self._advanced = progress.done, self._sign
        self._told(progress)

    def heard(self) -> None:
        """Note a sign of life of this request."""
        now = self._clock()
        self.longest_silence = max(self.longest_silence, now - self._sign)
        self._sign = now

    def due(self, moved: float) -> float:
        """The time at which it ends if no byte moves after `moved`, all on the loop's clock."""
        if self._stall is None:
            return self._last
        return min(max(self._sign, moved) + self.seconds, self._advanced + self._stall, self._last)

    def frame_due(self, began: float, moved: float) -> float:
        """The time at which a frame is given up of which something has been sent, from `began` on."""
        moving = began if self._stall is None else min(max(began, moved), max(began, self._last))
        return max(self.due(moved), moving + FRAME_SECONDS)
