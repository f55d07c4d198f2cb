"""Ctrl-C and SIGTERM: the first asks for a graceful end, the second ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

EXIT_INTERRUPTED = 130


def on_interrupt(stop: Callable[[], None]) -> None:
    """Call `stop` at the first signal. At the second, exit at once without saving."""
    asked = False

    def handle() -> None:
        nonlocal asked
        if asked:
            print("Left at once; what was in flight here is lost to the swarm.", file=sys.stderr)
            os._exit(EXIT_INTERRUPTED)  # p2pd notices the closed pipe and ends by itself
        asked = True
        stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
