"""Learns how long answers to microbatches take: when to ask a second peer, and when to give the first one up. Pure.

The times are by this node's own clock: what a peer says of its progress buys it time within these bounds alone. A
slow peer is still waited for beside a second one: a board beside a GPU ends its work, its sender goes on meanwhile.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from protocol.rpc.patience import MOST_STALLS
from protocol.windows import counted, window

# times `limits.microbatch_deadline` for each stage behind: as long a peer may say that it works on a microbatch
# without getting on with it
STALLED = 10.0
REMEMBERED = 32  # answers
ENOUGH = 5  # answers, before their spread is believed
FEW = 10.0  # times the longest of fewer, since the first ones say little: some peers still compile
SOONEST = 2.0  # seconds, for each stage behind: what links and garbage collectors may cost an answer
SLOW = 3.0  # times the time after which a second one is asked, that the first may take


class AnswerTimes:
    """How long the next stage takes to answer this node, over all of its peers.

    Mutable state: the last `REMEMBERED` answers, in seconds from sending. A single peer gets at most twice its share
    of the microbatches, so that the median is that of the others.
    """

    def __init__(self, limit: float, stages_behind: int) -> None:
        """`limit` is the manifest's deadline in seconds, `stages_behind` how many stages work on an answer."""
        self._stages = stages_behind
        self._limit = limit
        self.standstill = (
            STALLED * limit * stages_behind
        )  # the stage before waits longer: it does not resend first
        self._answers: deque[float] = deque(maxlen=REMEMBERED)

    @window
    def __repr__(self) -> str:
        answers = counted(len(self._answers), "answer")
        return f"Second asked after: {self.second_after():.2f} s | At most: {self.at_most():.0f} s | Of: {answers}"

    def note(self, seconds: float) -> None:
        """Note an answer, so many seconds after the microbatch was sent."""
        self._answers.append(seconds)

    @property
    def is_known(self) -> bool:
        """True once there was an answer. Until then only a peer that has nothing of this node is asked as well."""
        return bool(self._answers)

    def second_after(self) -> float:
        """Seconds without an answer after which another peer is asked as well: far more than answers usually take."""
        if not self.is_known:
            return self._limit * self._stages
        if len(self._answers) < ENOUGH:
            usual = min(MOST_STALLS * self.standstill, FEW * max(self._answers))
        else:
            middle = median(self._answers)
            spread = median(abs(seconds - middle) for seconds in self._answers)
            usual = (3 * middle + 10 * spread) * (1 + self._stages) / 2
        return max(SOONEST * self._stages, usual)

    def at_most(self) -> float:
        """Seconds that a peer has for an answer in all, whatever it says meanwhile."""
        if not self.is_known:
            return MOST_STALLS * self.standstill
        return max(self.standstill, SLOW * self.second_after())
