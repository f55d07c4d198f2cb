"""Ctrl-C and SIGTERM, in processes of their own: how long a graceful end may take, and what ends it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from node.machine import processes
from node.machine.processes import EXIT_INTERRUPTED, EXIT_TERMINATED, LAST_MOMENT
from tests.real.daemons import PATIENCE, started

PROGRAM = """
import asyncio, sys, time
from node.machine import processes

processes.LAST_MOMENT = 0.5

async def main():
    stop = asyncio.Event()
    def asked(number):
        print(number.name, flush=True)
        if sys.argv[1] == "leaves":
            stop.set()
        if sys.argv[1] == "hangs":
            time.sleep(30)
    processes.on_interrupt(asked)
    print("ready", flush=True)
    await stop.wait()

asyncio.run(main())
"""


def end_of(manner: str, *numbers: signal.Signals) -> tuple[int, str]:
    """The exit code of a program that leaves, refuses to, or hangs, after these signals, and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, manner], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    started.append(process.pid)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        printed = ""
        for number in numbers:
            process.send_signal(number)
            printed += process.stdout.readline()  # it has taken that one: two at once would be one
        code = process.wait(PATIENCE)
        return code, printed + process.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    assert end_of("leaves", number) == (0, f"{number.name}\n")


def test_the_second_signal_ends_at_once() -> None:
    code, printed = end_of("stays", signal.SIGINT, signal.SIGINT)
    assert code == EXIT_INTERRUPTED
    assert "Left at once" in printed


@pytest.mark.parametrize("manner", ["stays", "hangs"])
def test_after_sigterm_even_a_process_that_hangs_ends(manner: str) -> None:
    code, printed = end_of(manner, signal.SIGTERM)
    assert code == EXIT_TERMINATED
    assert "last checkpoint" in printed


def test_docker_does_not_have_to_kill() -> None:
    assert processes.PATIENCE[signal.SIGTERM] < LAST_MOMENT < 10.0
