"""Asks a run's members for their numbers, one after another, and keeps the board up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bootstrap.dashboard.board import Board
from bootstrap.dashboard.recalling import recalled
from bootstrap.dashboard.rows import asked_next, sent_per_second
from bootstrap.dashboard.wording import Voice
from bootstrap.inspect.observer import Observer, Sighting
from node.membership.discovery import read_stages
from node.membership.view import Member
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages.peers import GetHistory, GetStats, HistoryPoint, NodeStats
from protocol.supervision import Supervisor

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
IDLE_SECONDS = 10.0  # between two looks while nobody watches
ASKED_EACH_LOOK = (
    120  # of a swarm of thousands each is asked every ten seconds or so: a thirtieth of a core of theirs
)
ASKED_AT_ONCE = 320
ANSWER_DEADLINE = 3.0
HISTORY_DEADLINE = 10.0
MOST_HISTORIES = 128  # members that are asked for theirs, of 15 kB each
RECORD_SECONDS = 5.0  # between two readings of the records
SOON_SECONDS = 3.0  # the same while there are `FEW` members at most: whoever joins waits to see itself
FEW = 64
SILENCES = 2  # requests without an answer that make a member "silent"; one may be lost


def pause_between_reads(members: int, lifetime: float) -> float:
    """Seconds to the next read, by the known members and their records' lifetime: few while it costs little."""
    pause = RECORD_SECONDS if members > FEW else SOON_SECONDS if members else LOOK_SECONDS
    return min(pause, lifetime / 3)


