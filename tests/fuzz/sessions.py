"""Whole sessions of a peer that speaks the protocol, damaged here and there, with a real `Rpc` behind a real door."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from hypothesis import strategies as st

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.access.peer_limits import Bans
from protocol.errors import NolocoError
from protocol.messages import Asker, Done
from protocol.messages.frame import FrameType
from protocol.records.identity import Identity
from protocol.rpc.door import Door
from protocol.rpc.rpc import Answer, Request, Traffic
from protocol.transport.base import Stream
from tests.fuzz.decoders import corpus_of
from tests.fuzz.mutations import damaged
from tests.unit.test_door import requests
from tests.unit.test_frames import framed, message_of, read
from tests.unit.two_peers import Two, two_peers

FRAMES = corpus_of("frame")
KINDS = sorted(requests(), key=lambda kind: kind.kind)
MALLORY = Identity.from_seed("mallory")
Step = tuple[int, bytes, float]  # which of its streams, what it writes there, how long it waits then
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
values = st.recursive(
    plain | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain, inner, max_size=4),
)


@st.composite
def a_frame(draw: st.DrawFn) -> bytes:
    """A good one, one with another body, type or number, or a damaged one."""
    raw = draw(st.sampled_from(FRAMES))
    match draw(st.sampled_from(("good", "other", "damaged"))):
        case "good":
            return raw
        case "damaged":
            return draw(damaged(FRAMES))
    frame = read(raw, 1 << 16)
    body: Any = message_of(frame).model_dump()
    if body:
        body[draw(st.sampled_from(sorted(body)))] = draw(values)
    number, kind = draw(st.integers(0, 3)), draw(st.sampled_from(KINDS)).kind
    header = [number, draw(st.sampled_from((frame.kind, kind))), body, []]
    return framed(header, type_code=draw(st.sampled_from(FrameType)).value)


STREAMS = [traffic for traffic in Traffic for _ in range(2)]
sessions = st.lists(
    st.tuples(st.integers(0, len(STREAMS) - 1), a_frame(), st.sampled_from((0.0, 0.01, 1.0, 40.0))),
    max_size=12,
)


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def play(session: list[Step]) -> list[str]:
    """The errors that the other side logs. Fails when it keeps anything of the session, or answers others no more."""
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        run_virtual(_play(session))
    finally:
        logging.getLogger().removeHandler(errors)
    return errors.lines


async def _play(session: list[Step]) -> None:
    async with two_peers() as two:
        _answer_everything(two)
        mallory = MemoryTransport(two.network, MALLORY)
        await mallory.start()
        streams = dict[int, Stream]()
        for which, raw, pause in session:
            two.server._bans = Bans()  # or ten strikes would be the end of every session
            with contextlib.suppress(NolocoError, TimeoutError):
                if which not in streams:
                    streams[which] = await mallory.open(two.address, STREAMS[which].protocol, 5.0)
                async with asyncio.timeout(5.0):
                    await streams[which].write(raw)
            await asyncio.sleep(pause)
        await two.ask(traffic=None)
        await mallory.close()
        await asyncio.sleep(100.0)
        assert not two.server.streams_of(MALLORY.peer_id)
        assert not two.server.coming
        await two.ask(traffic=None)


def _answer_everything(two: Two) -> None:
    """Also what the peer of stage 0 may ask a replica of stage 1, and slowly."""
    seen = {MALLORY.peer_id: 0, two.caller.transport.peer_id: 1}
    two.server.open_door(Door("run", {Asker.REPLICA: 1, Asker.BEFORE: 0}, seen.get, two.network.now))

    async def answer(request: Request[Any]) -> Answer[Any]:
        with contextlib.suppress(ValueError):
            request.tensors()
        await asyncio.sleep(0.1)
        return Answer(Done())

    two.server.handle(*(kind.answered_by(answer) for kind in KINDS if kind.kind != "introduce"))
