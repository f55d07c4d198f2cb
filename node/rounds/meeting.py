"""Computes how two replicas end a round together: what they tell and ask each other, when and with whom. Pure.

No clock is compared: each side says how long its own inner steps still take, and the answer is as good as the
replicas' steps are even. A round ends between two inner steps, so the one with the longer steps decides at which
of its own the two meet; the other, with more ends of steps to choose from, follows within one of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from protocol.ground import PeerId

LONGEST = 1e7  # seconds; the bound of the fields on the wire
SHORTEST_STEP = 1e-6  # seconds; below that a replica does not train, it waits
RENEW_AFTER = 0.25  # of a round: a partner not heard of for so long is asked whether it holds to the pair
# Steps that rounds of so many may be shorter or longer: with less, replicas that are out of step find no end of a
# step at which two of them can meet. Longer rounds have that from the window.
LEAST_SLACK = {2: 1, 3: 2}


@dataclass(frozen=True)
class RoundProgress:
    """The progress of a replica in its round, at `now` seconds of its own clock."""

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
    """The window of a round's end: seconds to the first, the nominal and the last end of a step that will do."""

    opens_in: float
    due_in: float
    ends_in: float
    step_seconds: float

    @property
    def is_possible(self) -> bool:
        """True if it makes sense at all; it came from somebody else."""
        return 0 <= self.opens_in <= self.due_in <= self.ends_in <= LONGEST

    def match(self, other: Meeting, patience: float = 0.0) -> float | None:
        """The seconds until the two rounds should end: half way between the nominal ends. None when they cannot.

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
    """The inner steps after which a round may end, should end and has to end."""

    opens_at: int
    nominal: int
    ends_at: int

    @classmethod
    def of(cls, inner_steps: int, window: float) -> Bounds:
        """The bounds from k·(1 − window) to k·(1 + window), at least one step; short rounds get `LEAST_SLACK`."""
        slack = LEAST_SLACK.get(inner_steps, 0) if window else 0
        return cls(
            max(1, min(inner_steps - slack, round(inner_steps * (1 - window)))),
            inner_steps,
            max(inner_steps + slack, round(inner_steps * (1 + window))),
        )

    def meeting(self, here: RoundProgress) -> Meeting:
        """The meeting of the round that is going on."""
        return self._meeting(here.until, here.step_seconds)

    def meeting_after(self, begins_in: float, step_seconds: float) -> Meeting:
        """The meeting of a round that begins in so many seconds."""
        return self._meeting(lambda steps: begins_in + steps * step_seconds, step_seconds)

    def _meeting(self, ends_in: Callable[[int], float], step_seconds: float) -> Meeting:
        ends = (ends_in(steps) for steps in (self.opens_at, self.nominal, self.ends_at))
        return Meeting(*(min(seconds, LONGEST) for seconds in (*ends, step_seconds)))


@dataclass(frozen=True)
class Pair:
    partner: PeerId
    name: str  # of this exchange, known to both


def fragment_named(name: str, fragments: int) -> int | None:
    """Return the index of the fragment that a pair of this name averages; None where it averages the whole."""
    index = crc32(name.encode()) % (fragments + 1)
    return None if fragments == 1 or index == fragments else index


class FragmentOrder:
    """The order in which a replica averages its fragments: the one whose turn was longest ago is the next."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._order = list(range(fragments))

    @property
    def next(self) -> int | None:
        """The fragment whose turn it is; None where there are none."""
        return None if self._fragments == 1 else self._order[0]

    def round_ended(self, name: str | None) -> None:
        """Note a round with a pair of this name; None for one alone, which is of the next fragment."""
        index = self.next if name is None else fragment_named(name, self._fragments)
        if index is not None:
            self._order.remove(index)
            self._order.append(index)

    def name(self, rng: random.Random, *, is_of_all: bool) -> str:
        """The name of a new pair, which is to average the next fragment, or all of them."""
        wanted = None if is_of_all else self.next
        while True:
            name = f"{rng.getrandbits(128):032x}"
            if fragment_named(name, self._fragments) == wanted:
                return name


@dataclass
class Agreement:
    """A pair that both know of; `partner_ready` and `place` change."""

    pair: Pair
    meets_at: float  # on the clock of `RoundProgress`
    paces: bool  # the end of an inner step of this replica, not of the partner, ends the round
    partner_step: float  # seconds
    heard_at: float
    place: float  # `meets_at` as it was when the pair was made: its place among the pairs of both
    partner_ready: bool = False  # it has ended the round, or has to end it before long

    @classmethod
    def of(
        cls, pair: Pair, me: PeerId, meets_at: float, mine: Meeting, theirs: Meeting, now: float
    ) -> Agreement:
        """Make the agreement from what both told. The partner makes the same, with `paces` the other way round."""
        paces = (mine.step_seconds, me) > (theirs.step_seconds, pair.partner)
        return cls(pair, meets_at, paces, theirs.step_seconds, heard_at=now, place=meets_at)

    def must_end(self, here: RoundProgress, bounds: Bounds) -> bool:
        """Return whether this end of an inner step is also the end of the round."""
        if here.steps >= bounds.ends_at:
            return True
        is_nearest = self.paces and here.now + here.step_seconds / 2 >= self.meets_at
        return here.steps >= bounds.opens_at and (self.partner_ready or is_nearest)

    def is_ready(self, here: RoundProgress, bounds: Bounds) -> bool:
        """Return whether to tell the partner to end: the round ends here, or cannot last one more of their steps."""
        partners_step = math.ceil(self.partner_step / max(here.step_seconds, SHORTEST_STEP))
        is_late = here.steps >= max(bounds.opens_at, bounds.ends_at - partners_step)
        return self.must_end(here, bounds) or (is_late and not self.paces)

    def must_renew(self, here: RoundProgress, nominal: int, in_doubt: bool) -> bool:
        """Return whether to ask the partner again: in the middle of the round, or at once when it is in doubt."""
        silent_steps = (here.now - self.heard_at) / max(here.step_seconds, SHORTEST_STEP)
        if in_doubt:
            return here.steps < nominal and silent_steps > 1
        return nominal // 2 <= here.steps < nominal and silent_steps > RENEW_AFTER * nominal


@dataclass(frozen=True)
class Proposal:
    """A request to be this pair, so that a round ends within `mine`, as it looked at `sent_at`."""

    pair: Pair
    mine: Meeting
    sent_at: float


@dataclass(frozen=True)
class Refusal:
    code: str
    engaged_with: PeerId | None = None  # the partner in the round asked for: it need not be asked, too
    seeker: PeerId | None = None  # another replica that was refused here a moment ago: it may still be free
    why: str = ""  # for people

    @property
    def reason(self) -> str:
        """The reason on the wire: of an "engaged" refusal the names, for `told`."""
        return self.why or " ".join(filter(None, (self.engaged_with, self.seeker)))

    @classmethod
    def told(cls, code: str, reason: str) -> Refusal:
        """The refusal that another's code and reason stand for."""
        named = [PeerId(name) for name in reason.split()] if code == "engaged" else []
        return cls(code, *named[:2])
