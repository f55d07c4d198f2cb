"""Measuring the link to one peer, and how often others may do the same to this node."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from hashlib import blake2b

from node.links.links import LinkEstimate, Links
from protocol.access.peer_limits import WITHOUT_END, Allowance
from protocol.codecs.codec import Encoded
from protocol.errors import NolocoError, WireError
from protocol.ground import Buffer, PeerId
from protocol.messages.peers import MAX_PROBE_BYTES, Probe, Probed
from protocol.records.announcement import AT_LEAST
from protocol.rpc.rpc import Rpc, Traffic
from protocol.windows import window

logger = logging.getLogger(__name__)

ROUND_TRIPS = 3  # of a visit, after one that may have had to open the stream
PAYLOADS = 2  # where the first was too short to tell; the second may be longer
PROBE_DEADLINE = 5.0
BULK_DEADLINE = 10.0  # 32 KiB at 26 kbit/s
WINDOW_SECONDS = 8.0  # shorter than the pause that every prober makes between two visits
# of a visit: two that open streams, three round trips, two with a payload, and one to spare
MOST_PROBES = 8
MOST_BYTES = 2 * MAX_PROBE_BYTES
# at once, and a second, of each prober
PROBES, BYTES = (MOST_PROBES, MOST_PROBES / WINDOW_SECONDS), (MOST_BYTES, MOST_BYTES / WINDOW_SECONDS)


class Visitor:
    """Measures the link to one peer by a round trip and a bounded transfer.

    Mutable state: how many answers were nonsense. What is measured goes to `links`.
    """

    def __init__(self, rpc: Rpc, links: Links, rng: random.Random) -> None:
        self._rpc = rpc
        self._links = links
        self._rng = rng
        self.breaches = 0

    async def visit(self, peer: PeerId) -> float:
        """Measure the link; return the seconds that payloads kept it busy, those that failed included.

        Deadlines: `PROBE_DEADLINE` for each round trip, `BULK_DEADLINE` for a payload. A failure ends the visit. A
        wrong digest is a breach of protocol.
        """
        loop = asyncio.get_running_loop()
        link = self._links.visit(peer, loop.time())
        bulk_began, answered = math.inf, 0
        try:
            await self._ask(peer, b"")  # opens the stream
            for _ in range(ROUND_TRIPS):
                began = loop.time()
                await self._ask(peer, b"")
                link.note_round_trip(loop.time() - began, loop.time())
            if self._links.bulk_bytes(peer, loop.time()):
                await self._ask(peer, b"", Traffic.STATE)  # opens that stream
                bulk_began = loop.time()
                while answered < PAYLOADS and (not answered or link.uncertainty == AT_LEAST):
                    # 0: real traffic has told it meanwhile
                    if not (size := self._links.bulk_bytes(peer, loop.time())):
                        break
                    await self._transfer(peer, link, size)
                    answered += 1
        except NolocoError as failure:
            self.breaches += isinstance(failure, WireError)
            logger.debug("Peer %s could not be measured: %s", peer[-8:], failure)
        return max(0.0, loop.time() - bulk_began - answered * (link.round_trip or 0.0))

    async def _transfer(self, peer: PeerId, link: LinkEstimate, size: int) -> None:
        loop = asyncio.get_running_loop()
        payload, began = self._rng.randbytes(size), loop.time()
        await self._ask(peer, payload, Traffic.STATE)
        link.note_transfer(size, loop.time() - began, loop.time())

    async def _ask(self, peer: PeerId, payload: bytes, traffic: Traffic = Traffic.CONTROL) -> None:
        nonce = self._rng.randbytes(8)

        def read(reply: Probed, _: object) -> None:
            if reply.digest != probe_digest(nonce, payload):
                raise WireError("the answer to a probe does not fit what was sent")

        await self._rpc.call_and_read(
            peer,
            Probe(nonce=nonce),
            [_parcel(payload)] if payload else [],
            deadline=BULK_DEADLINE if payload else PROBE_DEADLINE,
            traffic=traffic,
            read=read,
        )


def probe_digest(nonce: bytes, payload: Buffer) -> bytes:
    """Digest of all that was sent: nobody can answer before it has arrived."""
    digest = blake2b(nonce, digest_size=16)
    digest.update(payload)
    return digest.digest()


def _parcel(payload: bytes) -> Encoded:
    """Random bytes, which nothing on the way can compress, as a tensor that is never decoded."""
    return Encoded("int32", (len(payload) // 4,), (memoryview(payload),))


class ProbeAllowance:
    """Limits how often other peers may have this node answer their probes: a visit in `WINDOW_SECONDS` from each.

    Mutable state: the probes and bytes that each of the last probers may still ask for.
    """

    def __init__(self) -> None:
        self._probes, self._bytes = Allowance(PROBES, WITHOUT_END), Allowance(BYTES, WITHOUT_END)

    @window
    def __repr__(self) -> str:
        return f"Probes: {self._probes!r} | Bytes: {self._bytes!r}"

    def allows(self, peer: PeerId, nbytes: int, now: float) -> bool:
        """Count a probe with `nbytes` of payload; return whether it is answered."""
        has_probes, has_bytes = self._probes.take(peer, 1, now), self._bytes.take(peer, nbytes, now)
        return has_probes and has_bytes and nbytes <= MAX_PROBE_BYTES
