"""A thread that does one thing after another, and that nobody waits for at the end of the process.

What makes microbatches may wait for the network for minutes, and to read a large corpus for the first time takes as
long; `ThreadPoolExecutor`, which `asyncio.to_thread` uses, would keep a node that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BackgroundThread(Executor):
    """Mutable state: the work that waits, and the thread, which begins with the first of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, partial(work, *args, **kwargs)))
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after the work that waits; whoever does not want that has cancelled it."""
        self._work.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (piece := self._work.get()) is not None:
            future, work = piece
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  it belongs to whoever asked
                future.set_exception(error)


async def in_background(name: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, in a thread called `name`; when this is cancelled, nobody waits for it to end."""
    thread = BackgroundThread(name)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))
    finally:
        thread.shutdown(wait=False)
