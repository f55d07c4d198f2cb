"""Ctrl-C, SIGTERM and SIGHUP, in processes of their own: how long a graceful end may take, and what ends it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from node.machine import processes
from node.machine.processes import LAST_MOMENT, TOGETHER
from protocol.errors import INTERRUPTED, TERMINATED
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
        for place, number in enumerate(numbers):
            time.sleep(2 * TOGETHER if place else 0)
            process.send_signal(number)
            printed += process.stdout.readline()  # it has taken that one: two at once would be one
        code = process.wait(PATIENCE)
        return code, printed + process.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    assert end_of("leaves", number) == (0, f"{number.name}\n")


def test_the_second_signal_ends_at_once() -> None:
    code, printed = end_of("stays", signal.SIGINT, signal.SIGINT)
    assert code == INTERRUPTED
    assert "Left at once" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_at_once_asks_once(number: signal.Signals) -> None:
    """`timeout -s INT` signals the process, and then its group."""
    later = PROGRAM.replace("stop.set()", "asyncio.get_running_loop().call_later(0.3, stop.set)")
    process = subprocess.Popen(
        [sys.executable, "-c", later, "leaves"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    started.append(process.pid)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("manner", ["stays", "hangs"])
def test_after_sigterm_even_a_process_that_hangs_ends(manner: str, number: signal.Signals) -> None:
    code, printed = end_of(manner, number)
    assert code == TERMINATED
    assert "last checkpoint" in printed


def test_a_terminal_that_closes_asks_and_nothing_fails_for_want_of_it(tmp_path: Path) -> None:
    """As when the connection of `ssh` breaks: the terminal's processes get SIGHUP, and writing to it fails."""
    main, side = pty.openpty()
    program = PROGRAM.replace("print(number.name, flush=True)", "open(sys.argv[2], 'a').write(number.name)")
    program = program.replace(
        "    await stop.wait()", "    await stop.wait(); print('said to nobody', flush=True)"
    )
    command = [sys.executable, "-c", program, "leaves", str(tmp_path / "told")]
    process = subprocess.Popen(
        command,
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    started.append(process.pid)
    os.close(side)
    assert os.read(main, 100).strip() == b"ready"
    os.close(main)
    assert process.wait(PATIENCE) == 0
    assert (tmp_path / "told").read_text(encoding="utf-8") == "SIGHUP"


def test_under_nohup_a_hangup_stays_ignored() -> None:
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", PROGRAM, "leaves"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(process.pid)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == "SIGTERM\n"


def test_docker_does_not_have_to_kill() -> None:
    assert processes.PATIENCE[signal.SIGTERM] < LAST_MOMENT < 10.0
    assert processes.PATIENCE[signal.SIGHUP] == processes.PATIENCE[signal.SIGTERM]
