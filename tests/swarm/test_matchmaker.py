"""The matchmakers of a stage over the in-memory network: rounds without faults, with lost messages and deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import combinations, pairwise
from typing import Any

import pytest
from scipy.stats import chisquare

from bootstrap.lab.in_memory.memory_link import Link
from protocol.errors import Refused, TransportDown
from protocol.messages.training import Accept, Propose
from protocol.rpc.rpc import Answer, Request
from tests.swarm.members import WORLD, K, Member, Stage, all_rounds, pair_names, propose, stage_of
from tests.swarm.micro import run_swarm, until

# --- no faults -------------------------------------------------------------------------------------


@pytest.mark.long_but("3")
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


def test_of_whom_one_does_not_know_the_engaged_tell_and_it_is_asked_next() -> None:
    """As in a stage of thousands, of which each knows a hundred: the two that are left do not know each other."""

    async def main() -> tuple[Member, Member]:
        stage = Stage(Link(latency=0.01))
        seeker, other = (Member(stage.network, number) for number in (0, 1))
        engaged = [Member(stage.network, number) for number in range(2, 22)]
        for member in (seeker, other, *engaged):
            await member.join()

        async def refuse(request: Request[Propose]) -> Answer[Accept]:
            raise Refused("engaged", " ".join((engaged[0].peer, other.peer)))

        for member in engaged:
            member.rpc.handle(Propose.answered_by(refuse))
        seeker.meet(engaged)
        stage.members = [seeker, other]
        stage.lives = {m.number: asyncio.get_running_loop().create_task(m.live()) for m in stage.members}
        await until(lambda: any(round_.partner is not None for round_ in seeker.rounds), 1e4, 0.5)
        stage.members += engaged
        await stage.leave()
        return seeker, other

    seeker, other = run_swarm(main())
    assert {named for _, named in seeker.heard_about} == {other.peer}
    assert other.heard_about == []
    assert other.peer in {round_.partner for round_ in seeker.rounds}


@pytest.mark.long
@pytest.mark.parametrize(("step_seconds", "link"), [(0.5, WORLD), (0.065, Link(latency=0.01))])
def test_in_rounds_of_three_steps_next_to_nobody_is_alone(step_seconds: float, link: Link) -> None:
    """And nobody has agreed in vain: a pair that was averaged is not made anew, no replicas wait in a circle."""

    async def main() -> Stage:
        stage = await stage_of(4, link, step_seconds=step_seconds, manifest={"outer__inner_steps": 3})
        await stage.rounds(300)
        await stage.leave()
        return stage

    rounds = all_rounds(run_swarm(main()), 5)
    alone = [round_ for round_ in rounds if round_.partner is None]
    assert len(alone) < 0.02 * len(rounds)
    assert not any(round_.pair for round_ in alone)


@pytest.mark.long
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


# --- faults ----------------------------------------------------------------------------------------


@pytest.mark.long
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
        stage.lives[still.number].cancel()
        await stage.rounds(0)
        await asyncio.sleep(20)
        others = stage.members[:2]
        before = [len(member.rounds) for member in others]
        await until(lambda: all(len(m.rounds) >= b + 10 for m, b in zip(others, before, strict=True)), 1e4)
        for member, since in zip(others, before, strict=True):
            partners = [round_.partner for round_ in member.rounds[since:]]
            assert still.peer not in partners
            assert partners.count(None) <= 2
        stage.lives.pop(still.number)
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

        async def down(*_: Any, **__: Any) -> Any:
            raise TransportDown("p2pd is not running at present")

        transport: Any = cut_off.transport
        real, transport.open = transport.open, down
        for stream in transport.streams:
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
