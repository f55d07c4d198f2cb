"""Ctrl-C and SIGTERM: the first asks for a graceful end, the second ends at once.

Whoever presses Ctrl-C has time, and a second one. SIGTERM comes from a machine or a container that shuts down, and
docker, like others, kills ten seconds later: after less than that, the process ends, whatever is still to be done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143  # 128 and the signal's number, as a shell says it
PATIENCE = {signal.SIGINT: 40.0, signal.SIGTERM: 7.5}  # seconds that a graceful end may take
LAST_MOMENT = 9.0  # seconds after SIGTERM: what is not done by now is left undone


def on_interrupt(stop: Callable[[signal.Signals], None]) -> None:
    """Call `stop` with the first signal; it then has `PATIENCE`.

    At the second, exit at once without saving; so too `LAST_MOMENT` after a SIGTERM.
    """
    asked = False

    def handle(number: signal.Signals) -> None:
        nonlocal asked
        if asked:
            _exit("Left at once; what was in flight here is lost to the swarm.", EXIT_INTERRUPTED)
        asked = True
        if number == signal.SIGTERM:
            _exit_in_the_end()
        stop(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)


def end_process() -> NoReturn:
    """Exit code 0, when everything is closed: to take torch apart first costs over a second of processor time."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _exit_in_the_end() -> None:
    """A thread of its own: the loop may be the one that hangs."""
    sentence = "There was no time to end everything; the last checkpoint is what a restart goes on from."
    timer = threading.Timer(LAST_MOMENT, _exit, (sentence, EXIT_TERMINATED))
    timer.daemon = True
    timer.start()


def _exit(sentence: str, code: int) -> None:
    print(sentence, file=sys.stderr)
    os._exit(code)  # p2pd notices the closed pipe and ends by itself
