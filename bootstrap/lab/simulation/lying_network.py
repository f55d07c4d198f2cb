"""The network side of simulated attackers: the answers, requests and records of a peer that lies.

Their messages are made by `model_construct` and `model_copy`, which check nothing: the types refuse such values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar, NoReturn, TypeAlias

import msgpack
import torch

from bootstrap.lab.in_memory.memory import MemoryTransport
from protocol.codecs.codec import Encoded, encode
from protocol.errors import NolocoError, Refused
from protocol.ground import MOST_COUNT, PeerId
from protocol.messages import Asks, Handler, Message, Progress
from protocol.messages.peers import GetStats
from protocol.messages.training import Backlog, Contribute, Forward, GetBacklog, Gradient, Release, Unread
from protocol.records.announcement import MOST_FIGURE, MOST_LEVEL, is_sampled
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc

Honest: TypeAlias = Callable[[Request[Any]], Awaitable[Answer[Any]]]
Lie: TypeAlias = Callable[[Any, Request[Any], Honest], Awaitable[Answer[Any]]]

FLOODS = 8  # requests under way at once to each peer
FLOOD_PAUSE = (
    0.5  # seconds after each answer: with eight peers at most 128 of tiny's a second, some 70 Mbit/s
)
FORGED_LEVEL = (
    10  # a key that is sampled there takes a thousand tries, 0.1 s; one at level 20 would take 100 s
)


class LyingRpc(Rpc):
    """Answers some kinds of requests with lies.

    Mutable state beyond an `Rpc`'s: the times of its lies, by the transport's clock.
    """

    lies: ClassVar[Mapping[type[Asks[Any]], Lie]] = {}

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lied: list[float] = []

    def note_lie(self) -> None:
        self.lied.append(self.transport.now())

    def handle(self, *handlers: Handler) -> None:
        lies = {kind.kind: lie for kind, lie in self.lies.items()}
        super().handle(
            *(
                replace(handler, answer=partial(self._lie, lies[handler.kind], handler.answer))
                if handler.kind in lies
                else handler
                for handler in handlers
            )
        )

    async def _lie(self, lie: Lie, honest: Honest, request: Request[Any]) -> Answer[Any]:
        if isinstance(request.message, Forward | Contribute):
            self.note_lie()
        return await lie(self, request, honest)


async def never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


async def nothing_to_do(liar: LyingRpc, request: Request[Any], honest: Honest) -> Answer[Backlog]:
    return Answer(Backlog(seconds=0.0))


# --- answers ------------------------------------------------------------------------------------


class OddAnswers(LyingRpc):
    """Computes nothing; answers by turns a loss of 1e308, a gradient in int64 and one of a wrong shape."""

    async def on_forward(self, request: Request[Forward], honest: Honest) -> Answer[Gradient]:
        shape = request.tensors()[0].shape
        turn = len(self.lied) % 3
        gradient = torch.zeros(shape[1:] if turn == 2 else shape)
        sent = encode(gradient.long(), "int64") if turn == 1 else encode(gradient, "fp32")
        loss = 1e308 if turn == 0 else 1.0
        return Answer(Gradient.model_construct(loss=loss, queue=0, step=0, seconds=0.0), [sent])

    lies: ClassVar = {Forward: on_forward, GetBacklog: nothing_to_do}


class Holding(LyingRpc):
    """Takes every microbatch, reports progress and an empty queue, and answers none."""

    async def on_forward(self, request: Request[Forward], honest: Honest) -> Answer[Gradient]:
        done = count(1)
        request.status.look = lambda: Progress(state="onward", done=next(done))
        await never()

    lies: ClassVar = {Forward: on_forward, GetBacklog: nothing_to_do}


class FalseStats(LyingRpc):
    """Trains and answers right, and reports no backlog, no time, a loss of 0 and steps far ahead."""

    async def on_forward(self, request: Request[Forward], honest: Honest) -> Answer[Gradient]:
        return _changed(await honest(request), queue=0, seconds=0.0, step=MOST_COUNT)

    async def on_stats(self, request: Request[GetStats], honest: Honest) -> Answer[Message]:
        far = {"step": MOST_COUNT, "round": MOST_COUNT, "queue": 0, "loss": 0.0}
        return _changed(await honest(request), **far, tokens_per_second=1e15, spread=1e15)

    lies: ClassVar = {Forward: on_forward, GetBacklog: nothing_to_do, GetStats: on_stats}


def _changed(answer: Answer[Any], **fields: object) -> Answer[Any]:
    return Answer(answer.message.model_copy(update=fields), answer.tensors)


# --- requests -----------------------------------------------------------------------------------


class Silent(LyingRpc):
    """Agrees to rounds as others do, sends no piece of a contribution and acknowledges none."""

    async def call_and_read(self, peer: PeerId, request: Any, *rest: Any, **settings: Any) -> Any:
        if isinstance(request, Contribute | Unread | Release):
            raise Refused("unknown-pair")
        return await super().call_and_read(peer, request, *rest, **settings)

    async def on_piece(self, request: Request[Any], honest: Honest) -> Answer[Any]:
        await never()

    lies: ClassVar = {Contribute: on_piece, Unread: on_piece}


class Flooding(LyingRpc):
    """Sends its first microbatch to each peer that it meets, under a new name each time and without end."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._first: tuple[Forward, Sequence[Encoded]] | None = None
        self._flooded: set[PeerId] = set()
        self._names = count()

    async def call_and_read(
        self, peer: PeerId, request: Any, tensors: Sequence[Encoded] = (), **settings: Any
    ) -> Any:
        if isinstance(request, Forward):
            self._first = self._first or (request, tensors)
            if peer not in self._flooded:
                self._flooded.add(peer)
                for _ in range(FLOODS):
                    self._supervisor.spawn(self._flood(peer, *self._first), "flooding")
        return await super().call_and_read(peer, request, tensors, **settings)

    async def _flood(self, peer: PeerId, first: Forward, tensors: Sequence[Encoded]) -> None:
        while True:
            self.note_lie()
            again = first.model_copy(update={"microbatch": f"again-{next(self._names)}"})
            with suppress(NolocoError):
                await super().call_and_read(peer, again, tensors, read=_whatever, deadline=60.0)
            await asyncio.sleep(FLOOD_PAUSE)


