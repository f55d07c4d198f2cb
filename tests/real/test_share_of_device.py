"""The share of a device's time: real time and real work."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from node.machine.duty import Duty
from node.model.compute import ComputeThread, Priority


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_device_that_always_has_work_is_busy_for_its_share(share: float) -> None:
    """Real time and real work: the reported fraction, and the processor time of the thread."""

    def work() -> None:
        ends = time.thread_time() + 0.02
        while time.thread_time() < ends:
            pass

    async def run() -> tuple[float, float]:
        compute = ComputeThread(1, duty=Duty(share))
        worked = await compute.run(Priority.SERVE, time.thread_time)
        began, busy = time.monotonic(), compute.busy.seconds()
        while time.monotonic() - began < 3.0:
            await asyncio.gather(*(compute.run(Priority.FORWARD, work) for _ in range(5)))
        seconds, busy = time.monotonic() - began, compute.busy.seconds() - busy
        worked = await compute.run(Priority.SERVE, time.thread_time) - worked
        await compute.close()
        return busy / seconds, worked / seconds

    busy, worked = uvloop.run(run())
    assert busy == pytest.approx(share, abs=0.05)
    assert worked <= share + 0.05
