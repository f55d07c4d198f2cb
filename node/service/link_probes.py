"""Measures the links to random peers, now and then, and answers others that do the same."""

from __future__ import annotations

import asyncio
import logging
import random

from node.context import Context
from node.links.links import pause_after
from node.links.probing import ProbeAllowance, Visitor, probe_digest
from node.membership.discovery import read_stage
from node.membership.view import View
from protocol.errors import NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages.peers import Probe, Probed
from protocol.rpc.rpc import Answer, Request, Traffic

logger = logging.getLogger(__name__)

SPREAD = 0.25  # pauses are longer by up to this share, so that the nodes' probes do not fall together


class LinkProbes:
    """Probes links to random peers now and then and answers the probes of others.

    Everything measured is in `context.links`. Nothing here touches training: probes have streams of their own,
    a failure is no reason to suspect a peer, and the compute thread is not used.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # its own, so that probes do not change what the node draws elsewhere
        self._rng = random.Random(f"{context.run_id}/{context.me}/links")
        self._visitor = Visitor(context.rpc, context.links, self._rng)
        self._far = View()
        self._allowance = ProbeAllowance()

    def serve(self) -> None:
        for traffic in (Traffic.CONTROL, Traffic.STATE):
            self._context.rpc.handle(Probe.answered_by(self.on_probe, traffic))

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
        """Choose a peer of a random stage. The neighbours' records are known; a far stage's are read for this."""
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
        """Measure the link to this peer, see `Visitor.visit`."""
        busy = await self._visitor.visit(peer)
        self._context.counters.probe_breaches += self._visitor.breaches
        self._visitor.breaches = 0
        for dropped in self._context.links.take_dropped():
            if not self._context.view.knows(dropped):  # nothing else here talks to it
                self._context.rpc.forget(dropped)
        return busy

    # --- answering ----------------------------------------------------------------------------

    async def on_probe(self, request: Request[Probe]) -> Answer[Probed]:
        nbytes = len(request.frame.payload)
        if not self._allowance.allows(request.peer, nbytes, asyncio.get_running_loop().time()):
            self._context.rpc.strike(request.peer)
            self._context.counters.probe_breaches += 1
            raise Refused("too-often")
        return Answer(Probed(digest=probe_digest(request.message.nonce, request.frame.payload)))
