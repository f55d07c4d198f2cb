"""Answers of every kind of request: whatever comes fails its own request at most, and what passes is in bounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from protocol.access.peer_limits import Bans
from protocol.codecs.codec import FLOATING, Encoded, encode
from protocol.errors import Refused, Unreadable, WireError
from protocol.messages import Asks, Message
from protocol.messages.layouts import Layout
from protocol.messages.peers import GetStats
from protocol.rpc.rpc import Answer, Request
from tests.unit.test_door import requests
from tests.unit.test_frames import EXAMPLES
from tests.unit.two_peers import Raw, Two, in_virtual_time, two_peers

EXAMPLE = {type(message): message for message in EXAMPLES}
KINDS = sorted(requests(), key=lambda kind: kind.kind)
EXTREMES = (math.nan, math.inf, -math.inf, 1e308, -1e308, -0.0, 2**63 - 1, 2**63, -1, -(2**63), True, None)
ODD: tuple[Any, ...] = (
    *EXTREMES,
    "",
    "x" * 100_000,
    "\x1b[2J",
    b"",
    b"x" * 300_000,
    [],
    {},
    [[]],
    {"": math.nan},
    [math.nan] * 2_000,
)
NO_BODIES: tuple[Any, ...] = (None, [], 1, "x", {}, b"")
FAILURES = (
    ValueError,
    RuntimeError,
    OverflowError,
    RecursionError,
    MemoryError,
    KeyError,
    IndexError,
    ZeroDivisionError,
)
MOST = 1e16  # a number in a figure that people read, or of a sum; counts of bytes and tokens go further


def sent_with(kind: type[Asks]) -> list[Encoded]:
    """The tensors that a request of this kind goes with, where its answer is measured by them."""
    return [encode(torch.zeros(2, 3, 4), "fp32")] if kind.kind in ("forward", "return", "reduce") else []


def fitting(layouts: Sequence[Layout], codec: int = 0) -> list[Encoded]:
    return [of_codec(layout.codecs[codec % len(layout.codecs)], layout.shape) for layout in layouts]


def of_codec(codec: str, shape: Sequence[int | None]) -> Encoded:
    sizes = [size or 5 for size in shape]
    is_float = codec in FLOATING
    return encode(torch.ones(sizes) if is_float else torch.ones(sizes, dtype=torch.int32), codec)


def wrong_tensors(layouts: Sequence[Layout]) -> Iterator[tuple[str, list[Encoded]]]:
    """Those of every other type, number and shape, and those with values that are no numbers."""
    good = fitting(layouts)
    yield "too many", [*good, encode(torch.ones(5), "fp32")]
    if not good:
        return
    yield "none", []
    if len(good) > 1 and not layouts[-1].may_lack:
        yield "too few", good[:-1]
    for place, layout in enumerate(layouts):
        shape = [size or 5 for size in layout.shape]
        for codec in {"fp32", "fp16", "bf16", "int8", "eden4", "eden2", "int32", "int64"} - set(
            layout.codecs
        ):
            yield codec, _with(good, place, of_codec(codec, shape))
        for other in ([], [0], [*shape, 1], [1, *shape], shape[:-1], [*shape[:-1], 0]):
            yield (
                f"shape {other}",
                _with(
                    good,
                    place,
                    of_codec(layout.codecs[0], tuple(size or 5 for size in other))
                    if 0 not in other
                    else encode(torch.ones(other), "fp32"),
                ),
            )
        if layout.codecs[0] in FLOATING:
            for value in (math.nan, math.inf, -math.inf):
                spoilt = torch.ones(shape)
                spoilt.view(-1)[-1] = value
                for codec in {"fp32", "bf16"} & set(layout.codecs):
                    yield f"{value} in {codec}", _with(good, place, encode(spoilt, codec))


def _with(tensors: Sequence[Encoded], place: int, other: Encoded) -> list[Encoded]:
    return [*tensors[:place], other, *tensors[place + 1 :]]


def wrong_bodies(body: Any) -> Iterator[Any]:
    """The body with each value in it, however deep, replaced by each odd one; and other things than bodies."""
    yield from NO_BODIES
    for place in places_in(body):
        for odd in ODD:
            yield replaced(body, place, odd)
    yield {**body, "unheard of": 1}


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, inner in inside:
        yield from places_in(inner, (*place, key))


def replaced(value: Any, place: Sequence[Any], odd: Any) -> Any:
    if not place:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], odd)
    return copy


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from numbers_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers_in(inner)


class Asked:
    """A pair of peers, of which one answers each request with what is set here."""

    def __init__(self, two: Two, kind: type[Asks]) -> None:
        self.two, self.kind, self.next = two, kind, Answer[Any](EXAMPLE[kind.reply()])
        two.server.handle(kind.answered_by(self._answer))

    async def _answer(self, request: Request[Any]) -> Answer[Any]:
        return self.next

    @property
    def request(self) -> Any:
        return EXAMPLE[self.kind]

    async def gets(self, body: Any = None, tensors: Sequence[Encoded] = (), **more: Any) -> Any:
        self.two.caller._bans = Bans()
        reply = EXAMPLE[self.kind.reply()]
        self.next = Answer[Any](Raw(reply.kind, reply.model_dump() if body is None else body), tensors)  # type: ignore[arg-type]
        return await self.two.ask(self.request, tensors=sent_with(self.kind), traffic=None, **more)

    @property
    def layouts(self) -> Sequence[Layout]:
        return self.request.layouts(sent_with(self.kind))  # type: ignore[no-any-return]


def of_every_kind(test: Any) -> Any:
    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
    def run(kind: type[Asks]) -> None:
        @in_virtual_time
        async def main() -> None:
            async with two_peers() as two:
                await test(Asked(two, kind))

        main()

    return run


@of_every_kind
async def test_tensors_that_do_not_belong_to_the_answer_are_never_seen(asked: Asked) -> None:
    tried = 0
    for name, tensors in wrong_tensors(asked.layouts):
        refused = False
        try:
            await asked.gets(tensors=tensors)
        except WireError:
            refused = True
        assert refused, f"{name} passed"
        tried += 1
    assert tried
    for codec in range(max((len(layout.codecs) for layout in asked.layouts), default=1)):
        _, tensors = await asked.gets(tensors=fitting(asked.layouts, codec))
        assert all(tensor.isfinite().all() for tensor in tensors)


@of_every_kind
async def test_odd_values_in_an_answer_are_refused_or_within_bounds(asked: Asked) -> None:
    body, passed = EXAMPLE[asked.kind.reply()].model_dump(), 0
    good = fitting(asked.layouts)
    for odd in wrong_bodies(body):
        try:
            reply, _ = await asked.gets(odd, good)
        except WireError:
            continue
        passed += 1
        for number in numbers_in(reply.model_dump()):
            assert math.isfinite(number)
            assert abs(number) <= MOST or (isinstance(number, int) and abs(number) < 2**63)
        type(reply).parsed(reply.model_dump())  # it may be passed on
    assert passed


@of_every_kind
async def test_whatever_reading_an_answer_raises_fails_that_request_alone(asked: Asked) -> None:
    tensors = fitting(asked.layouts)
    logging.disable(logging.ERROR)
    try:
        for failure in FAILURES:

            def read(*_: object, failure: type[Exception] = failure) -> None:
                raise failure("of torch, msgpack or our own")

            with pytest.raises(Unreadable):
                await asked.gets(tensors=tensors, read=read)
            assert not asked.two.caller._bans._strikes  # it is no fault of the peer's
        for ours in (WireError("it does not fit"), Refused("busy")):

            def refuse(*_: object, ours: Exception = ours) -> None:
                raise ours

            with pytest.raises(type(ours)):
                await asked.gets(tensors=tensors, read=refuse)
            assert len(asked.two.caller._bans._strikes) == isinstance(ours, WireError)
    finally:
        logging.disable(logging.NOTSET)
    kinds = {(asked.kind.kind, failure.__name__): 1 for failure in FAILURES}
    assert dict(asked.two.caller.unreadable) == kinds
    await asked.gets(tensors=tensors)


@of_every_kind
async def test_decoding_that_fails_in_an_unforeseen_way_is_no_more_than_a_refusal(asked: Asked) -> None:
    """Failed before: an OverflowError, or one of torch's, came out of `call`, and ended the node."""
    reply = asked.kind.reply()
    good, parsed = fitting(asked.layouts), reply.parsed
    logging.disable(logging.ERROR)
    try:
        for failure in FAILURES:

            def fails(_: object, failure: type[Exception] = failure) -> Message:
                raise failure("in a validator")

            reply.parsed = fails  # type: ignore[method-assign, assignment]
            try:
                with pytest.raises(Unreadable):
                    await asked.gets(tensors=good)
            finally:
                reply.parsed = parsed  # type: ignore[method-assign]
    finally:
        logging.disable(logging.NOTSET)
    await asked.gets(tensors=good)


def test_an_unforeseen_failure_is_logged_as_ours_once(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def main() -> None:
        async with two_peers() as two:
            asked = Asked(two, GetStats)
            for _ in range(3):
                with pytest.raises(Unreadable, match="ZeroDivisionError"):
                    await asked.gets(read=lambda *_: 1 / 0)

    main()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        caplog.records[-1].message
    ]
