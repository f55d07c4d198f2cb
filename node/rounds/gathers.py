"""The two meeting points of an all-reduce: the roll call that says who takes part, and an owner's parts of z.

One replica of the stage, the first by peer id, calls the roll (`Assembly`). Each owner collects its parts as they
come in and answers with their mean once everyone's is there (`Gathers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from protocol.codecs.codec import Encoded, as_read, encode
from protocol.errors import Refused
from protocol.ground import PeerId


@dataclass(frozen=True)
class Assembled:
    """The replicas of one all-reduce, by peer id, and the name of it."""

    name: str
    members: tuple[PeerId, ...]


class Assembly:
    """Takes the roll of who averages together in the next all-reduce.

    All members of an all-reduce are told the same, so that none of them averages one part with these and another
    part with those. Who is slower than the others by more than `seconds` is waited for once, and then not any more
    until it has taken part again: its call waits for the others' next one.
    """

    def __init__(self, life: str, seconds: float, group: Callable[[], Collection[PeerId]]) -> None:
        """`group` is whom to expect; `life` begins the names, which must differ from those of any other roll."""
        self._life = life
        self._seconds = seconds
        self._group = group
        self._waiting: dict[PeerId, None] = {}
        self._opened: asyncio.Future[Assembled] | None = None
        self._absent: set[PeerId] = set()
        self._count = 0

    async def join(self, peer: PeerId) -> Assembled:
        """Wait until all are here, `seconds` after the first one at most. Raises `Refused` ("alone")."""
        if self._opened is None:
            loop = asyncio.get_running_loop()
            opened = self._opened = loop.create_future()
            timer = loop.call_later(self._seconds, self._time_is_up, opened)
            opened.add_done_callback(lambda _: timer.cancel())
        opened = self._opened
        self._waiting[peer] = None
        self._absent &= set(self._group())
        if len(self._waiting) > 1 and set(self._group()) - self._absent <= self._waiting.keys():
            self._open()
        return await asyncio.shield(opened)

    def _time_is_up(self, opened: asyncio.Future[Assembled]) -> None:
        if self._opened is opened:  # else this roll was complete in the same moment
            self._open()

    def _open(self) -> None:
        opened, members = self._opened, tuple(sorted(self._waiting))
        assert opened is not None
        self._opened = None
        self._waiting.clear()
        if len(members) < 2:
            opened.set_exception(Refused("alone"))
            opened.exception()  # seen: whoever called may have gone
            return
        self._absent = set(self._group()) - set(members)
        self._count += 1
        opened.set_result(Assembled(f"{self._life}-{self._count}", members))

    def close(self) -> None:
        """Close the roll call: this replica averages with nobody any more."""
        if self._opened is not None:
            self._opened.set_exception(Refused("alone"))
            self._opened.exception()
            self._opened = None
        self._waiting.clear()


# parts that one member may have waiting at one owner: one is averaged while the next one is on its way
IN_FLIGHT = 2
NOBODY = Assembled("", ())
Key = tuple[str, int]  # the name of the all-reduce, the part's offset in the flat tensor


@dataclass(frozen=True)
class Reduction:
    """The mean of a part, as all read it, over so many members."""

    mean: Encoded
    members: int


@dataclass
class _Gather:
    """One part of z as it comes in; `reduction` is set when nobody is waited for any more."""

    opened: float
    parts: dict[PeerId, Encoded] = field(default_factory=dict)
    reduction: asyncio.Future[Reduction] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Gathers:
    """Gathers the members' parts of an all-reduce at their owner and gives back the mean.

    A member has at most `IN_FLIGHT` parts here, so an owner holds no more than that many times the group's size.
    """

    def __init__(self, codec: str, seconds: float) -> None:
        """`seconds` is how long a member's silence is waited for."""
        self._codec = codec
        self._seconds = seconds
        self._gathers: dict[Key, _Gather] = {}
        self._present = NOBODY
        self._absent: set[PeerId] = set()
        self._averaged: set[int] = set()  # offsets
        self._whole_at = 0.0

    @property
    def held(self) -> int:
        """The number of contributions that wait here."""
        return sum(len(gather.parts) for gather in self._gathers.values())

    def begin(self, present: Assembled) -> None:
        """Begin the all-reduce that this replica takes part in now. The others may have begun before."""
        self._present = present
        self._absent.clear()
        self._averaged.clear()
        for key in list(self._gathers):
            if key[0] == present.name and self._is_whole(key):
                self._average(key)

    async def contribute(self, peer: PeerId, name: str, offset: int, part: Encoded) -> Reduction:
        """Give a member's part and wait for the mean.

        Deadline: `seconds` after the part's first contribution or, where the others get on, after the last part that
        was whole, but never over twice as long; then those that are there are averaged, and nobody waits for the
        others in this all-reduce until they have caught up. Raises `Refused`: "late" (that part has been averaged),
        "alone" (nobody else came), "bad-shape", "given-up" (this peer has begun `IN_FLIGHT` others since, or the
        owner leaves).
        """
        key = (name, offset)
        if name == self._present.name and (offset in self._averaged or peer not in self._present.members):
            raise Refused("late")
        gather = self._gathers.get(key) or self._open(key)
        if any(other.shape != part.shape for other in gather.parts.values()):
            raise Refused("bad-shape")
        if peer not in gather.parts:
            self._make_room(peer)
        gather.parts[peer] = part
        if self._is_whole(key):
            self._whole_at = asyncio.get_running_loop().time()
            self._average(key)
        return await asyncio.shield(gather.reduction)

    def close(self) -> None:
        for key in list(self._gathers):
            self._refuse(key, "given-up")

    # --- one gather ---------------------------------------------------------------------------

    def _open(self, key: Key) -> _Gather:
        loop = asyncio.get_running_loop()
        gather = self._gathers[key] = _Gather(loop.time())
        self._look_again(key, gather, gather.opened + self._seconds)
        return gather

    def _look_again(self, key: Key, gather: _Gather, when: float) -> None:
        timer = asyncio.get_running_loop().call_at(when, self._time_is_up, key, gather)
        gather.reduction.add_done_callback(lambda _: timer.cancel())

    def _make_room(self, peer: PeerId) -> None:
        """Forget the oldest part of a peer that gives one more than it may have here: it has given that one up."""
        mine = [key for key, gather in self._gathers.items() if peer in gather.parts]
        for key in mine[: max(0, len(mine) - IN_FLIGHT + 1)]:
            del self._gathers[key].parts[peer]
            if not self._gathers[key].parts:
                self._refuse(key, "given-up")

    def _is_whole(self, key: Key) -> bool:
        waited_for = set(self._present.members) - self._absent
        return key[0] == self._present.name and waited_for <= self._gathers[key].parts.keys()

    def _time_is_up(self, key: Key, gather: _Gather) -> None:
        """Close what waited long enough. Others that get on may come to it yet, in order, part by part."""
        ends = min(max(gather.opened, self._whole_at) + self._seconds, gather.opened + 2 * self._seconds)
        if gather.reduction.done():
            return
        if ends > asyncio.get_running_loop().time():
            self._look_again(key, gather, ends)
        elif len(gather.parts) < 2 or key[0] != self._present.name:
            self._refuse(key, "alone")
        else:
            self._absent |= set(self._present.members) - gather.parts.keys()
            self._average(key)

    def _average(self, key: Key) -> None:
        gather = self._gathers.pop(key)
        self._averaged.add(key[1])
        self._absent -= gather.parts.keys()
        mean = mean_of(list(gather.parts.values()))
        gather.reduction.set_result(Reduction(encode(mean, self._codec), len(gather.parts)))

    def _refuse(self, key: Key, code: str) -> None:
        reduction = self._gathers.pop(key).reduction
        reduction.set_exception(Refused(code))
        reduction.exception()  # seen: whoever gave a part may have gone


def mean_of(parts: list[Encoded]) -> torch.Tensor:
    """The mean of what was encoded, float32; summed in float64, where the order makes no difference to it."""
    total = torch.zeros(parts[0].shape, dtype=torch.float64)
    for part in parts:
        total += as_read(part)
    return total.div_(len(parts)).to(torch.float32)
