"""What a seed peer logs of what it passes on: its bound at the start, then how much, if it was anything."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bootstrap.creating.passing import TOLD_EVERY, bound_in_words, tell_passed_on
from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from bootstrap.lab.in_memory.virtual_time import run_virtual
from protocol.records.identity import Identity


class Passing(MemoryTransport):
    """Mutable state: the bytes that it is said to have passed on."""

    counted = 0

    @property
    def passed_on(self) -> int:
        return self.counted


def test_the_bound_is_named_with_the_option_that_changes_it() -> None:
    assert "up to 20 Mbit/s in all" in bound_in_words(2.5e6)
    assert "--relay-for-others" in bound_in_words(2.5e6)
    assert "passes nothing on" in bound_in_words(0.0)


def test_a_line_now_and_then_where_anything_was_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bootstrap.creating.passing")

    async def main() -> None:
        transport = Passing(MemoryNetwork(0, Link()), Identity.from_seed("passing"))
        telling = asyncio.create_task(tell_passed_on(transport, 2.5e6))
        await asyncio.sleep(TOLD_EVERY + 1)
        assert not caplog.messages
        transport.counted = int(TOLD_EVERY * 1e6 / 8)
        await asyncio.sleep(3 * TOLD_EVERY)
        telling.cancel()

    run_virtual(main())
    assert caplog.messages == [
        "Passed on between members that cannot dial each other: 35.8 MiB in all, 1 Mbit/s of 20 lately."
    ]
