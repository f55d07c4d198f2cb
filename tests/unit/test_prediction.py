"""What a node keeps of answers in the making: bounded in bytes, forgotten in time, never mixed up."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.model.decoder import KeyValues
from node.pipeline.inference import Memories, Memory
from protocol.errors import Refused
from protocol.ground import PeerId

PEER = PeerId("peer")


def memory(tokens: int = 3, nbytes: int = 10) -> Memory:
    return Memory(KeyValues(), tokens, round=0, nbytes=nbytes)


def test_the_longest_unused_makes_room_and_the_too_large_is_not_kept() -> None:
    async def main() -> None:
        memories = Memories(most_bytes=25)
        for name in "abc":
            memories.keep((PEER, name), memory())
        assert memories.nbytes == 20
        memories.keep((PEER, "large"), memory(nbytes=26))
        assert memories.nbytes == 20
        for name in ("a", "large"):
            with pytest.raises(Refused, match="forgotten"):
                memories.take((PEER, name), 3)
        assert memories.take((PEER, "b"), 3) is not None
        assert memories.nbytes == 10

    run_virtual(main())


def test_only_what_is_asked_for_in_order_is_found() -> None:
    async def main() -> None:
        memories = Memories()
        memories.keep((PEER, "a"), memory(tokens=3))
        with pytest.raises(Refused, match="forgotten"):
            memories.take((PeerId("other"), "a"), 3)
        with pytest.raises(Refused, match="forgotten"):
            memories.take((PEER, "a"), 2)
        assert memories.take((PEER, "a"), 0) is None

    run_virtual(main())


def test_what_is_not_gone_on_with_is_forgotten() -> None:
    async def main() -> None:
        memories = Memories(seconds=60.0)
        memories.keep((PEER, "a"), memory())
        await asyncio.sleep(40)
        memories.keep((PEER, "b"), memory())
        await asyncio.sleep(40)
        assert memories.nbytes == 10
        await asyncio.sleep(60)
        assert memories.nbytes == 0

    run_virtual(main())
