"""Who is answered, how often, and how members that are not known yet come in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from bootstrap.lab.in_memory.memory import MemoryTransport
from node.model.compute import InlineCompute, Priority
from node.pipeline.inference import AT_ONCE, IDLE_SECONDS, SHARE, Leftover
from protocol.access.peer_limits import Allowance
from protocol.codecs.codec import encode
from protocol.errors import PeerUnreachable, Refused
from protocol.ground import PeerId
from protocol.messages import Asker, Asks, Done
from protocol.messages.frame import FrameType
from protocol.messages.peers import GetStats, Introduce, NodeStats
from protocol.messages.state import GetStatePiece, GetTokenizer, StatePiece, TokenizerPiece
from protocol.messages.training import Forward, Propose, Ready
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from protocol.records.records import seal_record
from protocol.rpc.channel import HALF_FRAME_SECONDS
from protocol.rpc.door import (
    LONGEST_TURN,
    OWN,
    VISITOR_BYTES,
    VISITOR_PLACES,
    VISITOR_STREAMS,
    VISITORS,
    Door,
)
from protocol.rpc.frames import write_frame
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from tests.unit.two_peers import Two, after, forward, in_virtual_time, say_done, two_peers

LIFE = 60.0
CALLER = Identity.from_seed("caller")


def introduction(two: Two, stage: int = 1, signer: Identity = CALLER, run: str = "run") -> Introduce:
    expires = two.network.now() + LIFE
    value = Announcement(stage=stage, state="serving", since=0.0).to_bytes()
    return Introduce(
        stage=stage, record=seal_record(signer, stage_key(run, stage), value, expires), expires=expires
    )


async def stats(request: Request[GetStats]) -> Answer[NodeStats]:
    return Answer(NodeStats(stage=1, state="serving", step=0, round=0))


@asynccontextmanager
async def a_door(seen: dict[PeerId, int] | None = None) -> AsyncIterator[Two]:
    """The server is a replica of stage 1."""
    async with two_peers() as two:
        stages = {Asker.REPLICA: 1, Asker.BEFORE: 0}
        two.server.open_door(Door("run", stages, ({} if seen is None else seen).get, two.network.now))
        two.server.handle(
            Ready.answered_by(say_done, Traffic.GOSSIP),
            Forward.answered_by(after(lambda _: 0.0)),
            GetStats.answered_by(stats),
        )
        two.server.limit({Traffic.PIPELINE: 1 << 20, Traffic.GOSSIP: 1 << 20})
        yield two


def requests() -> set[type[Asks]]:
    def below(kind: type[Asks]) -> Iterator[type[Asks]]:
        yield kind
        for sub in kind.__subclasses__():
            yield from below(sub)

    return {kind for kind in below(Asks) if "kind" in vars(kind) and kind.__module__.startswith("protocol.")}


def test_what_anybody_may_ask_is_written_down() -> None:
    open_to_all = {kind.kind for kind in requests() if kind.asker is Asker.ANYBODY}
    assert open_to_all == {
        "get-copies",
        "get-copy-piece",
        "get-past",
        "get-receipts",
        "get-records",
        "get-stats",
        "get-state-index",
        "get-state-piece",
        "get-state-sample",
        "get-history",
        "get-tokenizer",
        "get-tokenizer-hashes",
        "evaluate",
        "predict",
        "probe",
    }
    assert {kind.kind for kind in requests() if kind.asker is Asker.NEWCOMER} == {
        "hello",
        "introduce",
        "prove-words",
        "try-words",
    }
    assert {kind.kind for kind in requests() if kind.asker is Asker.BEFORE} == {
        "forward",
        "get-backlog",
        "return",
    }
    assert Propose.asker is Asker.REPLICA


@in_virtual_time
async def test_training_is_for_those_whose_record_was_seen() -> None:
    seen = dict[PeerId, int]()
    async with a_door(seen) as two:
        for request, stage in ((Ready(pair="p"), 1), (forward(1), 0)):
            traffic = Traffic.GOSSIP if stage else Traffic.PIPELINE
            for other in (None, 1 - stage, 7):
                seen[CALLER.peer_id] = other  # type: ignore[assignment]
                with pytest.raises(Refused, match="stranger"):
                    await two.ask(request, traffic=traffic)
            seen[CALLER.peer_id] = stage
            await two.ask(request, traffic=traffic)


@in_virtual_time
async def test_who_is_not_known_yet_introduces_itself_and_again_when_it_was_forgotten() -> None:
    async with a_door() as two:
        two.caller.introduction = introduction(two)
        await two.ask()
        await asyncio.sleep(LIFE + 1)
        with pytest.raises(Refused, match="stranger"):
            await two.ask()  # its record has run out
        two.caller.introduction = introduction(two)
        await two.ask()


@in_virtual_time
async def test_in_a_crowd_the_record_goes_first_and_costs_no_round_trip() -> None:
    async with a_door() as two:
        loop = asyncio.get_running_loop()

        async def seconds() -> float:
            two.caller.introduction, began = introduction(two), loop.time()
            await two.ask()
            return loop.time() - began

        refused_first = await seconds()
        known = await seconds()
        await asyncio.sleep(LIFE + 1)
        two.caller.introductions.go_first = True
        assert await seconds() == pytest.approx(known)
        assert await seconds() == pytest.approx(known)
        assert refused_first > 2 * known
        two.caller.introduction = introduction(two, stage=0)
        with pytest.raises(Refused, match="stranger"):
            await two.ask()
        assert await seconds() == pytest.approx(known)  # after a move, too


@in_virtual_time
async def test_a_record_of_another_peer_run_or_stage_opens_nothing() -> None:
    async with a_door() as two:
        for bad in (
            introduction(two, signer=Identity.from_seed("somebody else")),
            introduction(two, run="another run"),
            introduction(two, stage=0),
            introduction(two).model_copy(update={"expires": two.network.now() + 2 * LIFE}),
            introduction(two).model_copy(update={"stage": 0}),
        ):
            two.caller.introduction = bad
            with pytest.raises(Refused, match="stranger"):
                await two.ask()
        two.caller.introduction = introduction(two)
        await two.ask()


@in_virtual_time
async def test_only_members_send_much_at_once_and_the_forgotten_are_not_punished() -> None:
    async with a_door() as two:
        parcel = [encode(torch.zeros(VISITOR_BYTES), "fp32")]
        for _ in range(20):  # of which ten strikes would be a ban
            with pytest.raises(PeerUnreachable):
                await two.ask(tensors=parcel)
        two.caller.introduction = introduction(two)
        await two.ask(tensors=parcel)
        await asyncio.sleep(0.8 * LIFE)
        two.caller.introduction = introduction(two)
        await two.ask(tensors=parcel)  # shown again before the first one is over
        await asyncio.sleep(0.5 * LIFE)
        await two.ask(tensors=parcel)


@in_virtual_time
async def test_a_flood_of_questions_is_answered_at_the_rate_of_visitors_and_members_do_not_wait() -> None:
    seen = {Identity.from_seed("member").peer_id: 1}
    async with a_door(seen) as two:
        answered = 0

        async def flood() -> None:
            nonlocal answered
            while True:
                try:
                    await two.ask(GetStats(), traffic=Traffic.CONTROL, deadline=60.0)
                    answered += 1
                except Refused:
                    pass

        floods = [asyncio.create_task(flood()) for _ in range(50)]
        member = Rpc(MemoryTransport(two.network, Identity.from_seed("member")))
        await member.transport.start()
        began = two.network.now()
        for _ in range(10):
            await asyncio.sleep(2.0)
            asked = two.network.now()
            await member.call(two.address, GetStats(), deadline=1.0)
            assert two.network.now() - asked < 0.1
        at_once, a_second = VISITORS[0]
        assert answered <= at_once + a_second * (two.network.now() - began)
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)


@in_virtual_time
async def test_refusals_cost_too() -> None:
    async with a_door() as two:
        refused = 0

        async def flood(request: Asks) -> None:
            nonlocal refused
            while True:
                with pytest.raises(Refused):
                    await two.ask(request, deadline=60.0)
                refused += 1

        # one that is for others, and one that nobody answers
        floods = [
            asyncio.create_task(flood(request))
            for request in (Ready(pair="p"), GetStats())
            for _ in range(30)
        ]
        await asyncio.sleep(LONGEST_TURN)
        at_once, a_second = VISITORS[0]
        assert 0 < refused <= at_once + a_second * LONGEST_TURN
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)


@in_virtual_time
async def test_the_oldest_of_too_many_strangers_streams_ends_and_no_member_s() -> None:
    seen = {CALLER.peer_id: 1}
    async with a_door(seen) as two:
        await two.ask()
        strangers = [
            MemoryTransport(two.network, Identity.from_seed(str(n))) for n in range(VISITOR_STREAMS + 1)
        ]
        streams = []
        for stranger in strangers:
            await stranger.start()
            streams.append(await stranger.open(two.address, Traffic.GOSSIP.protocol, 5.0))
        with pytest.raises(PeerUnreachable):
            await streams[0].read(1)
        await write_frame(streams[1], FrameType.REQUEST, 1, Ready.kind, {"pair": "p"})
        assert await streams[1].read(1)  # a refusal
        (before,) = two.caller.channels
        await two.ask()
        assert [channel is before for channel in two.caller.channels] == [True]


@in_virtual_time
async def test_the_stream_of_one_that_introduced_itself_is_no_visitors_any_more() -> None:
    async with a_door() as two:
        with pytest.raises(Refused, match="stranger"):
            await two.ask()
        two.caller.introduction = introduction(two)
        await two.ask()
        before = {channel.traffic: channel for channel in two.caller.channels}
        for number in range(VISITOR_STREAMS + 1):
            stranger = MemoryTransport(two.network, Identity.from_seed(str(number)))
            await stranger.start()
            await stranger.open(two.address, Traffic.GOSSIP.protocol, 5.0)
        await two.ask()
        assert {channel.traffic: channel for channel in two.caller.channels} == before


@in_virtual_time
async def test_visitors_who_do_not_read_their_answers_do_not_keep_others_out() -> None:
    async with a_door() as two:

        async def much(request: Request[GetStats]) -> Answer[Done]:
            return Answer(Done(), [encode(torch.zeros(1 << 20), "fp32")])

        two.server.handle(GetStats.answered_by(much, Traffic.STATE))  # type: ignore[arg-type]
        for number in range(VISITOR_PLACES):
            hog = MemoryTransport(two.network, Identity.from_seed(f"hog {number}"))
            await hog.start()
            stream = await hog.open(two.address, Traffic.STATE.protocol, 5.0)
            await write_frame(stream, FrameType.REQUEST, 1, GetStats.kind, {})
        await asyncio.sleep(1.0)
        stream = await two.caller.transport.open(two.address, Traffic.STATE.protocol, 5.0)
        await write_frame(stream, FrameType.REQUEST, 1, GetStats.kind, {})
        async with asyncio.timeout(HALF_FRAME_SECONDS + 5):
            assert await stream.read(1 << 20)


@in_virtual_time
async def test_evaluations_get_a_tenth_of_the_time_while_there_is_training() -> None:
    compute = InlineCompute(lambda priority: 0.1 if priority == Priority.SERVE else 0.01)
    leftover, loop = Leftover(compute), asyncio.get_running_loop()
    computed = 0

    async def ask() -> None:
        nonlocal computed
        while True:
            await leftover.run(lambda: None)
            computed += 1

    asking = [asyncio.create_task(ask()) for _ in range(5)]
    began = loop.time()
    while loop.time() < began + 300:
        await compute.run(Priority.FORWARD, lambda: None)
        await asyncio.sleep(0.01)
    share = computed * 0.1 / (AT_ONCE + SHARE * 300)
    assert 0.9 < share < 1.1
    await asyncio.sleep(IDLE_SECONDS)
    idle_from = computed
    await asyncio.sleep(100)
    assert (computed - idle_from) * 0.1 > 95
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


@in_virtual_time
async def test_what_visitors_download_is_bounded_in_bytes_and_members_do_not_pay_for_it() -> None:
    """Failed before: their requests were counted, and each may fetch 16 MB of a volunteer's month."""
    seen = {Identity.from_seed("member").peer_id: 1}
    async with a_door(seen) as two:
        stages, allowance = {Asker.REPLICA: 1, Asker.BEFORE: 0}, Allowance.shared(8e6, 1e4)
        two.server.open_door(Door("run", stages, seen.get, two.network.now, downloads=allowance))

        async def piece(request: Request[GetStatePiece]) -> Answer[StatePiece]:
            reply = StatePiece(index=0, step=0, round=0, digest=bytes(32))
            return Answer(reply, [encode(torch.zeros(250_000), "fp32")])

        async def tokenizer(request: Request[GetTokenizer]) -> Answer[TokenizerPiece]:
            return Answer(TokenizerPiece(total=1, contents=b" "))

        two.server.handle(GetStatePiece.answered_by(piece), GetTokenizer.answered_by(tokenizer))
        member = Rpc(MemoryTransport(two.network, Identity.from_seed("member")))
        await member.transport.start()
        for rpc in (two.server, two.caller, member):
            rpc.limit({Traffic.STATE: 1 << 21})
        asks = GetStatePiece(stage=1, index=0, moments=False)
        for _ in range(5):  # a megabyte each, half of all for one, the last one overdrawn
            await two.caller.call(two.address, asks, deadline=60.0)
        with pytest.raises(Refused, match="too-much"):
            await two.caller.call(two.address, asks, deadline=60.0)
        await two.caller.call(two.address, GetTokenizer(offset=0), deadline=60.0)  # as whoever joins
        for _ in range(12):
            await member.call(two.address, asks, deadline=60.0)
        await asyncio.sleep(500.0)
        await two.caller.call(two.address, asks, deadline=60.0)


@in_virtual_time
async def test_a_member_has_an_allowance_for_each_kind_of_request() -> None:
    """Failed before: what only members may ask had none, and all that they may ask beside shared one."""
    async with a_door({CALLER.peer_id: 1}) as two:
        answered = 0

        async def flood() -> None:
            nonlocal answered
            while True:
                await two.ask(Ready(pair="p"), deadline=60.0)
                answered += 1

        floods = [asyncio.create_task(flood()) for _ in range(30)]
        began = two.network.now()
        await asyncio.sleep(4.0)
        assert OWN[0][0] < answered <= OWN[0][0] + OWN[0][1] * (two.network.now() - began)
        asked = two.network.now()
        await two.ask(GetStats(), deadline=5.0, traffic=Traffic.CONTROL)
        assert two.network.now() - asked < 0.2
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)
