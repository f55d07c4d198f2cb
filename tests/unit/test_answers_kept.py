"""What a node keeps of answers in the making: so many bytes, so long, the longest unused gone first."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from node.model.decoder import KeyValues
from node.pipeline.inference import MOST_BYTES, Memories, Memory
from protocol.errors import Refused
from protocol.ground import PeerId

MIB = 2**20


def key(name: str) -> tuple[PeerId, str]:
    return PeerId("somebody"), name


def memory(mib: int, tokens: int = 5) -> Memory:
    return Memory(KeyValues(), tokens, 0, mib * MIB)


def names_in(memories: Memories, *names: str) -> str:
    """Those that are kept; they are taken out."""
    found = ""
    for name in names:
        with suppress(Refused):
            memories.take(key(name), 5)
            found += name
    return found


async def test_128_mebibytes_are_kept_of_all_answers_together() -> None:
    memories = Memories()
    assert MOST_BYTES == 128 * MIB
    for name in "abcd":
        memories.keep(key(name), memory(40))
        assert memories.nbytes <= MOST_BYTES
    memories.keep(key("much"), memory(129))
    assert names_in(memories, *"abcd", "much") == "bcd"


async def test_one_that_goes_on_counts_as_used() -> None:
    memories = Memories()
    for name in "abc":
        memories.keep(key(name), memory(40))
    memories.take(key("a"), 5)
    memories.keep(key("a"), memory(40))
    memories.keep(key("d"), memory(40))
    assert names_in(memories, *"abcd") == "acd"


async def test_each_is_forgotten_a_minute_after_it_was_used() -> None:
    memories = Memories()
    for name in "abc":
        memories.keep(key(name), memory(1))
        await asyncio.sleep(25)
    assert memories.nbytes == 2 * MIB  # the first is 75 s old
    await asyncio.sleep(11)
    assert memories.nbytes == MIB
    await asyncio.sleep(25)
    assert memories.nbytes == 0


async def test_another_number_of_tokens_begins_again() -> None:
    memories = Memories()
    memories.keep(key("a"), memory(1))
    with pytest.raises(Refused, match="start again with all tokens"):
        memories.take(key("a"), 4)
    assert memories.take(key("a"), 0) is None
