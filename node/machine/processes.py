"""Ending processes: children never outlive their parent; Ctrl-C, SIGTERM and SIGHUP first ask for a graceful end.

A second Ctrl-C or SIGTERM ends the process at once. Whoever presses Ctrl-C has time, and a second one. SIGTERM comes
from a machine or a container that shuts down, and docker, like others, kills ten seconds later: after less than that,
the process ends, whatever is still to be done. Nor does it wait for a `BackgroundThread`. A closing terminal sends
SIGHUP, more than once, or with a SIGTERM: that means the same. Under nohup it is ignored, and stays so.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

from protocol.errors import INTERRUPTED, TERMINATED

P = ParamSpec("P")
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# seconds that a graceful end may take
PATIENCE = {signal.SIGINT: 40.0, signal.SIGTERM: 7.5, signal.SIGHUP: 7.5}
TOGETHER = 0.25  # seconds
LAST_MOMENT = 9.0  # seconds after SIGTERM or SIGHUP: what is not done by now is left undone


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by kill -9; for a child, before exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def without_named_locks() -> None:
    """Have locks that libraries make when they are imported leave no name behind in the system.

    hivemind makes four. Where processes are not forked by default, as from Python 3.14 on, each has a name, and of
    those of a process that ends by `os._exit` Python's resource tracker says "leaked semaphore objects". Whatever we
    start as a process names its own way to.
    """
    multiprocessing.set_start_method("fork", force=True)


@dataclass(frozen=True)
class Child:
    name: str
    process: asyncio.subprocess.Process


class Children:
    """Child processes that are started and ended together.

    Mutable state: the processes started, in order.
    """

    def __init__(self) -> None:
        self.all: list[Child] = []

    async def start(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Start a command in a session of its own, where no Ctrl-C reaches it. Its output goes where ours does."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.all.append(Child(name, process))

    def interrupt(self, number: signal.Signals) -> None:
        """Ask all to leave as whoever asked this process: see `on_interrupt`."""
        for child in self.all:
            if child.process.returncode is None:
                child.process.send_signal(number)

    def kill(self) -> None:
        self.interrupt(signal.SIGKILL)


def on_interrupt(stop: Callable[[signal.Signals], bool | None]) -> None:
    """Call `stop` with the first signal; it then has `PATIENCE`. If it returns False it asks for another first one.

    At the second, exit at once without saving; so too `LAST_MOMENT` after a SIGTERM or SIGHUP. Two within `TOGETHER`
    are one: `timeout`, and whatever else runs a command, signals the process and its whole group.
    """
    first: signal.Signals | None = None
    came = -TOGETHER

    def handle(number: signal.Signals) -> None:
        nonlocal first, came
        if number == signal.SIGHUP:
            let_go_of_terminal()
        if is_repeated(first, number) and loop.time() - came > TOGETHER:
            _exit("Left at once; what was in flight here is lost to the swarm.", INTERRUPTED)
        if first is not None or loop.time() - came < TOGETHER:
            return
        came = loop.time()
        first = None if stop(number) is False else number
        if first is None:
            return
        if number != signal.SIGINT:
            # in a thread of its own: the loop may be what hangs
            sentence = "There was no time to end everything; a restart goes on from the last checkpoint."
            timer = threading.Timer(LAST_MOMENT, _exit, (sentence, TERMINATED))
            timer.daemon = True
            timer.start()

    loop = asyncio.get_running_loop()
    for number in PATIENCE:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup has set
            loop.add_signal_handler(number, handle, number)


def is_repeated(first: signal.Signals | None, number: signal.Signals) -> bool:
    """Return whether a signal after the `first` asks for an end at once: not when one closed terminal sent both."""
    if first is None or number == signal.SIGHUP:
        return False
    return first != signal.SIGHUP or number != signal.SIGTERM


def let_go_of_terminal() -> None:
    """Let output go nowhere from now on where the terminal is gone: writing to it would raise errors."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # others are files and pipes
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def end_process(code: int = 0) -> NoReturn:
    """Exit once everything is closed: taking torch apart first costs over a second of processor time."""
    logging.shutdown()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def ending_beside_threads() -> Iterator[None]:
    """Wrap a whole command, whose end does not wait for what a `BackgroundThread` still does.

    Python ends such a thread at the next of its own instructions. Where one has torch's frames on its stack that
    aborts the process ("terminate called without an active exception"), so that it is not left to Python.
    """
    codes: list[int] = []

    def end() -> None:
        if codes and BackgroundThread.at_work:
            end_process(codes[0])

    atexit.register(end)  # first, so that it runs after what libraries still have to tidy up
    try:
        yield
    except SystemExit as ended:
        codes.append(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
        raise


def _exit(sentence: str, code: int) -> None:
    with suppress(OSError):  # nobody may be there to read it
        print(sentence, file=sys.stderr)
    os._exit(code)  # p2pd notices the closed pipe and ends by itself


class BackgroundThread(Executor):
    """A thread that does one thing after another, and that nobody waits for at the end of the process.

    What makes microbatches may wait for the network for minutes, and to read a large corpus for the first time takes
    as long; `ThreadPoolExecutor`, which `asyncio.to_thread` uses, would keep a node that leaves.

    Mutable state: the work that waits, and the thread, which begins with the first of it.
    """

    at_work: ClassVar[set[int]] = set()  # of all in this process: threads that do something now

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, partial(work, *args, **kwargs)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after the queued work; cancel what should not run before."""
        self._work.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (piece := self._work.get()) is not None:
            future, work = piece
            if not future.set_running_or_notify_cancel():
                continue
            self.at_work.add(threading.get_ident())
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  it belongs to whoever asked
                future.set_exception(error)
            finally:
                self.at_work.discard(threading.get_ident())


async def in_background(name: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` as `asyncio.to_thread` does, in a thread called `name`; when cancelled, nobody waits for its end."""
    thread = BackgroundThread(name)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))
    finally:
        thread.shutdown(wait=False)
