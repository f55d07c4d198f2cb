"""Framing: every message comes through as it was sent, and whatever else comes is refused before it costs."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages
from protocol.codecs.codec import CODECS, Encoded, encode
from protocol.errors import PeerUnreachable, WireError
from protocol.ground import Buffer
from protocol.messages import Done, Message, Progress, peers, state, training
from protocol.messages.frame import Frame, FrameType
from protocol.messages.peers import (
    GetHistory,
    GetPast,
    GetReceipts,
    GetRecord,
    GetRecords,
    GetRevoked,
    GetStats,
    Hello,
    History,
    HistoryPoint,
    Introduce,
    Invited,
    KeepWay,
    NodeStats,
    PastRecord,
    PastRecords,
    Probe,
    Probed,
    ProveWords,
    ReceiptList,
    Records,
    Revoked,
    SharedRecord,
    SignReceipt,
    TryWords,
    WayKept,
    Welcome,
    WordsTried,
)
from protocol.messages.state import (
    Copies,
    GetCopies,
    GetCopyPiece,
    GetStateIndex,
    GetStatePiece,
    GetStateSample,
    GetTokenizer,
    GetTokenizerHashes,
    StageCopy,
    StateIndex,
    StatePiece,
    StateSample,
    TokenizerHashes,
    TokenizerPiece,
)
from protocol.messages.training import (
    Accept,
    Assemble,
    Backlog,
    Contribute,
    Evaluate,
    Evaluated,
    Forward,
    GetBacklog,
    Gradient,
    Predict,
    Predicted,
    Propose,
    Ready,
    Reduce,
    Reduced,
    Release,
    Return,
    RollCall,
    SitOut,
    Unread,
)
from protocol.records.identity import Identity
from protocol.records.receipts import signed_receipt
from protocol.rpc.frames import MAGIC, MAX_HEADER_BYTES, MAX_TENSORS, read_frame, write_frame
from protocol.transport.base import Stream

T = TypeVar("T")

LIMIT = 4096
PREFIX = struct.Struct(">4sBIQ")
SIGNER = Identity.from_seed("signer")
PEER = Identity.from_seed("a peer").peer_id

TIMES: dict[str, Any] = {"opens_in": 0.5, "due_in": 1.0, "ends_in": 1.5, "step_seconds": 0.1}
EXAMPLES: list[Message] = [
    Hello(port=31337),
    KeepWay(),
    WayKept(seconds=600.0),
    Welcome(run_id="abc", time=1.7e9, role="seed", manifest=b"\x00\xff"),
    Introduce(stage=3, record=b"sealed", expires=1.7e9),
    GetRevoked(issued=1.7e9),
    GetRecord(peer=PEER),
    GetRecords(stages=[0, 1], own=[SharedRecord(PEER, 1, 0, b"sealed", 1.7e9)]),
    Records(records=[SharedRecord(PEER, 1, 0, b"sealed", 1.7e9)]),
    Revoked(sealed=b"a list"),
    GetStats(),
    Probe(nonce=bytes(8)),
    Probed(digest=bytes(range(16))),
    NodeStats(stage=1, state="serving", step=2, round=3, loss=4.5, partners={PEER: 6}, sent={PEER: 2**40}),
    Forward(microbatch="7-0-abcdef", stage=1),
    GetBacklog(stage=1),
    Backlog(seconds=0.75),
    Return(microbatch="7-0-abcdef", home=PEER, draw="7-0"),
    Gradient(loss=2.5, queue=3, step=4, seconds=0.25),
    Progress(state="queued", ahead=3, done=7),
    Evaluate(stage=0, route=[PEER, PEER]),
    Evaluated(loss_sum=1e9, tokens=2**30),
    Predict(stage=0, route=[PEER], answer="a", position=7, top=1),
    Predicted(rounds=[3, 4]),
    Propose(stage=0, round=1, pair="p", **TIMES),
    Accept(round=9, **TIMES),
    Ready(pair="p"),
    Release(pair="p"),
    SitOut(stage=0, **TIMES),
    Contribute(pair="p", part="progress", offset=2**40, total=2**41),
    Unread(pair="p"),
    Assemble(),
    RollCall(name="a", members=[PEER, PEER]),
    Reduce(offset=2**40, total=2**41, name="a"),
    Reduced(members=3),
    Done(),
    GetStateIndex(),
    StateIndex(stage=0, step=1, round=2, parameters=3, piece_parameters=4),
    GetStatePiece(stage=1, index=5, moments=True),
    StatePiece(index=5, step=6, round=7, digest=bytes(32)),
    SignReceipt(name="me"),
    GetReceipts(),
    ReceiptList(receipts=[signed_receipt("run", PEER, SIGNER.peer_id, (10, 2), "me", SIGNER.sign)]),
    GetHistory(),
    History(points=[HistoryPoint(1.5, 1, 10, 2.5, None, 1e-3, None)]),
    GetStateSample(stage=1, index=5, positions=[0, 2**18 - 1]),
    StateSample(step=6, round=7, sizes=[0.0, 1e-3, 1e-3], largest=[1.0, 0.1]),
    GetTokenizer(offset=2**17),
    TokenizerPiece(total=2**20, contents=b"{}"),
    GetPast(stages=[0, 1]),
    PastRecords(records=[PastRecord(PEER, 1, 0, b"sealed", 10.5, 1.5)]),
    GetCopies(stages=[0]),
    Copies(copies=[StageCopy(0, 486, 97, 1_000, 1, 1.5, 2.5)]),
    GetCopyPiece(stage=0, beginning=1, step=486, index=0),
    TryWords(message=b"A" + bytes(range(32))),
    WordsTried(message=b"B" + bytes(range(32))),
    ProveWords(proof=bytes(range(32))),
    Invited(sealed=b"a token"),
    GetTokenizerHashes(),
    TokenizerHashes(sealed=bytes(64 + 32)),
]


class Tape(Stream):
    """Plays bytes to a reader, notes what it asks for, and records what is written."""

    def __init__(self, recording: bytes = b"") -> None:
        self.remote = PEER
        self.recording = recording
        self.asked: list[int] = []

    async def read(self, size: int) -> bytes:
        self.asked.append(size)
        data, self.recording = self.recording[:size], self.recording[size:]
        if len(data) < size:
            raise PeerUnreachable("the tape ended")
        return data

    async def write(self, *buffers: Buffer) -> None:
        self.recording += b"".join(bytes(buffer) for buffer in buffers)

    def close(self) -> None:
        pass


def framed(header: Any, payload: bytes = b"", type_code: int = 0, magic: bytes = MAGIC) -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return PREFIX.pack(magic, type_code, len(packed), len(payload)) + packed + payload


def done(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never has to wait, as all are on a tape."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    value: T = end.value.value
    return value


def read(raw: bytes, limit: int = LIMIT) -> Frame:
    return done(read_frame(Tape(raw), limit))


def sent(message: Message, tensors: list[Encoded], request_id: int = 1) -> bytes:
    tape = Tape()
    size = done(write_frame(tape, FrameType.REQUEST, request_id, message.kind, message.told(), tensors))
    assert size == len(tape.recording)
    return tape.recording


def some_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 4, generator=generator), torch.arange(6, dtype=torch.int32).view(2, 3)]


MESSAGES = {example.kind: type(example) for example in EXAMPLES}


def message_of(frame: Frame) -> Message:
    """Raises `WireError` for a kind that there is not, as readers do that expect another one."""
    if frame.kind not in MESSAGES:
        raise WireError("unknown kind of message")
    return MESSAGES[frame.kind].parsed(frame.body)


def test_there_is_an_example_of_every_kind_of_message() -> None:
    kinds = [
        kind
        for module in (messages, peers, state, training)
        for kind in vars(module).values()
        if isinstance(kind, type) and "kind" in vars(kind) and kind.__module__ == module.__name__
    ]
    assert set(MESSAGES.values()) == set(kinds)
    assert len(MESSAGES) == len(EXAMPLES) == len(kinds)  # no two have the same name on the wire


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_a_message_arrives_as_it_was_sent_with_its_tensors(message: Message) -> None:
    floats, integers = some_tensors()
    frame = read(sent(message, [encode(floats, "fp32"), encode(integers, "int32")], request_id=2**62))
    assert (frame.type, frame.request_id) == (FrameType.REQUEST, 2**62)
    assert message_of(frame) == message
    received = frame.tensors()
    assert torch.equal(received[0], floats)
    assert torch.equal(received[1], integers)


@pytest.mark.parametrize("codec", CODECS)
def test_a_tensor_of_every_codec_arrives(codec: str) -> None:
    tensor = torch.arange(-3, 9, dtype=torch.int64 if codec.startswith("int") and codec != "int8" else None)
    tensor = tensor if codec in ("int32", "int64") else tensor.float()
    [received] = read(sent(Done(), [encode(tensor, codec)])).tensors()
    tolerated = {"eden4": 0.15, "eden2": 0.5}.get(codec, 0.01)
    assert (received.double() - tensor).norm() <= tolerated * tensor.double().norm()


def test_frames_follow_each_other_on_one_stream() -> None:
    tape = Tape(b"".join(sent(message, [], number) for number, message in enumerate(EXAMPLES)))
    frames = [done(read_frame(tape, LIMIT)) for _ in EXAMPLES]
    assert [message_of(frame) for frame in frames] == EXAMPLES
    assert [frame.request_id for frame in frames] == list(range(len(EXAMPLES)))


# --- what is refused ----------------------------------------------------------------------------


@given(garbage=st.binary(max_size=400))
def test_garbage_is_only_ever_malformed_or_cut_short(garbage: bytes) -> None:
    with pytest.raises((WireError, PeerUnreachable)):
        read(garbage)


@given(header=st.binary(max_size=200), payload=st.binary(max_size=50), type_code=st.integers(0, 255))
def test_garbage_behind_a_good_prefix_raises_nothing_else(
    header: bytes, payload: bytes, type_code: int
) -> None:
    try:
        frame = read(framed(header, payload, type_code))
        tensors, message = frame.tensors(), message_of(frame)
    except WireError:
        return
    assert len(tensors) == len(frame.specs)
    assert type(message) in MESSAGES.values()


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=5)
    ),
    max_leaves=10,
)


@given(header=st.lists(anything, min_size=3, max_size=5) | anything, payload=st.binary(max_size=20))
def test_a_header_of_the_wrong_types_raises_nothing_else(header: Any, payload: bytes) -> None:
    try:
        message = message_of(read(framed(header, payload)))
    except WireError:
        return
    assert type(message) in MESSAGES.values()


@given(kind=st.sampled_from(sorted(MESSAGES)), body=anything)
def test_a_body_of_the_wrong_types_is_malformed_and_nothing_worse(kind: str, body: Any) -> None:
    with contextlib.suppress(WireError):
        assert MESSAGES[kind].parsed(body).kind == kind


@given(place=st.integers(0, 16), flip=st.integers(1, 255))
def test_a_damaged_prefix_never_makes_the_reader_ask_for_more_than_is_allowed(place: int, flip: int) -> None:
    raw = bytearray(sent(Done(), [encode(torch.zeros(4), "fp32")]))
    raw[place] ^= flip
    tape = Tape(bytes(raw))
    with contextlib.suppress(WireError, PeerUnreachable):
        done(read_frame(tape, LIMIT))
    assert max(tape.asked) <= max(MAX_HEADER_BYTES, LIMIT)


def test_a_frame_cut_anywhere_ends_the_stream() -> None:
    whole = sent(Forward(microbatch="m", stage=1), [encode(torch.zeros(8), "fp32")])
    for length in range(len(whole)):
        with pytest.raises(PeerUnreachable):
            read(whole[:length])


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (PREFIX.pack(b"HTTP", 0, 4, 0), "not a noloco frame"),
        (PREFIX.pack(MAGIC, 0, MAX_HEADER_BYTES + 1, 0), "header of"),
        (PREFIX.pack(MAGIC, 0, 4, LIMIT + 1), "payload of"),
        (PREFIX.pack(MAGIC, 0, 4, 2**64 - 1), "payload of"),
    ],
)
def test_a_bad_length_or_magic_is_refused_before_anything_more_is_read(prefix: bytes, words: str) -> None:
    tape = Tape(prefix + bytes(100))
    with pytest.raises(WireError, match=words):
        done(read_frame(tape, LIMIT))
    assert tape.asked == [PREFIX.size]


def test_tensors_that_do_not_fill_the_payload_are_refused_before_it_is_read() -> None:
    tape = Tape(framed([1, "done", {}, [["fp32", [2], 8]]], bytes(12)))
    with pytest.raises(WireError, match="add up"):
        done(read_frame(tape, LIMIT))
    assert len(tape.asked) == 2


def test_tensors_that_would_grow_far_beyond_the_bound_are_refused_before_they_are_read() -> None:
    """eden2 takes fifteen times as much when it is decoded: a frame of the largest size would take 60 KB."""
    blocks = LIMIT // 68
    spec = ["eden2", [256 * blocks], 68 * blocks]
    tape = Tape(framed([1, "done", {}, [spec]], bytes(68 * blocks)))
    with pytest.raises(WireError, match="4 times"):
        done(read_frame(tape, LIMIT))
    assert len(tape.asked) == 2
    smaller = ["eden2", [256 * 16], 68 * 16]  # four times the bound, exactly
    assert read(framed([1, "done", {}, [smaller]], bytes(68 * 16))).tensors()[0].numel() == LIMIT


@pytest.mark.parametrize(
    "spec",
    [
        ["fp32", [2], 12],
        ["fp32", [-1], 8],
        ["fp32", [2**62, 2**62], 8],
        ["pickle", [2], 8],
        ["fp32", [2]],
        "fp32",
        ["fp32", "ab", 8],
        ["fp32", [True, 2], 8],
    ],
)
def test_a_tensor_that_lies_about_itself_is_refused(spec: Any) -> None:
    with pytest.raises(WireError):
        read(framed([1, "done", {}, [spec]], bytes(8)))


def test_more_tensors_than_any_message_has_are_refused() -> None:
    specs = [["fp32", [0], 0]] * (MAX_TENSORS + 1)
    with pytest.raises(WireError, match=f"at most {MAX_TENSORS}"):
        read(framed([1, "done", {}, specs]))


@pytest.mark.parametrize("request_id", [-1, 2**63, "1", None, 1.0])
def test_a_request_number_out_of_bounds_is_refused(request_id: Any) -> None:
    with pytest.raises(WireError):
        read(framed([request_id, "done", {}, []]))


def test_an_unknown_type_of_frame_is_refused() -> None:
    with pytest.raises(WireError, match="unknown frame type 9"):
        read(framed([1, "done", {}, []], type_code=9))


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("forward", {"microbatch": "m"}, "stage"),
        ("forward", {"microbatch": "m", "stage": 1, "more": 1}, "more"),
        ("forward", {"microbatch": "m", "stage": "1"}, "stage"),
        ("forward", {"microbatch": "m" * 65, "stage": 1}, "microbatch"),
        ("forward", {"microbatch": "", "stage": 1}, "microbatch"),
        ("gradient", {"loss": float("nan"), "queue": 0, "step": 0, "seconds": 0.0}, "loss"),
        ("propose", {"stage": 0, "round": 0, "pair": "p", "opens_in": float("inf"), "ends_in": 1.0}, "opens_in"),
        ("contribute", {"pair": "p", "part": "z", "offset": -1, "total": 3}, "offset"),
        ("contribute", {"pair": "p", "part": "z", "offset": 2**63, "total": 3}, "offset"),
        ("state-piece", {"index": 0, "step": 0, "round": 0, "digest": bytes(31)}, "digest"),
        ("evaluate", {"stage": 0, "route": ["p"] * 1_025}, "route"),
    ],
)  # fmt: skip
def test_a_field_out_of_bounds_is_named(kind: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError, match=f"malformed {kind}: {field}"):
        MESSAGES[kind].parsed(body)
