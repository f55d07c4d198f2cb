"""A private run's door: without what its owner signed, no request of any kind is answered or handled."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from node.membership.entry import guard
from node.membership.revoking import Revoking
from protocol.access.admission import Admission
from protocol.access.peer_limits import Bans
from protocol.access.revocations import Revocations, mark_of
from protocol.access.tokens import Token
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages import Asker, Asks, Done
from protocol.messages.frame import FrameType
from protocol.messages.peers import GetRevoked, Introduce
from protocol.records.identity import Identity, public_key_of
from protocol.rpc.door import STRANGER, Door
from protocol.rpc.frames import read_frame, write_frame
from protocol.rpc.rpc import Answer, Request
from protocol.run.signed_manifest import SignedManifest
from tests.unit.test_door import CALLER, requests
from tests.unit.test_frames import EXAMPLES
from tests.unit.test_tokens import OWNER, RUN, signed
from tests.unit.two_peers import Two, in_virtual_time, two_peers

KINDS = sorted(requests(), key=lambda kind: kind.kind)
BODIES = {example.kind: example.model_dump() for example in EXAMPLES}
OPEN = {"hello", "introduce", "prove-words", "try-words"}
DAY = 86_400.0


class Private:
    """A server that would answer every request there is, of a run that lets in whom it invited."""

    def __init__(self, two: Two) -> None:
        self.two = two
        self.now = two.network.now
        self.run: SignedManifest = signed()
        self.admission = Admission(self.run, two.address, self.now)
        self.handled: list[str] = []
        stages = {Asker.REPLICA: 1, Asker.BEFORE: 1}  # so that the caller's record would do for all
        door = Door(RUN, stages, lambda peer: 1, self.now, admission=self.admission)
        two.server.open_door(door)
        for kind in KINDS:
            if kind is not Introduce:
                two.server.handle(kind.answered_by(self._answer(kind)))

    def _answer(self, kind: type[Asks]) -> Callable[[Request[Any]], Awaitable[Answer[Any]]]:
        async def answer(request: Request[Any]) -> Answer[Any]:
            self.handled.append(kind.kind)
            return Answer(Done())

        return answer

    def token(self, issuer: Identity = OWNER, run: str = RUN, days: float = 1.0) -> Token:
        return Token.issue(run, issuer, None, 1, self.now() + days * DAY)

    def show(self, shown: bytes) -> None:
        self.two.caller.introduction = Introduce(expires=self.now() + DAY, credential=shown)

    async def refusals(self) -> dict[str, str]:
        """What a request of each kind is refused with; nothing for those that reached their handler."""
        codes = {}
        for number, kind in enumerate(KINDS):
            self.two.server._bans = Bans()  # what is malformed is no matter here
            stream = await self.two.caller.transport.open(self.two.address, kind.traffic.protocol, 5.0)
            await write_frame(stream, FrameType.REQUEST, number, kind.kind, BODIES[kind.kind])
            async with asyncio.timeout(30.0):
                frame = await read_frame(stream, 1 << 20)
            codes[kind.kind] = frame.kind if frame.type is FrameType.REFUSAL else ""
            stream.close()
            await asyncio.sleep(1.0)
        return codes


@asynccontextmanager
async def private() -> AsyncIterator[Private]:
    async with two_peers() as two:
        yield Private(two)


async def assert_shut(door: Private) -> None:
    refused = await door.refusals()
    assert {kind for kind, code in refused.items() if code == "stranger"} == set(refused) - OPEN
    assert set(door.handled) <= OPEN


@in_virtual_time
async def test_without_a_token_no_request_of_any_kind_is_answered() -> None:
    async with private() as door:
        assert len(KINDS) > 15
        await assert_shut(door)


@in_virtual_time
async def test_nor_with_an_expired_a_forged_another_runs_or_another_peers() -> None:
    other = signed(owner=CALLER)
    async with private() as door:
        expired = door.token(days=1e-4)
        await asyncio.sleep(60.0)
        for bad in (
            expired.credential(CALLER.peer_id),
            door.token(issuer=CALLER).credential(CALLER.peer_id),
            door.token(issuer=CALLER, run=other.run_id).credential(CALLER.peer_id),
            door.token().credential(OWNER.peer_id),
            b"nonsense",
        ):
            door.show(bad)
            with pytest.raises(Refused, match="stranger"):
                await door.two.ask(traffic=None)
        await assert_shut(door)


@in_virtual_time
async def test_with_a_token_all_are_handled_until_it_is_revoked_or_over() -> None:
    async with private() as door:
        given = door.token()
        door.show(given.credential(CALLER.peer_id))
        await door.two.ask(traffic=None)
        assert "stranger" not in (await door.refusals()).values()
        sealed = Revocations(door.now(), frozenset({given.invitation.serial})).sign(RUN, OWNER)
        door.admission.adopt(sealed)
        door.handled.clear()
        await assert_shut(door)
        with pytest.raises(Refused, match="stranger"):
            await door.two.ask(traffic=None)
        door.show(door.token(days=1e-3).credential(CALLER.peer_id))
        await door.two.ask(traffic=None)
        await asyncio.sleep(100.0)
        door.handled.clear()
        await assert_shut(door)


@in_virtual_time
async def test_before_a_stage_is_taken_the_door_is_shut_too() -> None:
    async with private() as door:
        door.admission.own = b""
        await guard(door.two.server, door.admission)
        await assert_shut(door)
        assert math.isfinite(door.now())


@in_virtual_time
async def test_a_member_that_neither_tells_revocations_nor_greets_keeps_nobody_in() -> None:
    """Failed before: whoever was shut out stayed for as long as those asked refused."""

    async def refuse(request: Request[Any]) -> Answer[Any]:
        raise Refused(STRANGER)

    async with two_peers() as two:
        now, gone = two.network.now, list[PeerId]()
        admission = Admission(signed(), two.caller.transport.peer_id, now)
        token = Token.issue(RUN, OWNER, None, 1, now() + DAY)
        admission.check(two.address, token.credential(two.address))
        two.server.handle(GetRevoked.answered_by(refuse))
        revoking = Revoking(two.caller, admission, lambda: [two.address], random.Random(1), gone.extend)
        admission.adopt(Revocations(now(), frozenset({mark_of(public_key_of(two.address))})).sign(RUN, OWNER))
        await revoking.look()
        assert gone == [two.address]
