"""Runs the stage's computations on one thread that takes work by priority, so that the event loop never waits.

Backward goes before forward, since it frees memory and lets an upstream peer go on; the optimizer stands
between them. `InlineCompute` does the same on the loop itself and charges virtual time, for simulations.
"""

from __future__ import annotations

import abc
import asyncio
import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from statistics import median_low
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

import protocol.codecs.kernels
from node.machine.accelerator import synchronize, use
from node.machine.duty import Duty
from node.machine.limits import keep_freed_memory
from node.model.outer import load_loops
from node.model.resources import named
from node.watch.counting import Busy
from node.watch.trace import NO_TRACE, Trace, Track
from protocol.errors import DeviceFailed, NodeFailed, TransportDown
from protocol.windows import window

logger = logging.getLogger(__name__)

_Job: TypeAlias = tuple[int, int, Any]  # priority, order, and what there is to do; None is to stop

P = ParamSpec("P")
T = TypeVar("T")


HOST = torch.device("cpu")
REST_PART = 0.5  # seconds of a rest after which the share is looked at again
LAST_PASSES = 15  # by which it is known what one takes; the first ones compile, and warm caches


class Priority(IntEnum):
    SNAPSHOT = (
        0  # a part of one, so small that it holds nobody up; asked for again, it waits for one other piece
    )
    BACKWARD = 1
    OPTIMIZER = 2
    FORWARD = 3
    SERVE = 4  # state pieces, evaluation: must never slow training
    STOP = 5


