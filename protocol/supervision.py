"""The owner of background work: nothing in protocol/ or node/ starts a task any other way.

A task that nobody awaits fails in silence, and a task that nobody cancels outlives what it worked for. A supervisor
owns tasks: it says what a failure stops, starts a part again or ends the node, and none of them outlives `close`. The
functions below it are for work that its caller waits for on the spot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from protocol.errors import NodeFailed, NolocoError
from protocol.windows import counted, window

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 1.0  # seconds before a part that failed is started again, doubling with each further failure
LONGEST_PAUSE = 60.0
STEADY_SECONDS = 120.0  # a part that ran this long has recovered: its next pause is the first one again
CANCEL_SECONDS = 0.5  # in Python 3.11 asyncio.wait_for may swallow a cancellation: it is repeated after these

Work: TypeAlias = Coroutine[Any, Any, T]  # what an `async def` returns
PartState = Literal["running", "failed", "ended"]


class Tell(Protocol):
    """Tells as `Events.warn` does: a sentence for the volunteer, the name of the event, its fields for programs."""

    def __call__(self, sentence: str, event: str, **fields: object) -> None: ...


@dataclass
class Part:
    """One part that is kept running, as a health check shows it. Times are the loop's, in seconds."""

    name: str
    stops: str  # what does not happen while it is down
    since: float  # when it was last started
    state: PartState = "running"
    restarts: int = 0
    failure: str = ""  # the last one


class Supervisor:
    """Owns background tasks: starts them, starts parts again that fail, and ends all of them when it is closed.

    Mutable state: the tasks that run, the parts that are kept running, the groups made from this one.
    """

    def __init__(
        self,
        tell: Tell | None = None,
        end: Callable[[NodeFailed], None] = lambda _: None,
        parent: Supervisor | None = None,
    ) -> None:
        """`tell` reports failures; `end` is called once an essential part has failed, to end the node."""
        self._tell = tell or _log
        self._end = end
        self._parent = parent
        self._tasks: dict[
            asyncio.Task[object], None
        ] = {}  # a dict keeps their order: closing is deterministic
        self._parts: dict[str, Part] = {}
        self._groups: dict[Supervisor, None] = {}

    @window
    def __repr__(self) -> str:
        parts = self.parts()
        failed, restarts = sum(part.state == "failed" for part in parts), sum(part.restarts for part in parts)
        kept = f"{len(parts)} kept, {failed} failed, {counted(restarts, 'restart')}"
        return f"Tasks: {self.running()} | Parts: {kept} | Groups: {len(self._groups)}"

    def end_node(self, failure: NodeFailed) -> None:
        """End the node with this sentence: a part that nobody keeps running has found that it cannot go on."""
        self._end(failure)

    def group(self) -> Supervisor:
        """A supervisor for one part's own tasks; closed with this one at the latest."""
        return Supervisor(self._tell, self._end, self)

    # --- starting -----------------------------------------------------------------------------

    def start(self, work: Work[T], name: str = "") -> asyncio.Task[T]:
        """A task whose result its caller awaits: a failure is the caller's to see."""
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        self._join_parent()
        return task

    def _join_parent(self) -> None:
        """Join the parent from the first task until `close`, so that groups that have ended leave nothing behind."""
        if self._parent is not None:
            self._parent._groups[self] = None
            self._parent._join_parent()

    def spawn(self, work: Work[T], name: str, stops: str = "") -> asyncio.Task[T]:
        """A task that nobody awaits. An exception is told, with what it `stops`, and nothing is repeated."""
        task = self.start(work, name)

        def tell(done: asyncio.Task[T]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, Exception):
                _show_bug(name, error)
                self._tell(_sentence(name, error, stops), "task-failed", part=name)

        task.add_done_callback(tell)
        return task

    def keep(self, name: str, work: Callable[[], Work[None]], stops: str, essential: bool = False) -> None:
        """Run `work()` until it returns. When it raises, that is told and it is started again after a pause.

        An `essential` part is not started again: the node ends with a sentence, as it cannot go on without. So it
        does when a part raises `NodeFailed`, whose sentence it then is.
        """
        part = self._parts[name] = Part(name, stops, asyncio.get_running_loop().time())
        self.start(self._keep(part, work, essential), name)

    async def _keep(self, part: Part, work: Callable[[], Work[None]], essential: bool) -> None:
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
        while True:
            part.since, part.state = loop.time(), "running"
            try:
                await work()
                part.state = "ended"
                return
            except NodeFailed as failure:
                part.state, part.failure = "failed", str(failure)
                self._end(failure)
                return
            except Exception as error:  # noqa: BLE001  told, and the part is started again
                if loop.time() - part.since >= STEADY_SECONDS:
                    pause = FIRST_PAUSE
                self._note_failure(part, error, pause, essential)
                if essential:
                    return
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
            part.restarts += 1

    def _note_failure(self, part: Part, error: Exception, pause: float, essential: bool) -> None:
        is_new = _named(error) != part.failure
        part.state, part.failure = "failed", _named(error)
        if essential:
            self._end(node_failed(part.name, error, part.stops))
            return
        if is_new:
            _show_bug(part.name, error)
        sentence = f"{_sentence(part.name, error, part.stops)} It is started again in {pause:.0f} s."
        fields = {"part": part.name, "failure": part.failure, "restarts": part.restarts}
        self._tell(sentence, "part-failed", **fields)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.pop(task, None)
        seen(task)  # whoever awaits it is told, and one that is dropped has nobody to tell

    # --- looking ------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """The parts that are kept running here and in all groups."""
        return [*self._parts.values(), *(part for group in self._groups for part in group.parts())]

    def running(self) -> int:
        """The number of tasks, here and in all groups."""
        return len(self._tasks) + sum(group.running() for group in self._groups)

    # --- the end ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel all that runs, here and in all groups, and return when it has ended. May be repeated."""
        for group in list(self._groups):
            await group.close()
        self._groups.clear()
        await cancelled([task for task in self._tasks if task is not asyncio.current_task()])
        self._parts.clear()
        if self._parent is not None:
            self._parent._groups.pop(self, None)


