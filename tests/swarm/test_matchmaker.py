"""The matchmakers of real nodes over the in-memory network: rounds with lost messages, deaths and liars."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.stats import chisquare

from node.context import Context, Counters
from node.matchmaker import Matchmaker
from node.membership import View
from node.pairing import Pair
from protocol.announcement import Announcement
from protocol.errors import NolocoError, Refused, TransportDown
from protocol.identity import Identity
from protocol.messages import Accept, Contribute, Done, Message, Propose, Ready, Release, SitOut
from protocol.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import PeerId
from protocol.transport.memory import MemoryTransport
from protocol.transport.memory_link import Link
from protocol.transport.memory_network import MemoryNetwork
from tests.swarm.micro import micro_manifest, run_swarm, until

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
        self.replica = SimpleNamespace(steps_in_round=0, round=0)
        self.rounds: list[Round] = []
        self.agreed: Counter[Pair] = Counter()
        self.came: dict[str, asyncio.Event] = {}
        self.counters = Counters()
        self.refused: list[tuple[PeerId, str]] = []

    async def join(self) -> None:
        await self.transport.start()
        await self.rpc.start()
        settings = {"outer__inner_steps": K, **self.manifest}
        context: Any = Context(
            self.peer, "run", micro_manifest(**settings), 0, self.transport, self.rpc, self.view,
            SimpleNamespace(), SimpleNamespace(), self.counters,  # type: ignore[arg-type]
        )  # fmt: skip
        replica: Any = self.replica
        self.matchmaker = Matchmaker(context, replica, self.rng, lambda pair: self.agreed.update([pair]))
        self.rpc.handle(Traffic.PAIRING, Propose, self.matchmaker.on_propose)
        self.rpc.handle(Traffic.PAIRING, Ready, self.matchmaker.on_ready)
        self.rpc.handle(Traffic.PAIRING, Release, self.matchmaker.on_release)
        self.rpc.handle(Traffic.PAIRING, SitOut, self.matchmaker.on_sit_out)
        self.rpc.handle(Traffic.GOSSIP, Contribute, self.on_contribute)

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
            self.counters.tokens += 1
            self.counters.mark(loop.time())
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
                await self.rpc.call(pair.partner, Traffic.GOSSIP, message, Done, deadline=EXCHANGE_SECONDS)
                await self.came.setdefault(pair.name, asyncio.Event()).wait()
        except (NolocoError, TimeoutError):
            self.view.suspect(pair.partner, self.transport.now())
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
        self._lives: dict[int, asyncio.Task[None]] = {}

    async def add(self, number: int, **settings: Any) -> Member:
        member = Member(self.network, number, **settings)
        await member.join()
        self.members.append(member)
        for one in self.members:
            one.meet(self.members)
        self._lives[number] = asyncio.get_running_loop().create_task(member.live())
        return member

    async def kill(self, member: Member) -> None:
        self.members.remove(member)
        self.network.kill(member.peer)
        self._lives.pop(member.number).cancel()
        await member.matchmaker.close()

    async def rounds(self, count: int) -> None:
        """Until every member has ended that many more."""
        goals = {member.number: len(member.rounds) + count for member in self.members}
        await until(
            lambda: all(len(member.rounds) >= goals[member.number] for member in self.members), 1e5, 0.5
        )

    async def leave(self) -> None:
        for life in self._lives.values():
            life.cancel()
        results = await asyncio.gather(*self._lives.values(), return_exceptions=True)
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


# --- no faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4])
def test_pairs_are_equally_likely_over_the_network_too(count: int) -> None:
    async def main() -> Stage:
        stage = await stage_of(count)
        await stage.rounds(300)
        await stage.leave()
        return stage

    stage = run_swarm(main())
    peers = [member.peer for member in stage.members]
    met = [Counter(round_.partner for round_ in member.rounds) for member in stage.members]
    counts = [met[a][peers[b]] for a, b in combinations(range(count), 2)]
    assert chisquare(counts).pvalue > 0.01
    assert sum(both != 2 for both in pair_names(stage).values()) <= count  # those under way at the end
    alone = sum(round_.partner is None for round_ in all_rounds(stage, 5))
    assert alone / len(all_rounds(stage, 5)) == pytest.approx(count % 2 / count, abs=0.01)
    for member in stage.members:
        partners = [round_.partner for round_ in member.rounds[5:]]
        assert (None, None) not in pairwise(partners)
        assert set(member.agreed.values()) == {1}  # told once of each pair


@pytest.mark.parametrize("pace", ["steps", "time"])
def test_at_speeds_that_differ_fourfold_the_fastest_is_hardly_blocked(pace: str) -> None:
    async def main() -> Stage:
        stage = Stage()
        for number, speed in enumerate((4.0, 2.0, 1.5, 1.0)):
            settings = {"outer__pace": pace, "outer__inner_steps": 24}
            await stage.add(number, step_seconds=1.0 / speed, manifest=settings)
        await stage.rounds(40)
        await stage.leave()
        return stage

    stage = run_swarm(main())
    fastest = stage.members[0]
    seconds = fastest.replica.round * 24 / 4.0 if pace == "steps" else fastest.replica.round * 16.0
    assert sum(round_.blocked for round_ in fastest.rounds) < 0.05 * seconds
    if pace == "time":
        counts = [len(member.rounds) for member in stage.members]
        assert max(counts) <= 1.1 * min(counts)
        assert sum(round_.partner is None for round_ in all_rounds(stage, 10)) < 0.05 * len(
            all_rounds(stage, 10)
        )


# --- faults -------------------------------------------------------------------------------------


def test_lost_messages_cost_milliseconds_and_few_rounds() -> None:
    async def main() -> Stage:
        faulty = Link(latency=0.03, jitter=0.04, open_loss=0.02, write_loss=0.02)
        stage = await stage_of(4, faulty)
        await stage.rounds(150)
        await stage.leave()
        return stage

    stage = run_swarm(main())
    rounds = all_rounds(stage, 5)
    assert max(round_.concluding for round_ in rounds) == 0.0
    assert sum(round_.partner is not None for round_ in rounds) > 0.6 * len(rounds)
    blocked = sorted(round_.blocked for round_ in rounds)
    assert blocked[len(blocked) // 2] < 0.5
    assert sum(round_.blocked > 2.0 for round_ in rounds) < 0.05 * len(rounds)


def test_a_partner_that_dies_is_replaced_in_the_same_round() -> None:
    async def main() -> None:
        stage = await stage_of(5)
        await stage.rounds(10)
        alone_with_it = 0
        for _ in range(6):
            victim = stage.members[-1]
            number = victim.number
            pair = victim.matchmaker.pair
            widow = next((m for m in stage.members if pair is not None and m.peer == pair.partner), None)
            early = victim.replica.steps_in_round <= K // 2
            await stage.kill(victim)
            await stage.rounds(2)
            if widow is not None and early and all(r.partner is None for r in widow.rounds[-2:]):
                alone_with_it += 1
            await stage.add(number)
            await stage.rounds(5)
            assert any(round_.partner is not None for round_ in stage.members[-1].rounds)
        assert alone_with_it == 0
        await stage.leave()

    run_swarm(main())


def test_a_late_joiner_meets_the_others_within_three_rounds() -> None:
    async def main() -> None:
        stage = await stage_of(4)
        await stage.rounds(10)
        newcomer = await stage.add(4)
        newcomer.replica.round = stage.members[0].replica.round
        await until(lambda: len(newcomer.rounds) >= 3)
        assert any(round_.partner is not None for round_ in newcomer.rounds)
        await stage.leave()

    run_swarm(main())


def test_both_sides_of_a_partition_go_on_and_meet_again() -> None:
    async def main() -> None:
        stage = await stage_of(4)
        await stage.rounds(5)
        sides = [[member.peer for member in stage.members[:2]], [member.peer for member in stage.members[2:]]]
        stage.network.partition(*sides)
        await stage.rounds(3)
        before = [len(member.rounds) for member in stage.members]
        await stage.rounds(10)
        for member, since in zip(stage.members, before, strict=True):
            own_side = sides[member.peer in sides[1]]
            partners = [round_.partner for round_ in member.rounds[since:]]
            assert set(partners) <= {*own_side, None}
            assert sum(partner is not None for partner in partners) >= 6
        stage.network.heal()
        await asyncio.sleep(70)  # the longest suspicion
        before = [len(member.rounds) for member in stage.members]
        await stage.rounds(20)
        for member, since in zip(stage.members, before, strict=True):
            assert len({r.partner for r in member.rounds[since:]} - {None}) == 3
        await stage.leave()

    run_swarm(main())


def test_a_replica_that_stands_still_is_left_alone_and_keeps_nobody_waiting() -> None:
    async def main() -> None:
        stage = await stage_of(3)
        await stage.rounds(5)
        still = stage.members[2]
        stage._lives[still.number].cancel()
        await stage.rounds(0)
        await asyncio.sleep(20)
        others = stage.members[:2]
        before = [len(member.rounds) for member in others]
        await until(lambda: all(len(m.rounds) >= b + 10 for m, b in zip(others, before, strict=True)), 1e4)
        for member, since in zip(others, before, strict=True):
            partners = [round_.partner for round_ in member.rounds[since:]]
            assert still.peer not in partners
            assert partners.count(None) <= 2
        stage._lives.pop(still.number)
        await stage.leave()

    run_swarm(main())


def test_who_retires_lets_its_partner_look_for_another() -> None:
    async def main() -> None:
        stage = await stage_of(2)
        await stage.rounds(3)
        one, other = stage.members
        await until(lambda: one.matchmaker.pair is not None, step=0.05)
        await one.matchmaker.retire()
        await asyncio.sleep(0.2)
        assert other.matchmaker.pair is None
        with pytest.raises(Refused, match="finished"):
            await propose(other.rpc, one)
        await stage.leave()

    run_swarm(main())


def test_a_node_whose_network_is_down_ends_its_rounds_alone_at_once() -> None:
    async def main() -> None:
        stage = await stage_of(3)
        await stage.rounds(5)
        cut_off = stage.members[0]

        async def down(*_: Any) -> Any:
            raise TransportDown("p2pd is not running at present")

        transport: Any = cut_off.transport
        real, transport.open = transport.open, down
        for stream in list(transport._streams):
            stream.break_off()
        since = len(cut_off.rounds)
        await until(lambda: len(cut_off.rounds) >= since + 4)
        assert all(r.partner is None and r.blocked < 0.1 for r in cut_off.rounds[since + 1 :])
        transport.open = real
        await asyncio.sleep(70)
        since = len(cut_off.rounds)
        await until(lambda: len(cut_off.rounds) >= since + 6)
        assert any(round_.partner is not None for round_ in cut_off.rounds[since:])
        await stage.leave()

    run_swarm(main())


# --- liars --------------------------------------------------------------------------------------

SOON: dict[str, float] = {"opens_in": 0.0, "due_in": 1.0, "ends_in": 60.0, "step_seconds": 0.1}


async def propose(rpc: Rpc, member: Member, **changes: Any) -> Accept:
    fields = {"stage": 0, "round": member.replica.round, "pair": "p", **SOON, **changes}
    message = Propose(**fields)
    accept, _ = await rpc.call(member.peer, Traffic.PAIRING, message, Accept, deadline=5.0)
    return accept


async def liar(stage: Stage) -> Rpc:
    transport = MemoryTransport(stage.network, Identity.from_seed("liar"))
    await transport.start()
    return Rpc(transport)


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        ({"stage": 7}, "other-stage"),
        ({"opens_in": 9e6, "due_in": 9e6, "ends_in": 9e6}, "out-of-step"),
        ({"opens_in": 5.0, "due_in": 4.0}, "out-of-step"),
        ({"step_seconds": 9e6}, "out-of-step"),
        ({"round": 0}, "stale"),
    ],
)
def test_a_proposal_that_makes_no_sense_is_refused_and_leaves_no_trace(
    lie: dict[str, Any], code: str
) -> None:
    async def main() -> None:
        stage = await stage_of(1)
        await stage.rounds(8)
        [member] = stage.members
        with pytest.raises(Refused) as refusal:
            await propose(await liar(stage), member, **lie)
        assert refusal.value.code == code
        assert not member.matchmaker._pairing.agreements
        await stage.leave()

    run_swarm(main())


@pytest.mark.parametrize("field_", ["opens_in", "due_in", "ends_in", "step_seconds"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_numbers_that_are_none_never_reach_the_matchmaker(field_: str, value: float) -> None:
    with pytest.raises(ValueError, match=field_):
        Propose(stage=0, round=0, pair="p", **{**SOON, field_: value})


def test_nobody_can_end_release_or_keep_the_pair_of_others() -> None:
    async def main() -> None:
        stage = await stage_of(2)
        await stage.rounds(3)
        member = stage.members[0]
        await until(lambda: member.matchmaker.pair is not None, step=0.05)
        pair, stranger = member.matchmaker.pair, await liar(stage)
        assert pair is not None
        requests: list[Message] = [Ready(pair=pair.name), Ready(pair="unknown")]
        for request in requests:
            with pytest.raises(Refused, match="unknown-pair"):
                await stranger.call(member.peer, Traffic.PAIRING, request, Done, deadline=5.0)
        await stranger.call(member.peer, Traffic.PAIRING, Release(pair=pair.name), Done, deadline=5.0)
        with pytest.raises(Refused, match="engaged"):
            await propose(stranger, member, pair=pair.name, ends_in=3.0)
        assert member.matchmaker.pair == pair
        await stage.leave()

    run_swarm(main())


def test_one_that_agrees_and_never_comes_costs_one_deadline_and_then_nothing_for_a_while() -> None:
    async def main() -> None:
        stage = await stage_of(2)
        await stage.rounds(3)
        member, stranger = stage.members[0], await liar(stage)
        member.meet([Member(stage.network, 99)])

        async def insist() -> None:
            while True:
                try:
                    await propose(stranger, member, pair=f"{asyncio.get_running_loop().time()}")
                except NolocoError:
                    await asyncio.sleep(0.1)

        insisting = asyncio.get_running_loop().create_task(insist())
        await until(lambda: len(member.rounds) >= 30, 1e4)
        insisting.cancel()
        assert max(round_.blocked for round_ in member.rounds) < 1.2 * EXCHANGE_SECONDS
        await stage.rounds(10)
        assert sum(round_.partner is not None for round_ in member.rounds[-8:]) >= 4
        await stage.leave()

    run_swarm(main())


def test_one_that_asks_everybody_to_sit_out_keeps_nobody_alone_twice_in_a_row() -> None:
    async def main() -> None:
        stage = await stage_of(4)
        await stage.rounds(5)
        stranger = await liar(stage)

        async def spoil() -> None:
            while True:
                for member in stage.members:
                    for due in (2.0, 4.0, 6.0, 8.0):
                        message = SitOut(stage=0, **{**SOON, "opens_in": due, "due_in": due, "ends_in": due})
                        with contextlib.suppress(Refused):
                            await stranger.call(member.peer, Traffic.PAIRING, message, Done, deadline=5.0)
                await asyncio.sleep(0.2)

        spoiling = asyncio.get_running_loop().create_task(spoil())
        await stage.rounds(30)
        spoiling.cancel()
        for member in stage.members:
            partners = [round_.partner for round_ in member.rounds[7:]]
            assert (None, None, None) not in zip(partners, partners[1:], partners[2:], strict=False)
        await stage.leave()

    run_swarm(main())
