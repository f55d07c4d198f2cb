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
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

import torch

from node.memory import keep_freed_memory
from protocol import kernels
from protocol.errors import TransportDown

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
    busy_seconds: float = 0.0

    @abc.abstractmethod
    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work(*args)` when its turn comes; raises what it raises.

        A caller that is cancelled does not stop work that has begun.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish the work at hand, refuse the rest."""


class ComputeThread(Compute):
    """The real one. Mutable state: the priority queue, and the seconds spent computing."""

    def __init__(self, threads: int) -> None:
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
        self._queue.put((priority, next(self._order), (future, work, args, kwargs)))
        return await future

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put((Priority.STOP, next(self._order), None))
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        torch.set_num_threads(self._torch_threads)
        keep_freed_memory()
        kernels.load()
        while True:
            _, _, job = self._queue.get()
            if job is None:
                return
            future, work, args, kwargs = job
            if future.cancelled():
                continue
            began = self._loop.time()
            try:
                result, error = work(*args, **kwargs), None
            except BaseException as raised:  # noqa: BLE001  it is raised again where it was asked for
                result, error = None, raised
            self.busy_seconds += self._loop.time() - began
            self._loop.call_soon_threadsafe(_settle, future, result, error)


class InlineCompute(Compute):
    """For simulations: the work runs on the loop at once, and `cost(priority)` virtual seconds pass."""

    def __init__(self, cost: Callable[[Priority], float]) -> None:
        self._cost = cost
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._busy = False

    async def run(self, priority: Priority, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        await self._turn(priority)
        try:
            seconds = self._cost(priority)
            result = work(*args, **kwargs)
            self.busy_seconds += seconds
            await asyncio.sleep(seconds)
            return result
        finally:
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


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