class Compute(abc.ABC):
    """Runs pieces of work one after another, and keeps account of the time they take."""

    def __init__(self, clock: Callable[[], float], trace: Trace) -> None:
        self.clock = clock
        self.duty = Duty()  # how much of the time it may take
        self.finished = 0  # pieces of training work
        self.busy = Busy(clock)  # with training work
        self.serving = Busy(clock)  # with the rest: snapshots, and what others ask for
        self._began = clock()
        self._passes: deque[float] = deque(maxlen=LAST_PASSES)
        self.trace = trace
        self.end_node: Callable[[NodeFailed], None] = lambda _: None  # called once the device has failed
        self.failure: DeviceFailed | None = None  # of the device: nothing is asked of it any more

    @window
    def __repr__(self) -> str:
        took = f"{self.pass_seconds() * 1e3:.1f} ms"
        return f"Work: {self.waiting} waiting, {self.finished} done | A pass: {took} | {self.state}"

    @property
    @abc.abstractmethod
    def waiting(self) -> int:
        """Pieces of work whose turn has not come, those that were given up included."""

    @property
    @abc.abstractmethod
    def state(self) -> str:
        """One word that says whether it works."""

    def pass_seconds(self) -> float:
        """Seconds that a forward or a backward pass takes; 0 before there was one."""
        return median_low(self._passes.copy() or [0.0])

    @abc.abstractmethod
    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work(*args)` when its turn comes; raises what it raises, and `OutOfMemory` or `DeviceFailed` for any
        way to say that.

        A caller that is cancelled does not stop work that has begun.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish the work at hand, refuse the rest."""

    def _require_device(self) -> None:
        """Raise `DeviceFailed` once the device has failed."""
        if self.failure is not None:
            raise self.failure

    def _look_at_failure(self, error: BaseException | None) -> None:
        """End the node where the device has failed. Called on the loop."""
        if isinstance(error, DeviceFailed) and self.failure is None:
            self.failure = error
            self.end_node(error)

    def _begin(self, priority: int) -> float:
        self._account(priority).begin()
        self._began = self.clock()
        return self.trace.now()

    def _account(self, priority: int) -> Busy:
        return self.serving if priority in (Priority.SERVE, Priority.SNAPSHOT) else self.busy

    def _end(self, priority: int, work: Callable[..., object], queued: float, began: float) -> None:
        """Account for a piece of work that has ended, queued and begun at these times of the trace's clock."""
        self._account(priority).end()
        self.finished += self._account(priority) is self.busy
        if priority in (Priority.FORWARD, Priority.BACKWARD):
            self._passes.append(self.clock() - self._began)
        self.trace.complete(
            Track.COMPUTE,
            job_name(work),
            began,
            self.trace.now(),
            priority=Priority(priority).name.lower(),
            waited_ms=round((began - queued) * 1e3, 3),
        )


class ComputeThread(Compute):
    """Runs the work on a thread of its own."""

    def __init__(
        self,
        threads: int,
        trace: Trace = NO_TRACE,
        duty: Duty | None = None,
        device: torch.device = HOST,
    ) -> None:
        super().__init__(time.monotonic, trace)  # the loop's clock stands still while it waits for events
        self._device = device
        self.duty = duty or self.duty
        self._ending = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._order = itertools.count()
        self._torch_threads = threads
        self._had_part = False  # of a snapshot, since the last pass
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(
            self._queue.queue
        )  # without the lock that `qsize` takes: a debugger may hold up its holder

    @property
    def state(self) -> str:
        return "closed" if self._closed else "open"

    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise TransportDown("the compute thread has ended")
        self._require_device()
        future: asyncio.Future[T] = self._loop.create_future()
        queued = self.trace.now()
        self._queue.put((priority, next(self._order), (future, queued, work, args, kwargs)))
        return await future

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ending.set()
            self._queue.put((Priority.STOP, next(self._order), None))
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        torch.set_num_threads(self._torch_threads)
        use(self._device)
        keep_freed_memory()
        load_loops()
        protocol.codecs.kernels.load()
        while True:
            priority, _, job = self._next()
            if job is None:
                return
            future, queued, work, args, kwargs = job
            if future.cancelled():
                continue
            started, began = time.monotonic(), self._begin(priority)
            try:
                result, error = work(*args, **kwargs), None
                self._finish_on_device()
            except BaseException as raised:  # noqa: BLE001  it is raised again where it was asked for
                result, error = None, named(raised)
            self._end(priority, work, queued, began)
            self._loop.call_soon_threadsafe(self._look_at_failure, error)
            self._loop.call_soon_threadsafe(_settle, future, result, error)
            self._rest(self.duty.rest(started, time.monotonic()))

    def _rest(self, seconds: float) -> None:
        """Rest so long, or until a larger share is given, or the thread is to end."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0 and not self.duty.has_risen():
            if self._ending.wait(min(left, REST_PART)):
                return

    def _finish_on_device(self) -> None:
        """Wait for a GPU, which computes on while the next piece is launched: what is to rest must end first."""
        if self.duty.share < 1.0:
            synchronize(self._device)

    def _next(self) -> _Job:
        """Take the next job; between two parts of a snapshot a pass that waits, which both would hold up twice."""
        job = self._queue.get()
        if job[0] == Priority.SNAPSHOT and self._had_part:
            with suppress(queue.Empty):
                job, part = self._queue.get_nowait(), job
                self._queue.put(part)
        if job[0] != Priority.OPTIMIZER:
            self._had_part = job[0] == Priority.SNAPSHOT
        return job


class InlineCompute(Compute):
    """Runs the work on the loop at once, for simulations, where `cost(priority)` virtual seconds pass.

    A device that may compute for a share of the time rests after each piece, as the thread does.
    """

    def __init__(self, cost: Callable[[Priority], float], trace: Trace = NO_TRACE) -> None:
        super().__init__(asyncio.get_running_loop().time, trace)
        self._cost = cost
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._busy = False
        self._resting: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def state(self) -> str:
        return "busy" if self._busy else "idle"

    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        queued = self.trace.now()
        self._require_device()
        await self._turn(priority)
        started, began = self.clock(), self._begin(priority)
        try:
            seconds = self._cost(priority)
            try:
                result = work(*args, **kwargs)
            except (MemoryError, RuntimeError) as raised:
                error = named(raised)
                self._look_at_failure(error)
                raise error from None
            await asyncio.sleep(seconds)
            return result
        finally:
            self._end(priority, work, queued, began)
            self._rest(self.duty.rest(started, self.clock()))

    def _rest(self, seconds: float) -> None:
        if seconds:
            self._resting = asyncio.get_running_loop().call_later(seconds, self._pass_on)
        else:
            self._pass_on()

    async def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        for _, _, turn in self._waiting:
            turn.cancel()

    async def _turn(self, priority: Priority) -> None:
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the turn had come already: hand it on
            raise

    def _pass_on(self) -> None:
        self._busy = False
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._busy = True
                turn.set_result(None)
                return


def job_name(work: Callable[..., object]) -> str:
    """The name of a piece of work in a trace: `_work_outer_step` is "outer step"."""
    name: str = getattr(work, "__name__", type(work).__name__)
    return name.strip("_").removeprefix("work_").replace("_", " ")


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
