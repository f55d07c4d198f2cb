"""Members that train nothing: signed records and plausible answers, in any number, over the in-memory network."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from bootstrap.inspect.observer import Observer
from bootstrap.lab.in_memory.memory import Link, MemoryNetwork, MemoryTransport, memory_address
from protocol.ground import PeerId
from protocol.messages.peers import (
    MOST_HISTORY,
    GetHistory,
    GetStats,
    History,
    HistoryPoint,
    LossTrend,
    NodeStats,
)
from protocol.records.announcement import PEER_CHARACTERS, Announcement, LinkReport, State, stage_key
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.manifest import Manifest
from protocol.run.signed_manifest import SignedManifest
from protocol.version import own_version

RATE = 900.0  # tokens per second of a replica
MOST_TOLD = 6  # peers that one sends to


class MadeUpMember:
    """Mutable state: since when it "trains", and how often it was asked. Its numbers follow from the clock."""

    def __init__(self, swarm: MadeUpSwarm, number: int) -> None:
        self.swarm, self.number = swarm, number
        self.stage = number % swarm.manifest.stages
        self.transport = MemoryTransport(swarm.network, Identity.from_seed("made up", number))
        self.rpc = Rpc(self.transport)
        self.rng = random.Random(number)
        self.state: State = "serving"
        self.name = f"s{self.stage}r{number // swarm.manifest.stages}"
        self.asked = 0

    @property
    def peer(self) -> PeerId:
        return self.transport.peer_id

    async def start(self) -> None:
        await self.transport.start()
        await self.transport.connect([memory_address(self.swarm.seed.peer_id)], 5.0)
        await self.rpc.start()
        self.rpc.handle(GetStats.answered_by(self._on_stats))
        self.rpc.handle(GetHistory.answered_by(self._on_history))
        await self.announce()

    async def announce(self, lifetime: float | None = None) -> None:
        seconds, manifest = self.swarm.seconds(), self.swarm.manifest
        step = int(seconds * 2)
        record = Announcement(
            stage=self.stage,
            state=self.state,
            since=self.transport.now() - seconds,
            step=step,
            tokens_per_second=RATE,
            name=self.name,
        )
        lifetime = manifest.limits.record_lifetime if lifetime is None else lifetime
        await self.transport.put(stage_key(self.swarm.run_id, self.stage), record.to_bytes(), lifetime, 5.0)

    async def _on_stats(self, request: Request[GetStats]) -> Answer[NodeStats]:
        self.asked += 1
        return Answer(self.stats())

    async def _on_history(self, request: Request[GetHistory]) -> Answer[History]:
        seconds, now = self.swarm.seconds(), self.transport.now()
        ages = [seconds * (1 - place / MOST_HISTORY) for place in range(MOST_HISTORY)]
        told = [(now - age, self.stats(seconds - age)) for age in ages]
        return Answer(
            History(
                points=[
                    HistoryPoint(
                        time, s.stage, s.tokens, s.tokens_per_second, s.loss, s.spread, s.expected_spread
                    )
                    for time, s in told
                ]
            )
        )

    def stats(self, seconds: float | None = None) -> NodeStats:
        """After that many seconds of "training"; None is now."""
        seconds = self.swarm.seconds() if seconds is None else seconds
        stages = self.swarm.manifest.stages
        step, is_last = int(seconds * 2), self.stage == stages - 1
        noise = self.rng.gauss(0, 1)
        after = [m.peer for m in self.swarm.members if m.stage == self.stage + 1][
            self.number // stages % 97 :
        ]
        round_ = step // self.swarm.manifest.outer.inner_steps
        place, shift = self.number // stages, round_ % 2  # pairs of neighbours, others in the next round
        other = ((place + shift) ^ 1) - shift
        there = [m.peer for m in self.swarm.members if m.stage == self.stage and m.number // stages == other]
        partner = there[0] if there else ""
        return NodeStats(
            stage=self.stage,
            state=self.state,
            step=step,
            round=round_,
            loss=2.0 + 3.5 * math.exp(-seconds / 600) + 0.02 * noise if is_last else None,
            tokens=int(seconds * RATE * (0.8 + self.number % 5 / 10)),
            tokens_per_second=RATE * (1 + 0.05 * noise),
            pair_averagings=round_,
            partner=partner,
            spread=1.6e-3 * (1 - math.exp(-seconds / 200)) * (1 + 0.1 * noise),
            expected_spread=1.5e-3 * (1 - math.exp(-seconds / 200)),
            delivered=int(seconds * 8),
            sent={peer: int(seconds * (3 - i / 3)) for i, peer in enumerate(after[:MOST_TOLD])},
            queue=int(self.rng.random() * 3),
            resends=self.number % 3,
            uptime=seconds,
            version=own_version(),
            trend=self._trend(seconds) if is_last else None,
            step_age=0.5,
            recent_compute_fraction=min(1.0, max(0.0, 0.72 + 0.08 * noise - 0.15 * (self.stage == 1))),
            links=[
                LinkReport(
                    peer[-PEER_CHARACTERS:],
                    0.01 + 0.09 * ((i * 7 + self.number * 3) % 11) / 11,
                    4e6 + 1e6 * (i % 5),
                    0.2,
                )
                for i, peer in enumerate([m.peer for m in self.swarm.members[:40] if m is not self])
            ],
        )

    def _trend(self, seconds: float) -> LossTrend:
        span = min(3600.0, seconds)
        before, now = (2.0 + 3.5 * math.exp(-at / 600) for at in (seconds - span, seconds))
        return LossTrend(span, before, now, 0.004)

    async def kill(self) -> None:
        """No answer any more; the record stays until it runs out."""
        self.swarm.members.remove(self)
        self.swarm.network.kill(self.peer)


class MadeUpSwarm:
    """Mutable state: the members that live."""

    def __init__(self, manifest: Manifest, clock: Callable[[], float], age: float = 0.0) -> None:
        """`age` is for how many seconds they have "trained" already."""
        self.manifest, self.clock = manifest, clock
        self.network = MemoryNetwork(1, Link(latency=0.002))
        self.signed = SignedManifest.sign(manifest, Identity.from_seed("run"))
        self.run_id = self.signed.run_id
        self.seed = MemoryTransport(self.network, Identity.from_seed("seed"))
        self.members: list[MadeUpMember] = []
        self._began = clock() - age

    def seconds(self) -> float:
        return self.clock() - self._began

    async def start(self, members: int) -> None:
        await self.seed.start()
        for number in range(members):
            await self.add(number)

    async def add(self, number: int) -> MadeUpMember:
        member = MadeUpMember(self, number)
        await member.start()
        self.members.append(member)
        return member

    async def renew(self) -> None:
        """All records, for their lifetime."""
        for member in list(self.members):
            await member.announce()

    async def observer(self) -> Observer:
        transport = MemoryTransport(self.network, Identity.from_seed("observer"))
        await transport.start()
        await transport.connect([memory_address(self.seed.peer_id)], 5.0)
        return Observer(transport, Rpc(transport), self.signed)
