"""Shows this peer's record to others that may not have found it in the DHT, before it asks them as a member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

from protocol.access.peer_limits import PeerTable
from protocol.codecs.codec import Encoded
from protocol.errors import DeadlineExceeded, NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages import Asker, Traffic
from protocol.messages.peers import Introduce
from protocol.rpc.door import MOST_INTRODUCED
from protocol.rpc.patience import Patience
from protocol.supervision import Supervisor
from protocol.windows import counted, window

logger = logging.getLogger(__name__)

FOR_MEMBERS = (Asker.MEMBER, Asker.REPLICA, Asker.BEFORE)


class Ask(Protocol):
    """Asks a peer and waits for its answer, see `Rpc.call`; who refuses is not asked again."""

    def __call__(
        self,
        peer: PeerId,
        request: Introduce,
        tensors: Sequence[Encoded],
        patience: Patience,
        traffic: Traffic,
    ) -> Coroutine[Any, Any, object]: ...


class Introductions:
    """Shows a peer's own record to others.

    Mutable state: the record, and which one was shown to whom.
    """

    def __init__(self, now: Callable[[], float], ask: Ask, supervisor: Supervisor) -> None:
        """`now` is the wall clock."""
        self._now = now
        self._ask = ask
        self._supervisor = supervisor
        self.own: Introduce | None = None  # once there is a record
        self.go_first = False  # where members hardly know each other: whoever asks shows its record at once
        # for as long as somebody waits for it
        self._under_way = WeakValueDictionary[PeerId, asyncio.Lock]()
        self._shown = PeerTable[Introduce](MOST_INTRODUCED)

    @window
    def __repr__(self) -> str:
        return f"Shown to: {counted(len(self._shown), 'peer')}"

    async def make(self, peer: PeerId, deadline: float, *, again: bool = False) -> None:
        """Show the peer the record, unless it has seen one of this stage that is not over soon; `again` all the same.

        Waits for its answer, or for that to somebody who shows it already, `deadline` seconds at most; raises as
        `Rpc.call` does, but for a refusal.
        """
        if again:
            self.forget(peer)
        clock, turn = asyncio.get_running_loop().time, self._under_way.setdefault(peer, asyncio.Lock())
        ends = clock() + deadline
        try:
            async with asyncio.timeout_at(ends):
                await turn.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"not known to the peer within {deadline:.1f} s") from None
        try:
            if (own := self.own) is None:
                return
            left = self._left(peer, own)
            if left <= 0:
                await self._show(peer, own, ends - clock())
            elif left < (own.expires - self._now()) / 3:
                self._show_meanwhile(peer, own, deadline)
        finally:
            turn.release()

    def forget(self, peer: PeerId) -> None:
        """Forget what was shown to the peer, which may have forgotten it, too."""
        self._shown.pop(peer, None)

    async def make_ahead(self, peer: PeerId, deadline: float, asker: Asker, traffic: Traffic) -> None:
        """Show the record to a peer that has not seen it, and wait for no answer: what is asked next follows it.

        Nothing happens but where introductions `go_first`. To be refused as a stranger, and then to be known, takes
        two round trips more.
        """
        own = self.own
        if not self.go_first or asker not in FOR_MEMBERS or own is None:
            return
        if self._left(peer, own) <= 0:
            self._show_meanwhile(peer, own, deadline, traffic)
            await asyncio.sleep(0)  # it opens the stream, or waits for it, before the request does

    def _left(self, peer: PeerId, own: Introduce) -> float:
        """Seconds for which the peer still knows this node in its stage, by a record or as one without."""
        shown = self._shown.get(peer)
        if shown is None or (shown.stage, bool(shown.record)) != (own.stage, bool(own.record)):
            return 0.0
        return shown.expires - self._now()

    def _show_meanwhile(
        self, peer: PeerId, own: Introduce, deadline: float, traffic: Traffic = Traffic.CONTROL
    ) -> None:
        async def show() -> None:
            with suppress(NolocoError):  # a refusal comes in time
                await self._show(peer, own, deadline, traffic)

        self._shown[peer] = own
        self._supervisor.spawn(show(), "introducing this node")

    async def _show(
        self, peer: PeerId, own: Introduce, deadline: float, traffic: Traffic = Traffic.CONTROL
    ) -> None:
        try:
            await self._ask(peer, own, (), Patience(deadline), traffic)
        except Refused as refusal:
            logger.debug("%s does not take this node's record: %s", peer[-8:], refusal)
        self._shown[peer] = own
