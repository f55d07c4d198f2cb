"""One replica as the daemon runs it, without training: transport, rpc, matchmaker, rounds and state are real.

An inner step is a small change of θ; everything around it is done as `service.trainer` does it. Measured is what
keeps a replica from its next inner step: from the end of the last inner step to the new θ in place.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import uvloop
from coordination import Message, next_command, say, sleep_until
from state import manifest_of, sample

from node.context import Context
from node.links.links import Links
from node.membership.joining import payload_limits
from node.membership.membership import Membership
from node.membership.past import Past
from node.membership.view import View
from node.model.compute import ComputeThread, Priority
from node.model.replica import Replica
from node.rounds.rounds import Rounds
from node.watch.events import Events
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

FOR_EVER = 1e12
POLL_SECONDS = 0.03
CONNECT_DEADLINE = 60.0
ARRIVAL_SECONDS = 1.0  # for the last pieces of φ that are under way, also on slow links
QUIET_SECONDS = 1.0  # without a piece being sent, also on slow links


class NolocoPeer:
    """Mutable state: the parts of a node; of its last round the event, what went wrong, what was sent by then."""

    def __init__(self, settings: Message) -> None:
        self._settings = settings
        self._round: Message = {}
        self._trouble: list[str] = []
        self._step_seconds: float = settings["step_seconds"]  # of a pretended inner step
        self._sent = 0  # bytes of contributions until the end of the last round

    async def start(self, folder: Path) -> Message:
        identity = Identity.generate()
        identity.save(folder / "identity")
        self._transport = Libp2pTransport(folder / "identity", Libp2pConfig(host=self._settings["host"]))
        manifest = manifest_of(**self._settings["state"])
        self._rpc = Rpc(self._transport, payload_limits(manifest))
        await self._transport.start()
        await self._rpc.start()
        self._compute = ComputeThread(self._settings["threads"])
        self._replica = await self._compute.run(Priority.OPTIMIZER, Replica, manifest, 0)
        self._change = torch.randn(self._replica.parameters) * 1e-3
        signed = SignedManifest.sign(manifest, Identity.from_seed("gossip-benchmark"))
        past = Past(signed.run_id, manifest.most_steps, manifest.limits.record_lifetime, self._transport.now)
        events = Events(time.time, self._note)
        membership = Membership(self._rpc, signed, View(), Links(), events, Supervisor(), past)
        self._context = Context(membership, 0, self._compute)
        self._rounds = Rounds(self._context, self._replica, random.Random())
        self._rounds.serve(self._rpc)
        return {"peer": self._transport.peer_id, "addresses": self._transport.addresses()}

    async def meet(self, others: list[Message]) -> Message:
        for other in others:
            if other["peer"] != self._transport.peer_id:
                await self._transport.connect(other["addresses"], CONNECT_DEADLINE)
            announcement = Announcement(stage=0, state="serving", since=0.0, addresses=other["addresses"][:8])
            self._context.view.update(other["peer"], announcement, FOR_EVER)
            self._transport.learn(other["peer"], other["addresses"])
        return {}

    async def prepare_average(self) -> Message:
        """Inner steps until the round may end with a partner, and until φ has gone, if it goes early."""
        while True:
            await self._compute.run(Priority.OPTIMIZER, self._work_step)
            self._rounds.step_done(self._step_seconds)
            if self._rounds.must_end:
                if self._rounds.averager.pair is not None:
                    break
                await self._finish_round()
            await asyncio.sleep(self._step_seconds)
        if self._context.manifest.outer.overlap == "phi-early":
            phi_bytes = self._replica.parameters * 4
            while self._context.counters.gossip_bytes - self._sent < phi_bytes:  # noqa: ASYNC110  nothing tells
                await asyncio.sleep(POLL_SECONDS)
            await asyncio.sleep(ARRIVAL_SECONDS)
        self._trouble = []
        return {}

    async def average(self, at: float) -> Message:
        """The end of a round, as in `Trainer._step` when `Rounds.must_end`."""
        replica = self._replica
        before = [sample(tensor) for tensor in (replica.phi, replica.delta, replica.flat.values)]
        sleep_until(at)
        await self._finish_round()
        seconds = time.monotonic() - at
        return {
            "seconds": seconds,
            "me": self._context.me,
            "partner": self._round["partner"],
            "trouble": self._trouble,
            "before": before,
            "after": sample(replica.flat.values),
        }

    async def rest(self) -> Message:
        """Wait until nothing is sent: when the next partner is known already, its φ goes at once."""
        counters, seen = self._context.counters, -1
        while counters.gossip_bytes != seen:
            seen = counters.gossip_bytes
            await asyncio.sleep(QUIET_SECONDS)
        return {}

    async def _finish_round(self) -> None:
        await self._rounds.finish()
        self._sent = self._context.counters.gossip_bytes

    async def stop(self) -> None:
        await self._rounds.close()
        await self._rpc.close()
        await self._transport.close()
        await self._compute.close()

    def _work_step(self) -> None:
        replica = self._replica
        if replica.steps_in_round == 0:
            replica.flat.values.add_(self._change)
        replica.step += 1
        replica.steps_in_round += 1

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            self._round = event
        else:
            self._trouble.append(f"{event['event']} {event.get('reason', '')}")


async def main(settings: Message) -> None:
    peer = NolocoPeer(settings)
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        say(await peer.start(Path(folder)))
        try:
            while (command := await loop.run_in_executor(None, next_command)) is not None:
                say(await getattr(peer, command.pop("command"))(**command))
        finally:
            await peer.stop()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
