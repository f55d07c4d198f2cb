"""A volunteer's terminal: Ctrl-C goes to its whole foreground group, and the node still leaves in order."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.real.daemons import PATIENCE, SeedDaemon, started

CTRL_C = b"\x03"


class Terminal:
    """A command in a pseudo-terminal of its own, and what its screen shows."""

    def __init__(self, *command: str) -> None:
        self.screen = ""
        self.pid, self._keyboard = pty.fork()
        if not self.pid:
            os.execvp(command[0], command)
        started.append(self.pid)

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, self.screen):
            assert time.monotonic() < end, self.screen
            assert self._read(), f"{pattern!r} did not appear in:\n{self.screen}"

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def exit_code(self) -> int:
        """Of the command, once it has ended; what it still says is on the screen then."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._keyboard)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """False once the command has ended."""
        if select.select([self._keyboard], [], [], 1.0)[0]:
            try:
                self.screen += os.read(self._keyboard, 1 << 16).decode(errors="replace")
            except OSError:  # Linux: nobody holds the other end any more
                return False
        return True


@pytest.mark.timeout(240)
def test_ctrl_c_in_a_terminal_lets_the_node_leave_with_its_network(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    terminal = Terminal(
        sys.executable, "-m", "node.cli", "--join", seed.join_address(), "--state-dir", str(tmp_path / "node"),
        "--host", "127.0.0.1", "--no-relay", "--threads", "1", "--device", "cpu", "--stage", "0",
    )  # fmt: skip
    terminal.wait_for("Serving stage 0")
    network = [child for child in psutil.Process(terminal.pid).children() if "p2pd" in child.name()]
    assert [os.getsid(child.pid) for child in network] != [os.getsid(terminal.pid)]
    terminal.type(CTRL_C)
    assert terminal.exit_code() == 0, terminal.screen
    assert "Left the swarm." in terminal.screen
    assert "tarting it again" not in terminal.screen
    assert "not running" not in terminal.screen
    assert '{"' not in terminal.screen  # p2pd's own log
    assert seed.leave() == 0
