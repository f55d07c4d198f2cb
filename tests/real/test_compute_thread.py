"""The compute thread's account of its time, in the fraction that others see and in the trace."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from node.machine.duty import Duty
from node.model.compute import ComputeThread, Priority
from node.watch.trace import TraceFile
from tests.patience import patience


def _work_outer_step(seconds: float) -> None:
    time.sleep(seconds)


def test_training_counts_and_serving_does_not(tmp_path: Path) -> None:
    """On uvloop, as in the daemon: its own clock stands still while nothing happens on the loop."""

    async def run() -> tuple[float, float, float]:
        compute = ComputeThread(1, trace)
        await compute.run(Priority.SERVE, time.sleep, 0.0)  # the thread has started
        began, before = time.monotonic(), compute.busy.fraction()
        await compute.run(Priority.OPTIMIZER, _work_outer_step, 0.2)
        busy = compute.busy.recent_fraction()
        await compute.run(Priority.SERVE, time.sleep, 0.2)
        with pytest.raises(ZeroDivisionError):
            await compute.run(Priority.FORWARD, lambda: 1 / 0)
        serving = compute.busy.fraction()
        assert repr(compute).startswith("<ComputeThread [Work: 0 waiting, 2 done | A pass: 0.")
        await compute.close()
        assert repr(compute).endswith(" ms | closed]>")
        assert time.monotonic() - began >= 0.4
        return before, busy, serving

    trace = TraceFile(tmp_path / "t.json")
    before, busy, serving = uvloop.run(run())
    trace.close()
    assert before == 0.0
    assert 0 < serving < busy < 1
    jobs = [event for event in json.loads((tmp_path / "t.json").read_text()) if event["ph"] == "X"]
    assert [job["name"] for job in jobs] == ["sleep", "outer step", "sleep", "<lambda>"]
    assert [job["args"]["priority"] for job in jobs] == ["serve", "optimizer", "serve", "forward"]
    assert all(0.19 < job["dur"] / 1e6 < 2 for job in jobs[1:3])
    assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(jobs))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_long_rest_ends_when_more_of_the_time_is_given(share: float) -> None:
    async def run() -> None:
        compute = ComputeThread(1, duty=Duty(0.0001))
        await compute.run(Priority.FORWARD, time.sleep, 0.5)  # and now it would rest for more than an hour
        working = asyncio.ensure_future(compute.run(Priority.FORWARD, time.sleep, 0.0))
        await asyncio.sleep(1.0)
        assert not working.done()
        compute.duty.share = share
        await asyncio.wait_for(working, patience(30))
        await compute.close()

    uvloop.run(run())
