"""Measures the links to random peers, now and then, and answers others that do the same."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from hashlib import blake2b

from node.context import Context
from node.links.allowance import ProbeAllowance
from node.links.estimate import LinkEstimate
from node.links.links import pause_after
from node.places.discovery import read_stage
from node.places.membership import View
from protocol.codec import Buffer, Encoded
from protocol.errors import NolocoError, Refused, WireError
from protocol.link_report import AT_LEAST
from protocol.messages import Probe, Probed
from protocol.rpc import Answer, Request, Traffic
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

ROUND_TRIPS = 3  # of a visit, after one that may have had to open the stream
PAYLOADS = 2  # where the first was too short to tell; the second may be longer
PROBE_DEADLINE = 5.0
BULK_DEADLINE = 10.0  # 32 KiB at 26 kbit/s
SPREAD = 0.25  # pauses are longer by up to this share, so that the nodes' probes do not fall together


class LinkProbes:
    """Mutable state: the records of stages that the node does not watch, and how often others have asked.

    Everything measured is in `context.links`. Nothing here touches training: probes have streams of their own,
    a failure is no reason to suspect a peer, and the compute thread is not used.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # its own, so that probes do not change what the node draws elsewhere
        self._rng = random.Random(f"{context.run_id}/{context.me}/links")
        self._far = View()
        self._allowance = ProbeAllowance()

    def serve(self) -> None:
        """Answer others from now on."""
        for traffic in (Traffic.CONTROL, Traffic.STATE):
            self._context.rpc.handle(traffic, Probe, self.on_probe)

    async def run(self) -> None:
        """Visit one peer after another, for ever."""
        pause = pause_after(0.0)
        while True:
            await asyncio.sleep(pause * (1 + SPREAD * self._rng.random()))
            busy = 0.0
            try:
                peer = await self._choose()
                if peer is not None:
                    busy = await self.visit(peer)
            except NolocoError as problem:
                logger.debug("No link was measured: %s", problem)
            pause = pause_after(busy)

    # --- asking -------------------------------------------------------------------------------

    async def _choose(self) -> PeerId | None:
        """Somebody of a random stage. The neighbours' records are known; a far stage's are read for this."""
        context = self._context
        stage = self._rng.randrange(context.manifest.stages)
        view, now = context.view, context.transport.now()
        if not view.members(stage, now):
            view = self._far
            await read_stage(context.transport, context.run_id, stage, view)
            view.expire(now)
        peers = [peer for peer in view.holding(stage, now) if peer != context.me]
        return context.links.choose(peers, self._rng)

    async def visit(self, peer: PeerId) -> float:
        """Measure the round trip, and the bandwidth unless real traffic tells it.

        Returns the seconds that payloads kept the link busy, those that failed included. Deadlines:
        `PROBE_DEADLINE` for each round trip, `BULK_DEADLINE` for a payload. A failure ends the visit and is
        counted. A wrong digest is a breach of protocol.
        """
        context, loop = self._context, asyncio.get_running_loop()
        link = context.links.visit(peer, loop.time())
        self._part_from_the_dropped()
        bulk_began, answered = math.inf, 0
        try:
            await self._ask(peer, b"")  # opens the stream
            for _ in range(ROUND_TRIPS):
                began = loop.time()
                await self._ask(peer, b"")
                link.note_round_trip(loop.time() - began, loop.time())
            if context.links.bulk_bytes(peer, loop.time()):
                await self._ask(peer, b"", Traffic.STATE)  # opens that stream
                bulk_began = loop.time()
                while answered < PAYLOADS and (not answered or link.uncertainty == AT_LEAST):
                    await self._transfer(peer, link)
                    answered += 1
        except NolocoError as failure:
            link.failures += 1
            context.counters.probe_breaches += isinstance(failure, WireError)
            logger.debug("Peer %s could not be measured: %s", peer[-8:], failure)
        return max(0.0, loop.time() - bulk_began - answered * (link.round_trip or 0.0))

    async def _transfer(self, peer: PeerId, link: LinkEstimate) -> None:
        """A payload of the size that suits the link."""
        loop = asyncio.get_running_loop()
        size = self._context.links.bulk_bytes(peer, loop.time())
        payload, began = self._rng.randbytes(size), loop.time()
        await self._ask(peer, payload, Traffic.STATE)
        link.note_transfer(size, loop.time() - began, loop.time())

    async def _ask(self, peer: PeerId, payload: bytes, traffic: Traffic = Traffic.CONTROL) -> None:
        context, nonce = self._context, self._rng.randbytes(8)
        reply, _ = await context.rpc.call(
            peer,
            traffic,
            Probe(nonce=nonce),
            Probed,
            [_parcel(payload)] if payload else [],
            deadline=BULK_DEADLINE if payload else PROBE_DEADLINE,
        )
        if reply.digest != _digest(nonce, payload):
            context.rpc.strike(peer)
            raise WireError("the answer to a probe does not fit what was sent")

    def _part_from_the_dropped(self) -> None:
        """Close the streams to peers that are measured no more and that nothing else here talks to."""
        for peer in self._context.links.take_dropped():
            if not self._context.view.knows(peer):
                self._context.rpc.forget(peer)

    # --- answering ----------------------------------------------------------------------------

    async def on_probe(self, request: Request) -> Answer:
        nbytes = len(request.frame.payload)
        if not self._allowance.allows(request.peer, nbytes, asyncio.get_running_loop().time()):
            self._context.rpc.strike(request.peer)
            self._context.counters.probe_breaches += 1
            raise Refused("too-often")
        return Answer(Probed(digest=_digest(request.message.nonce, request.frame.payload)))


def _parcel(payload: bytes) -> Encoded:
    """Random bytes, which nothing on the way can compress, as a tensor that is never decoded."""
    return Encoded("int32", (len(payload) // 4,), (memoryview(payload),))


def _digest(nonce: bytes, payload: Buffer) -> bytes:
    digest = blake2b(nonce, digest_size=16)
    digest.update(payload)
    return digest.digest()