async def all_of(*work: Work[T]) -> list[T]:
    """Run them at once; their results. When one fails the others are cancelled; none runs when this returns."""
    tasks = [asyncio.get_running_loop().create_task(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancelled(tasks)


@asynccontextmanager
async def until(due: Callable[[], float]) -> AsyncIterator[None]:
    """Raise `TimeoutError` once the loop's clock has reached `due()`, which may be put off meanwhile."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        alarm: asyncio.TimerHandle

        def look() -> None:
            nonlocal alarm
            if due() <= loop.time():
                timeout.reschedule(loop.time())
            else:
                alarm = loop.call_at(due(), look)

        alarm = loop.call_at(due(), look)
        try:
            yield
        finally:
            alarm.cancel()


async def until_event(work: Work[T], *events: asyncio.Event) -> T | None:
    """The result of `work`, or None when one of the events came first: the work is cancelled then."""
    loop = asyncio.get_running_loop()
    task, watching = loop.create_task(work), [loop.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *watching], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancelled([task, *watching])


async def cancelled(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel them and return when they have ended; what they raise is dropped."""
    tasks = list(tasks)
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
    for task in tasks:
        seen(task)


def seen(task: asyncio.Task[object]) -> None:
    """Keep asyncio from logging that nobody looked at the exception of a task that has ended."""
    if not task.cancelled():
        task.exception()


def node_failed(what: str, error: Exception, stops: str) -> NodeFailed:
    """The error that ends a node which cannot go on without `what`."""
    _show_bug(what, error)
    ends = "This node ends; start it again to go on from its last checkpoint."
    return NodeFailed(f"{_sentence(what, error, stops)} {ends}")


def _show_bug(name: str, error: Exception) -> None:
    """Errors raised on purpose say it themselves; of any other the traceback goes to the log."""
    if not isinstance(error, NolocoError):
        logger.error("%s failed", name, exc_info=error)


def _named(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, NolocoError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _sentence(name: str, error: Exception, stops: str) -> str:
    return f"{name[:1].upper()}{name[1:]} failed ({_named(error)}). {stops}".rstrip()


def _log(sentence: str, event: str, **fields: object) -> None:
    logger.warning("%s", sentence)
