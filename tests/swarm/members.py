"""A stage whose members are real matchmakers over the in-memory network, with nothing to train."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.context import Context, Throughput
from node.links.trip_times import FIRST_DEADLINE
from node.membership.view import View
from node.rounds.matchmaker import Matchmaker
from node.rounds.meeting import Pair
from protocol.errors import NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages import Done
from protocol.messages.training import Accept, Contribute, Propose
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity
from protocol.records.lineage import Lineage
from protocol.rpc.rpc import Answer, Request, Rpc
from tests.swarm.micro import membership_of, micro_manifest, until

K = 10
STEP_SECONDS = 0.5
EXCHANGE_SECONDS = 5.0
WORLD = Link(latency=0.03, jitter=0.04)


@dataclass
class Round:
    partner: PeerId | None
    pair: str
    blocked: float  # seconds from the last inner step to the end of the exchange
    concluding: float  # part of it until the partner was named


@dataclass(frozen=True)
class Hearing(Context):
    """The surroundings of a member that asks nobody for a record: `hear` has it."""

    hear: Callable[[PeerId, PeerId, float], Awaitable[None]] | None = None

    async def hear_about(self, asked: PeerId, named: PeerId, deadline: float) -> None:
        assert self.hear is not None
        await self.hear(asked, named, deadline)


@dataclass
class Member:
    """A replica that takes its time instead of training, and exchanges a single message instead of weights."""

    network: MemoryNetwork
    number: int
    step_seconds: float = STEP_SECONDS
    manifest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transport = MemoryTransport(self.network, Identity.from_seed("member", self.number))
        self.peer = self.transport.peer_id
        self.rng = random.Random(self.number)
        self.view, self.rpc = View(), Rpc(self.transport)
        self.replica = SimpleNamespace(steps_in_round=0, round=0, lineage=Lineage(), fragments=[None])
        self.rounds: list[Round] = []
        self.agreed: Counter[Pair] = Counter()
        self.came: dict[str, asyncio.Event] = {}
        self.throughput = Throughput()
        self.refused: list[tuple[PeerId, str]] = []
        self.heard_about: list[tuple[PeerId, PeerId]] = []  # who was asked, about whom

    async def join(self) -> None:
        await self.transport.start()
        await self.rpc.start()
        settings = {"outer__inner_steps": K, **self.manifest}
        membership = membership_of(self.rpc, micro_manifest(**settings), self.view)
        no_compute: Any = SimpleNamespace()
        context = Hearing(membership, 0, no_compute, throughput=self.throughput, hear=self.hear_about)
        replica: Any = self.replica
        self.matchmaker = Matchmaker(context, replica, self.rng, lambda pair: self.agreed.update([pair]))
        self.matchmaker.serve(self.rpc)
        self.rpc.handle(Contribute.answered_by(self.on_contribute))

    async def hear_about(self, asked: PeerId, named: PeerId, deadline: float) -> None:
        assert deadline <= FIRST_DEADLINE
        self.heard_about.append((asked, named))
        announcement = Announcement(stage=0, state="serving", since=0.0)
        self.view.update(named, announcement, self.network.now() + 1e6)

    def meet(self, others: list[Member], forever: float = 1e6) -> None:
        for other in others:
            announcement = Announcement(
                stage=0, state="serving", since=0.0, tokens_per_second=1 / other.step_seconds
            )
            self.view.update(other.peer, announcement, self.network.now() + forever)

    async def live(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, K * self.step_seconds))
        loop = asyncio.get_running_loop()
        while True:
            seconds = self.step_seconds * self.rng.gauss(1, 0.03)
            await asyncio.sleep(seconds)
            self.replica.steps_in_round += 1
            self.throughput.tokens += 1
            self.throughput.mark(loop.time())
            self.matchmaker.step_done(seconds)
            if self.matchmaker.must_end:
                await self.end_round()

    async def end_round(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        pair = await self.matchmaker.conclude()
        concluding = loop.time() - began
        averaged = pair is not None and await self.exchange(pair)
        partner = pair.partner if pair is not None and averaged else None
        name = pair.name if pair is not None else ""
        self.rounds.append(Round(partner, name, loop.time() - began, concluding))
        self.replica.steps_in_round, self.replica.round = 0, self.replica.round + 1
        self.matchmaker.begin_round()

    async def exchange(self, pair: Pair) -> bool:
        message = Contribute(pair=pair.name, part="z", offset=0, total=1)
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                await self.rpc.call(pair.partner, message, deadline=EXCHANGE_SECONDS)
                await self.came.setdefault(pair.name, asyncio.Event()).wait()
        except (NolocoError, TimeoutError):
            self.view.suspect(pair.partner)
            return False
        self.view.trust(pair.partner)
        return True

    async def on_contribute(self, request: Request) -> Answer:
        if not self.matchmaker.is_expected(request.message.pair, request.peer):
            raise Refused("unknown-pair")
        self.came.setdefault(request.message.pair, asyncio.Event()).set()
        return Answer(Done())

    async def leave(self) -> None:
        await self.matchmaker.close()
        await self.rpc.close()
        await self.transport.close()


class Stage:
    """All members of one stage, who know each other, and the tasks that they live in."""

    def __init__(self, link: Link = WORLD) -> None:
        self.network = MemoryNetwork(1, link)
        self.members: list[Member] = []
        self.lives: dict[int, asyncio.Task[None]] = {}

    async def add(self, number: int, **settings: Any) -> Member:
        member = Member(self.network, number, **settings)
        await member.join()
        self.members.append(member)
        for one in self.members:
            one.meet(self.members)
        self.lives[number] = asyncio.get_running_loop().create_task(member.live())
        return member

    async def kill(self, member: Member) -> None:
        self.members.remove(member)
        self.network.kill(member.peer)
        self.lives.pop(member.number).cancel()
        await member.matchmaker.close()

    async def rounds(self, count: int) -> None:
        """Until every member has ended that many more."""
        goals = {member.number: len(member.rounds) + count for member in self.members}
        await until(
            lambda: all(len(member.rounds) >= goals[member.number] for member in self.members), 1e5, 0.5
        )

    async def leave(self) -> None:
        for life in self.lives.values():
            life.cancel()
        results = await asyncio.gather(*self.lives.values(), return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        for member in self.members:
            await member.leave()


async def stage_of(count: int, link: Link = WORLD, **settings: Any) -> Stage:
    stage = Stage(link)
    for number in range(count):
        await stage.add(number, **settings)
    return stage


def all_rounds(stage: Stage, after: int = 0) -> list[Round]:
    return [round_ for member in stage.members for round_ in member.rounds[after:]]


def pair_names(stage: Stage) -> Counter[str]:
    """How many of the two ended each pair's round together."""
    return Counter(round_.pair for round_ in all_rounds(stage) if round_.partner is not None)


SOON: dict[str, Any] = {"opens_in": 0.0, "due_in": 1.0, "ends_in": 60.0, "step_seconds": 0.1}


async def propose(rpc: Rpc, member: Member, **changes: Any) -> Accept:
    fields = {"stage": 0, "round": member.replica.round, "pair": "p", **SOON, **changes}
    message = Propose(**fields)
    accept, _ = await rpc.call(member.peer, message, deadline=5.0)
    return accept
