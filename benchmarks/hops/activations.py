"""What is sent, and how a sender keeps several of it in flight."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from statistics import median

import torch

SHAPE = (8, 512, 1024)  # sequences, tokens, hidden: 8 MB in bf16
NBYTES = 8 * 512 * 1024 * 2
SMALL_BYTES = 64
PAUSE = 0.01  # seconds between two small messages


def make_activations() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def bytes_of(activations: torch.Tensor) -> memoryview:
    return activations.view(torch.int16).numpy().data.cast("B")


def checksum(data: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(data)


async def keep_in_flight(send: Callable[[], Awaitable[object]], messages: int, in_flight: int) -> float:
    """Call `send` `messages` times, `in_flight` at once; returns the seconds that it took."""
    left = messages

    async def keep_sending() -> None:
        nonlocal left
        while left:
            left -= 1
            await send()

    began = time.perf_counter()
    await asyncio.gather(*(keep_sending() for _ in range(in_flight)))
    return time.perf_counter() - began


async def round_trip(ping: Callable[[], Awaitable[object]], times: int) -> float:
    """The median of `times` round trips of a small message, in seconds, with a pause after each."""
    taken = []
    for _ in range(times):
        taken.append(await timed(ping))
        await asyncio.sleep(PAUSE)
    return median(taken)


async def round_trip_during(
    bulk: Awaitable[float], ping: Callable[[], Awaitable[object]]
) -> tuple[float, float, int]:
    """As `round_trip`, for as long as `bulk` goes on: the median, what `bulk` returned, how many there were."""
    transfer, taken = asyncio.ensure_future(bulk), list[float]()
    await asyncio.sleep(PAUSE)
    while not transfer.done():
        taken.append(await timed(ping))
        await asyncio.sleep(PAUSE)
    return median(taken), await transfer, len(taken)


async def timed(ping: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await ping()
    return time.perf_counter() - began
