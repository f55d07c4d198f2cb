"""Streams of peers that are refused: left open and unread for a while, as long as they come slowly.

Whose connection is ended makes another, and each handshake takes p2pd some 0.75 ms; p2pd has no list of peers to
refuse. Whose stream is accepted by p2pd and never read waits, and costs nothing meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from protocol.access.peer_limits import Allowance
from protocol.ground import PeerId
from protocol.transport.p2pd_socket import P2pdSocket
from protocol.windows import counted, window

HOLD_SECONDS = 5.0  # half of a usual deadline, for those that are refused by mistake
HOLD_EACH = 4  # streams of one peer, each with what fits in the buffers of p2pd and the kernel
HOLD_ALL = 128
# Requests of a refused peer, and a second, for which its connection stays
EACH_MAY, ALL_MAY = (8.0, 2.0), (512.0, 256.0)


class HeldStreams:
    """Holds streams of refused peers. Mutable state: for each of those, a future by stream that ends its waiting."""

    def __init__(self) -> None:
        self._held = defaultdict[PeerId, deque[asyncio.Future[None]]](deque)
        self._count = 0
        self._allowance = Allowance(EACH_MAY, ALL_MAY)

    @window
    def __repr__(self) -> str:
        return f"Held: {counted(self._count, 'stream')} of {counted(len(self._held), 'peer')}"

    def comes_slowly(self, peer: PeerId) -> bool:
        """Count a request of a refused peer; return whether it may keep its connection."""
        return self._allowance.take(peer, 1, asyncio.get_running_loop().time())

    async def hold(self, peer: PeerId, connection: P2pdSocket) -> None:
        """Read nothing of the connection for `HOLD_SECONDS`, or until newer ones of the peer push it out.

        Returns at once when `HOLD_ALL` are held. The caller closes the connection.
        """
        if self._count >= HOLD_ALL:
            return
        connection.stop_reading()
        held = self._held[peer]
        if len(held) >= HOLD_EACH:
            _end(held.popleft())
        pushed_out: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.append(pushed_out)
        self._count += 1
        try:
            await asyncio.wait([pushed_out], timeout=HOLD_SECONDS)
        finally:
            self._count -= 1
            if pushed_out in held:
                held.remove(pushed_out)
            if not held:
                self._held.pop(peer, None)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
