"""Where the stage computes: one thread that takes work by priority, so that the event loop never waits.

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
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

import torch

import protocol.kernels
from node.machine.limits import keep_freed_memory
from node.model.outer import load_loops
from node.model.resources import free_caches, is_out_of_memory
from node.watch.counting import Busy
from node.watch.trace import NO_TRACE, Trace, Track
from protocol.errors import OutOfMemory, TransportDown

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Priority(IntEnum):
    BACKWARD = 0
    OPTIMIZER = 1
    FORWARD = 2
    SERVE = 3  # state pieces, evaluation: must never slow training
    STOP = 4


class Compute(abc.ABC):
    """Runs pieces of work one after another, and keeps account of the time they take."""

    def __init__(self, clock: Callable[[], float], trace: Trace) -> None:
        self.finished = 0  # pieces of training work
        self.busy = Busy(clock)  # with training work: all but `Priority.SERVE`
        self.trace = trace

    @abc.abstractmethod
    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work(*args)` when its turn comes; raises what it raises, and `OutOfMemory` for any way to say that.

        A caller that is cancelled does not stop work that has begun.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish the work at hand, refuse the rest."""

    def _begin(self, priority: int) -> float:
        if priority != Priority.SERVE:
            self.busy.begin()
        return self.trace.now()

    def _end(self, priority: int, work: Callable[..., object], queued: float, began: float) -> None:
        """What was queued and began at these times of the trace's clock has ended."""
        if priority != Priority.SERVE:
            self.busy.end()
            self.finished += 1
        self.trace.complete(
            Track.COMPUTE,
            job_name(work),
            began,
            self.trace.now(),
            priority=Priority(priority).name.lower(),
            waited_ms=round((began - queued) * 1e3, 3),
        )


class ComputeThread(Compute):
    """The real one. Mutable state: the priority queue."""

    def __init__(self, threads: int, trace: Trace = NO_TRACE) -> None:
        super().__init__(time.monotonic, trace)  # the loop's clock stands still while it waits for events
        self._loop = asyncio.get_running_loop()
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._torch_threads = threads
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise TransportDown("the compute thread has ended")
        future: asyncio.Future[T] = self._loop.create_future()
        queued = self.trace.now()
        self._queue.put((priority, next(self._order), (future, queued, work, args, kwargs)))
        return await future

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put((Priority.STOP, next(self._order), None))
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        torch.set_num_threads(self._torch_threads)
        keep_freed_memory()
        load_loops()
        protocol.kernels.load()
        while True:
            priority, _, job = self._queue.get()
            if job is None:
                return
            future, queued, work, args, kwargs = job
            if future.cancelled():
                continue
            began = self._begin(priority)
            try:
                result, error = work(*args, **kwargs), None
            except BaseException as raised:  # noqa: BLE001  it is raised again where it was asked for
                result, error = None, _named(raised)
            self._end(priority, work, queued, began)
            self._loop.call_soon_threadsafe(_settle, future, result, error)


class InlineCompute(Compute):
    """For simulations: the work runs on the loop at once, and `cost(priority)` virtual seconds pass."""

    def __init__(self, cost: Callable[[Priority], float], trace: Trace = NO_TRACE) -> None:
        super().__init__(asyncio.get_running_loop().time, trace)
        self._cost = cost
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._busy = False

    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        queued = self.trace.now()
        await self._turn(priority)
        began = self._begin(priority)
        try:
            seconds = self._cost(priority)
            try:
                result = work(*args, **kwargs)
            except (MemoryError, RuntimeError) as raised:
                raise _named(raised) from None
            await asyncio.sleep(seconds)
            return result
        finally:
            self._end(priority, work, queued, began)
            self._pass_on()

    async def close(self) -> None:
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


def _named(error: BaseException) -> BaseException:
    """The error itself; for memory that ran out, however that was said, the one that callers expect."""
    if not is_out_of_memory(error):
        return error
    free_caches()
    return OutOfMemory(str(error).splitlines()[0] if str(error) else "")


def job_name(work: Callable[..., object]) -> str:
    """What a piece of work is called in a trace: `_work_outer_step` is "outer step"."""
    name: str = getattr(work, "__name__", type(work).__name__)
    return name.strip("_").removeprefix("work_").replace("_", " ")


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
