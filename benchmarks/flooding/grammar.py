"""A grammar of malformed frames: each kind by its name, made anew with each call."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import msgpack

MAGIC = b"NLC1"
REQUEST, REPLY, CANCEL = 0, 1, 4
MOST_HEADER = 256 * 1024
_PREFIX = struct.Struct(">4sBIQ")
_FLOATS = 16  # in a tensor that is as it should be
NESTED = 4_000  # levels
# Requests by the class of traffic that they travel in
OPEN_TO_ALL = {
    "control": ("hello", "introduce", "get-stats", "get-history"),
    "pipeline": ("evaluate", "predict"),
    "state": ("get-state-piece", "get-tokenizer"),
}
FOR_MEMBERS = {
    "control": ("get-backlog", "get-revoked"),
    "pipeline": ("forward", "return"),
    "pairing": ("propose", "ready", "sit-out"),
    "gossip": ("contribute", "unread"),
}

Maker = Callable[[random.Random, str], bytes]  # from the class of traffic, too


def framed(header: object, payload: bytes = b"", frame_type: int = REQUEST) -> bytes:
    """A frame whose lengths are right, whatever its header holds."""
    raw: bytes = header if isinstance(header, bytes) else msgpack.packb(header)
    return _PREFIX.pack(MAGIC, frame_type, len(raw), len(payload)) + raw + payload


def _number(rng: random.Random) -> int:
    return rng.randrange(2**31)


def _garbage(rng: random.Random) -> object:
    """A body that is none of any message."""
    return rng.choice(
        (
            None,
            7,
            "x" * 200,
            [[]] * 100,
            {"no-such-field": rng.random()},
            {"pair": b"\xff" * 64, "stage": "one"},
            dict.fromkeys(range(500)),
            {"stage": -1, "microbatch": "", "route": ["nobody"]},
        )
    )


def _specs(rng: random.Random) -> list[object]:
    return rng.choice(
        (
            [["fp32", [-1, _FLOATS], 4 * _FLOATS]],
            [["fp32", [_FLOATS + 1], 4 * _FLOATS]],
            [["fp32", [2**62, 2**62], 4 * _FLOATS]],
            [["fp32", [1] * 99, 4]],
            [["fp32", ["16"], 4 * _FLOATS]],
            [["int8", [], None]],
            ["fp32"],
        )
    )


def _garbage_for(kinds: dict[str, tuple[str, ...]], rng: random.Random, traffic: str) -> bytes:
    kind = rng.choice(kinds.get(traffic) or kinds["control"])
    return framed([_number(rng), kind, _garbage(rng), []])


KINDS: dict[str, Maker] = {
    "wrong magic": lambda rng, _: b"GET / HTTP/1.1\r\n" + rng.randbytes(64),
    "another version": lambda rng, _: _PREFIX.pack(b"NLC9", REQUEST, 8, 0) + rng.randbytes(8),
    "header too long": lambda rng, _: _PREFIX.pack(MAGIC, REQUEST, rng.randrange(MOST_HEADER + 1, 2**32), 0),
    "payload too long": lambda rng, _: _PREFIX.pack(MAGIC, REQUEST, 16, rng.randrange(2**40, 2**64)),
    "header is no msgpack": lambda rng, _: framed(b"\xc1" + rng.randbytes(rng.randrange(1, 256))),
    "header is cut": lambda rng, _: framed(msgpack.packb([_number(rng), "hello", {"a": "b" * 90}, []])[:-40]),
    "header nests": lambda rng, _: framed(b"\x91" * NESTED + b"\xc0"),
    "body nests": lambda rng, _: framed(b"\x94\x01\xa5hello" + b"\x81\x01" * 400 + b"\xc0\x90"),
    "header announces millions": lambda rng, _: framed(b"\xdf\xff\xff\xff\xff" + rng.randbytes(16)),
    "header is no list": lambda rng, _: framed({"id": _number(rng), "kind": "hello"}),
    "header lacks fields": lambda rng, _: framed([_number(rng), "hello"]),
    "wrong number": lambda rng, _: framed([rng.choice((-1, 2**63, "1", None, 1.5)), "hello", {}, []]),
    "kind is no text": lambda rng, _: framed([_number(rng), rng.choice((None, 7, b"hello")), {}, []]),
    "unknown type": lambda rng, _: framed([_number(rng), "hello", {}, []], frame_type=rng.randrange(5, 256)),
    "reply unasked": lambda rng, _: framed([_number(rng), "done", {}, []], frame_type=rng.choice((1, 2, 3))),
    "cancels nothing": lambda rng, _: framed([_number(rng), "done", {}, []], frame_type=CANCEL),
    "unknown kind": lambda rng, _: framed([_number(rng), f"no-such-{rng.randrange(10**6)}", {}, []]),
    "too many tensors": lambda rng, _: framed(
        [_number(rng), "evaluate", {}, [["fp32", [_FLOATS], 4 * _FLOATS]] * 9], bytes(36 * _FLOATS)
    ),
    "wrong shape": lambda rng, _: framed([_number(rng), "evaluate", {}, _specs(rng)], bytes(4 * _FLOATS)),
    "unknown codec": lambda rng, _: framed(
        [_number(rng), "evaluate", {}, [["fp\x00", [_FLOATS], 4 * _FLOATS]]], bytes(4 * _FLOATS)
    ),
    "sizes do not add up": lambda rng, _: framed(
        [_number(rng), "evaluate", {}, [["fp32", [_FLOATS], 4 * _FLOATS]]], bytes(4 * _FLOATS + 1)
    ),
    "garbage body": lambda rng, traffic: _garbage_for(OPEN_TO_ALL, rng, traffic),
    "garbage body of members": lambda rng, traffic: _garbage_for(FOR_MEMBERS, rng, traffic),
    "truncated": lambda rng, _: framed([_number(rng), "hello", {"port": 1}, []])[: rng.randrange(1, 24)],
}
# What is in step with the stream: more may follow. After all others nothing that comes is read.
IN_STEP = ("reply unasked", "cancels nothing", "unknown kind", "garbage body", "garbage body of members")


def batch_of(rng: random.Random, traffic: str, kinds: tuple[str, ...], frames: int) -> list[bytes]:
    """So many frames for one stream: some that are in step at first, if there are any, then whatever comes."""
    in_step = [kind for kind in kinds if kind in IN_STEP]
    leading = rng.randrange(frames) if in_step else 0
    chosen = [rng.choice(in_step) for _ in range(leading)] + rng.choices(kinds, k=frames - leading)
    return [KINDS[kind](rng, traffic) for kind in chosen]
