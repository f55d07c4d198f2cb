"""The conversation of a benchmark with the processes that it measures: JSON lines over their stdin and stdout.

All processes of one group start together, at an agreed reading of the machine's monotonic clock, and each says how
long after it was done.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

Message = dict[str, Any]

START_DEADLINE = 240.0  # seconds; importing torch and hivemind eight times on two cores takes its time
STEP_DEADLINE = 240.0
_AHEAD = 0.3  # seconds from the command to the common start: everybody has read it by then


class PeerFailed(Exception):
    """A measured process died, did not answer or computed something else than the average."""


class Peer:
    """One measured process. `prefix` runs it somewhere else: in a network namespace."""

    def __init__(self, script: Path, settings: Message, prefix: Sequence[str] = ()) -> None:
        self.name = script.stem
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by `stop`
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, command: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None

    def answer(self, deadline: float = STEP_DEADLINE) -> Message:
        """The next answer. Raises `PeerFailed`."""
        try:
            line = self._answers.get(timeout=deadline)
        except queue.Empty:
            raise self._failure(f"did not answer within {deadline:g} s") from None
        if not line:
            raise self._failure(f"ended with exit code {self._process.wait()}")
        answer: Message = json.loads(line)
        return answer

    def processor_seconds(self) -> float:
        """Used so far by the process and its children, p2pd among them."""
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))

    def stop(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(15)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _failure(self, what: str) -> PeerFailed:
        self._errors.seek(0)
        return PeerFailed(f"{self.name} {what}\n{self._errors.read()[-2000:]}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put("")


class Group:
    """Peers that average with one another, by one method."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers

    def start(self) -> None:
        """Wait until all are up and introduce them to one another."""
        introductions = [peer.answer(START_DEADLINE) for peer in self.peers]
        for peer in self.peers:
            self._tell_and_wait([peer], "meet", others=introductions)

    def measure(self, command: str) -> tuple[list[Message], float]:
        """One averaging, prepared and then started by all at the same moment.

        Returns what each peer says of it, and the processor time that it took all of them.
        """
        self._tell_and_wait(self.peers, f"prepare_{command}")
        time.sleep(_AHEAD)
        before = self.processor_seconds()
        answers = self._tell_and_wait(self.peers, command, at=time.monotonic() + _AHEAD)
        spent = self.processor_seconds() - before
        self._tell_and_wait(self.peers, "rest")
        return answers, spent

    def processor_seconds(self) -> float:
        """Used so far by all processes of all peers: less disturbed by other work on the machine than seconds."""
        return sum(peer.processor_seconds() for peer in self.peers)

    def stop(self) -> None:
        for peer in self.peers:
            peer.stop()

    def _tell_and_wait(self, peers: list[Peer], command: str, **fields: Any) -> list[Message]:
        for peer in peers:
            peer.tell(command, **fields)
        return [peer.answer() for peer in peers]


# --- in the measured process ----------------------------------------------------------------------


def say(answer: Message) -> None:
    print(json.dumps(answer), flush=True)


def next_command() -> Message | None:
    """None when the benchmark is over."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def sleep_until(moment: float) -> None:
    """Return at this reading of the monotonic clock, to some microseconds."""
    time.sleep(max(0.0, moment - time.monotonic() - 0.002))
    while time.monotonic() < moment:
        pass
