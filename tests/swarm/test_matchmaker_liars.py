"""The matchmakers of a stage among members that lie: nonsense, broken promises, and pairs that are not theirs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from protocol.errors import NolocoError, Refused
from protocol.messages.training import Propose, Ready, Release, SitOut
from protocol.records.identity import Identity
from protocol.rpc.rpc import Rpc
from tests.swarm.members import EXCHANGE_SECONDS, SOON, Member, Stage, propose, stage_of
from tests.swarm.micro import run_swarm, until


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
        assert not member.matchmaker.has_agreed
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
        requests: list[Any] = [Ready(pair=pair.name), Ready(pair="unknown")]
        for request in requests:
            with pytest.raises(Refused, match="unknown-pair"):
                await stranger.call(member.peer, request, deadline=5.0)
        await stranger.call(member.peer, Release(pair=pair.name), deadline=5.0)
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
                            await stranger.call(member.peer, message, deadline=5.0)
                await asyncio.sleep(0.2)

        spoiling = asyncio.get_running_loop().create_task(spoil())
        await stage.rounds(30)
        spoiling.cancel()
        for member in stage.members:
            partners = [round_.partner for round_ in member.rounds[7:]]
            assert (None, None, None) not in zip(partners, partners[1:], partners[2:], strict=False)
        await stage.leave()

    run_swarm(main())
