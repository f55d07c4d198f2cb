"""An asyncio event loop whose clock jumps: hours of a swarm's life in seconds, the same each time.

The loop never sleeps. When nothing is ready to run, it sets its clock to the next timer. Everything in
asyncio that is built on timers (sleep, timeout, wait_for, call_later) works as it is. Real sockets and other
threads do not exist here; `run_in_executor` and `asyncio.to_thread` run the function on the spot.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from protocol.supervision import Work

T = TypeVar("T")

_TASKS_SHOWN = 8  # in the message about a deadlock


class Deadlock(RuntimeError):
    """All tasks wait, and no timer is left that could wake one of them."""


def run_virtual(main: Work[T]) -> T:
    """Run `main` to its end under a virtual clock that starts at 0, and return its result.

    Raises `Deadlock` when it can never end, naming what the tasks wait for. Tasks that are left over are
    cancelled, as by `asyncio.run`.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual: seconds since the loop was made, advanced only when all tasks wait."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_TimeJumper(self))

    def time(self) -> float:
        return self._virtual_now

    def advance_to_next_timer(self) -> None:
        """Advance the clock to the next timer when no callback is ready; `_scheduled` is asyncio's heap of timers."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not timers:
            raise Deadlock(_describe(asyncio.all_tasks(self)))
        self._virtual_now = max(self._virtual_now, timers[0].when())
        # asyncio runs the timers that are due before time() + resolution. The least step that the clock can
        # make gives exactly those due now, and still works when the clock has grown so large that adding a
        # nanosecond to it would change nothing.
        self._clock_resolution = math.ulp(self._virtual_now)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Run `func` at once: another thread would finish at a moment that no virtual clock knows."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever func raises belongs to the caller
            future.set_exception(error)
        return future


class _TimeJumper(selectors.SelectSelector):
    """A selector that moves the clock to the next timer where asyncio would wait for sockets until then."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._loop.advance_to_next_timer()
        return []


def _describe(tasks: set[asyncio.Task[object]]) -> str:
    lines = sorted(_where(task) for task in tasks if not task.done())
    if len(lines) > _TASKS_SHOWN:
        lines[_TASKS_SHOWN:] = [f"and {len(lines) - _TASKS_SHOWN} more"]
    why = "virtual time cannot advance: no timer is set, and these tasks wait for ever:"
    return "\n  ".join([why, *lines])


def _where(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    place = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "an unknown place"
    return f"{task.get_name()} in {task.get_coro().__qualname__} at {place}"  # type: ignore[union-attr]
