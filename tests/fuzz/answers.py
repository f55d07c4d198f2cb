"""Answers to every kind of request, odd in body, tensors or bytes, and what is done with those that are taken.

A caller may refuse them, with the errors that `Rpc.call` names; whatever else comes out is a bug, and so is a number
that is none in what screens, histories, tables and averages make of those that passed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from node.model.inner import norm_of
from node.pipeline.gradient_screen import Norms, Repeats
from node.pipeline.loss_screen import LossScreen
from node.state.witnesses import are_possible, sample_of
from node.watch.loss_history import LossHistory, has_jumped
from protocol.codecs.codec import FLOATING, Encoded, encode
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused, TransportDown, WireError
from protocol.ground import PeerId
from protocol.messages import Asks, Message
from protocol.messages.frame import FrameType
from protocol.messages.layouts import Layout
from protocol.messages.peers import LossBest, NodeStats
from protocol.messages.training import Gradient
from protocol.rpc.frames import write_frame
from protocol.rpc.rpc import _checked_reply
from tests.fuzz.mutations import damaged
from tests.swarm.micro import micro_manifest
from tests.unit.test_answers import EXAMPLE, KINDS, ODD, fitting, places_in, replaced, sent_with
from tests.unit.test_frames import Tape, done, read

DOCUMENTED = (Refused, WireError, PeerUnreachable, DeadlineExceeded, TransportDown)
LIMIT = 1 << 20
PEER = PeerId("12D3KooWanswering")
CODECS = (*sorted(FLOATING), "int32", "int64")
VALUES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    3.4e38,
    1e-45,
    2.0**31,
    65_504.0,
)
Answered = tuple[type[Asks[Any]], bytes]
numbers = st.floats() | st.integers(-(2**63), 2**64 - 1)


@st.composite
def a_tensor(draw: st.DrawFn, layout: Layout | None) -> Encoded:
    """One that belongs there, or one of another codec, shape or value."""
    fits = layout is not None and draw(st.booleans())
    codec = draw(st.sampled_from(layout.codecs if fits and layout else CODECS))
    sizes = st.lists(st.integers(0, 5), max_size=4)
    shape = [size or 5 for size in layout.shape] if layout and draw(st.integers(0, 3)) else draw(sizes)
    values = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=3))
    if codec not in FLOATING:
        whole = torch.zeros(shape, dtype=torch.int64)
        whole.view(-1)[:1] = draw(st.integers(-(2**31), 2**31 - 1))
        return encode(whole.to(torch.int32) if codec == "int32" else whole, codec)
    made = torch.ones(shape, dtype=torch.float64)
    for place, value in enumerate(values[: made.numel()]):
        made.view(-1)[-1 - place] = value
    made = made.float()  # 1e308 is infinity then
    try:
        return encode(made, codec)
    except WireError:  # what that codec does not carry
        return encode(made, "fp32")


@st.composite
def answers(draw: st.DrawFn) -> Answered:
    """A kind of request, and the bytes of an answer."""
    kind = draw(st.sampled_from(KINDS))
    reply = EXAMPLE[kind.reply()]
    body: Any = reply.model_dump()
    for _ in range(draw(st.integers(0, 2))):
        places = list(places_in(body))
        if places:
            body = replaced(body, draw(st.sampled_from(places)), draw(st.sampled_from(ODD) | numbers))
    layouts = list(EXAMPLE[kind].layouts(sent_with(kind)))  # type: ignore[attr-defined]
    tensors = fitting(layouts)
    if draw(st.booleans()):
        tensors = [draw(a_tensor(layout)) for layout in layouts]
        match draw(st.sampled_from(("as many", "more", "fewer", "another order"))):
            case "more":
                tensors.append(draw(a_tensor(None)))
            case "fewer":
                tensors = tensors[:-1]
            case "another order":
                tensors = draw(st.permutations(tensors))
    tape = Tape()
    try:
        done(write_frame(tape, FrameType.REPLY, 1, reply.kind, body, tensors))
    except (WireError, OverflowError, ValueError):  # which cannot be sent
        return kind, b""
    raw = tape.recording
    return kind, draw(damaged([raw])) if draw(st.integers(0, 4)) == 0 else raw


def takes(answered: Answered) -> bool:
    """Read an answer as `Rpc.call` does and use what passes; return whether it passed. Raises what is a bug."""
    kind, raw = answered
    request: Any = EXAMPLE[kind]
    try:
        message, tensors = _checked_reply(read(raw, LIMIT), request, sent_with(kind))
    except DOCUMENTED:
        return False
    use(message, tensors)
    return True


def use(message: Message, tensors: Sequence[torch.Tensor]) -> None:
    """Feed what was taken to what uses it."""
    json.dumps(message.model_dump(), allow_nan=False, default=repr)
    for tensor in tensors:
        assert bool(torch.isfinite(tensor).all())
        if tensor.is_floating_point():
            assert math.isfinite(float((0.5 * tensor + 0.5 * torch.ones_like(tensor)).double().mean()))
            norm_of(tensor)
    match message:
        case Gradient():
            _use_gradient(message, tensors[0])
        case NodeStats():
            best = message.best
            assert best is None or isinstance(best, LossBest)
            has_jumped(message.loss, best)
    if len(tensors) == 4 and len({tensor.shape for tensor in tensors}) == 1 and tensors[0].ndim == 1:
        are_possible(tensors[2], tensors[3], micro_manifest().inner)
        assert all(math.isfinite(size) for size in sample_of(tensors, [0], 1, 1).sizes)


def _use_gradient(message: Gradient, gradient: torch.Tensor) -> None:
    screen, history, norms, repeats = LossScreen(256), LossHistory(), Norms(), Repeats()
    for number in range(40):
        loss = message.loss if number % 3 == 0 else 2.5
        screen.note(PeerId(f"{PEER}{number % 5}"), loss)
        assert not math.isnan(screen.most(PEER))
        history.note(float(number), loss)
        assert 0 <= norms.kept(torch.linalg.vector_norm(gradient, dtype=torch.float32).item()) <= 1
        repeats.is_repeated(PEER, bytes([number]), gradient)
    assert math.isfinite(history.recent() or 0.0)
    assert message.queue >= 0
    assert math.isfinite(message.seconds * (1 + message.queue))