def _whatever(*answer: object) -> None:
    pass


# --- records ------------------------------------------------------------------------------------


class FalseRecords(MemoryTransport):
    """Announces, by turns, figures as large as the types allow, an older lineage and a level of 20.

    A second key, searched for until it belongs to the sample of a level of 1,024 buckets, announces that level and
    answers nothing.
    """

    LIES: ClassVar[Sequence[Mapping[str, object]]] = (
        {
            "step": MOST_COUNT, "round": MOST_COUNT, "loss": -MOST_FIGURE,
            "tokens_per_second": MOST_FIGURE, "capacity": MOST_FIGURE, "may_serve": list(range(1_024)),
        },
        {"beginning": 1, "begun": 1.0},
        {"level": MOST_LEVEL},
    )  # fmt: skip

    # not of its own record: a node leaves that sees an older one with its key
    SECOND: ClassVar[Mapping[str, object]] = {"level": FORGED_LEVEL, "since": -MOST_FIGURE}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turns = count()
        self._second: MemoryTransport | None = None

    async def put(self, key: str, value: bytes, lifetime: float, deadline: float) -> bool:
        if "/stage/" not in key:
            return await super().put(key, value, lifetime, deadline)
        honest = msgpack.unpackb(value)
        second = await self._second_peer()
        await second.put(key, msgpack.packb(honest | self.SECOND), lifetime, deadline)
        lies = self.LIES[next(self._turns) % len(self.LIES)]
        return await super().put(key, msgpack.packb(honest | lies), lifetime, deadline)

    async def _second_peer(self) -> MemoryTransport:
        if self._second is None:
            tried = (Identity.from_seed("second", self.peer_id, number) for number in count())
            sampled = next(one for one in tried if is_sampled(one.peer_id, FORGED_LEVEL))
            self._second = MemoryTransport(self.network, sampled)
            await self._second.start()
            await self._second.connect(self.addresses(), 5.0)
        return self._second

    async def close(self) -> None:
        if self._second is not None:
            await self._second.close()
        await super().close()