class Audience:
    """The watchers of a board: members are asked often only while there are any. Mutable state: how many watch."""

    def __init__(self, watchers: int = 0) -> None:
        self._watchers = watchers
        self._somebody = asyncio.Event()
        if watchers:
            self._somebody.set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count one more watcher while the block runs."""
        self._watchers += 1
        self._somebody.set()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._somebody.clear()

    async def somebody(self) -> None:
        """Wait until somebody watches."""
        await self._somebody.wait()

    async def rest(self, watched: float, idle: float) -> None:
        """Wait `watched` seconds; while nobody watches, `idle`, or until somebody comes."""
        await asyncio.sleep(watched)
        with suppress(TimeoutError):
            async with asyncio.timeout(idle - watched):
                await self._somebody.wait()


@dataclass
class _Asked:
    """The answers of one member, as far as they are known.

    Mutable state: what a member answered last and when, by the loop's clock, and the failures since then.
    """

    when: float = float("-inf")
    stats: NodeStats | None = None
    ahead: float | None = None  # as of `Sighting`
    answered: float = 0.0
    failures: int = 0
    silent: float | None = None  # wall clock of the first failure
    is_waited_for: bool = False


class Collector:
    """Asks the members of a run for their numbers and keeps a board up to date.

    Mutable state: the members known, and what each of them was asked.

    Records are read through the observer's transport. A member that does not answer is shown by its record until
    that runs out. Nothing is asked of anybody more often than every `LOOK_SECONDS`, nor than every `IDLE_SECONDS`
    while the `audience` is empty.
    """

    def __init__(self, observer: Observer, board: Board, supervisor: Supervisor, audience: Audience) -> None:
        self._observer = observer
        self._board = board
        self._supervisor = supervisor
        self._audience = audience
        self._asked: dict[PeerId, _Asked] = {}
        self._members: dict[PeerId, Member] = {}
        self._began = observer.transport.now()
        self._histories: dict[PeerId, Sequence[HistoryPoint]] = {}  # empty for who is asked, or has none
        self._voice = Voice()
        self._heard_more = False  # a history came since the curves were last recalled

    def start(self) -> None:
        self._supervisor.keep("reading records", self._read_for_ever, "Joins and leaves are not seen.")
        self._supervisor.keep("asking members", self._ask_for_ever, "What is shown is old.")

    async def _read_for_ever(self) -> None:
        lifetime = self._observer.manifest.limits.record_lifetime
        while True:
            await self.read()
            pause = pause_between_reads(len(self._members), lifetime)
            await self._audience.rest(pause, min(IDLE_SECONDS, lifetime / 3) if self._members else pause)

    async def read(self) -> None:
        """Bring the members up to date with the records, see `read_stages`."""
        observer, stages = self._observer, range(self._observer.manifest.stages)
        try:
            await read_stages(observer.transport, observer.signed.run_id, stages, observer.view)
        except NolocoError as problem:
            logger.debug("Records could not be read: %s", problem)
        self._note_members()

    def _note_members(self) -> None:
        observer = self._observer
        now = observer.transport.now()
        observer.view.expire(now)
        stages = range(observer.manifest.stages)
        self._members = {m.peer: m for stage in stages for m in observer.view.members(stage, now)}
        known = self._asked
        self._asked = {peer: known.get(peer, _Asked()) for peer in self._members}
        self._board.keep_only(self._members, now)
        if (
            known
        ):  # of a run that was just found answers come at once; rows without would say that nobody does
            for peer in self._members.keys() - known.keys():
                self._board.see(Sighting(self._members[peer], None), now)
        self.ask()

    async def _ask_for_ever(self) -> None:
        while True:
            self.ask()
            await asyncio.sleep(LOOK_SECONDS)
            if self._heard_more:
                self._board.recall(recalled(self._histories, self._began))
                self._heard_more = False
            self._board.conclude(self._observer.transport.now())
            self._voice.note(self._board.findings)
            await self._audience.rest(0.0, IDLE_SECONDS - LOOK_SECONDS)

    def ask(self) -> None:
        """Ask those whose turn it is, in the background."""
        now = asyncio.get_running_loop().time()
        free = {peer: asked.when for peer, asked in self._asked.items() if not asked.is_waited_for}
        places = ASKED_AT_ONCE - (len(self._asked) - len(free))
        # a little less than a look, which may begin late and then on time
        for peer in asked_next(free, now, 0.9 * LOOK_SECONDS, max(0, min(ASKED_EACH_LOOK, places))):
            asked = self._asked[peer]
            asked.when, asked.is_waited_for = now, True
            self._supervisor.spawn(self._ask(self._members[peer], asked), "asking a member")

    async def _ask(self, member: Member, asked: _Asked) -> None:
        observer, loop, to = self._observer, asyncio.get_running_loop(), dict[str, float]()
        try:
            stats, _ = await observer.rpc.call(member.peer, GetStats(), deadline=ANSWER_DEADLINE)
        except NolocoError:  # it is still joining, or gone
            asked.failures += 1
            if asked.failures < SILENCES:
                asked.when = float("-inf")  # again at the next look, before all others
            # a node that is joining answers once it has its stage's state
            if asked.failures >= SILENCES and asked.silent is None and member.announcement.state != "joining":
                asked.silent = observer.transport.now()
        else:
            to = sent_per_second(asked.stats, stats, loop.time() - asked.answered)
            asked.stats, asked.answered, asked.failures, asked.silent = stats, loop.time(), 0, None
            asked.ahead = Sighting.of(member, stats, observer.transport.now()).ahead
            self._recall(member.peer)
        finally:
            asked.is_waited_for = False
        if member.peer in self._members:
            self._board.see(
                Sighting(member, asked.stats, asked.ahead), observer.transport.now(), asked.silent, to
            )

    def _recall(self, peer: PeerId) -> None:
        """Ask a member, once, how it went before anybody watched here."""
        if peer not in self._histories and len(self._histories) < MOST_HISTORIES:
            self._histories[peer] = ()
            self._supervisor.spawn(self._ask_history(peer), "asking for a history")

    async def _ask_history(self, peer: PeerId) -> None:
        try:
            history, _ = await self._observer.rpc.call(peer, GetHistory(), deadline=HISTORY_DEADLINE)
        except NolocoError:  # an earlier version, or it is gone
            return
        self._histories[peer] = history.points
        self._heard_more = True
