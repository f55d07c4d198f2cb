"""Real daemons for tests: started as a user starts them, watched through what they print and write."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.patience import patience

PATIENCE = patience(90.0)
started: list[int] = []  # process ids, for the root conftest.py, which ends those that a failed test leaves


def end(pid: int) -> None:
    """A process that a test started, and all that it started itself: SIGTERM, so that it cleans up, then kill -9."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        process.terminate()
        with suppress(psutil.TimeoutExpired):
            process.wait(patience(15))
        for one in [*children, process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        with suppress(psutil.TimeoutExpired):
            process.wait(10)


class Daemon:
    """One process, its output in a file."""

    def __init__(self, command: list[str], log: Path, prefix: tuple[str, ...] = ()) -> None:
        self.log = log
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NOLOCO_")}
        beside = [environment.get("PYTHONPATH", ""), str(Path(__file__).parent)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, beside))
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        started.append(self.process.pid)

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str, patience: float = PATIENCE) -> re.Match[str]:
        """The first match in the output; fails with the output when it does not come."""
        found = wait_until(lambda: re.search(pattern, self.output), patience, self.still_running)
        assert found is not None, f"{pattern!r} did not appear in:\n{self.output}"
        return found

    def still_running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, as a power cut."""
        if self.still_running():
            self.process.kill()
        self.process.wait(10)

    def leave(self, patience: float = 60.0) -> int:
        """Ctrl-C and the exit code."""
        self.signal(signal.SIGINT)
        return self.process.wait(patience)


class NodeDaemon(Daemon):
    """`noloco-node` with a state directory of its own."""

    def __init__(
        self,
        state: Path,
        *arguments: str,
        host: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
        module: str = "node.cli",
        program: tuple[str, ...] = (),
    ) -> None:
        """`module` is what is run: the daemon, or a file beside this one that changes something in it first;
        or `program`, an installed one.
        """
        self.state = state
        state.mkdir(parents=True, exist_ok=True)
        command = [
            *(program or (sys.executable, "-m", module)), "--state-dir", str(state), "--host", host, "--no-relay",
            "--threads", "1", "--device", "cpu", *arguments,
        ]  # fmt: skip
        super().__init__(command, state / "output.log", prefix)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.state / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if name is None or event["event"] == name]

    @property
    def step(self) -> int:
        steps = self.events("step")
        return int(steps[-1]["step"]) if steps else 0

    @property
    def stage(self) -> int:
        return int(self.wait_for_event("serving")["stage"])

    @property
    def address(self) -> str:
        return str(self.wait_for_event("addresses")["addresses"][0])

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step") if event["loss"] is not None]

    def wait_for_step(self, step: int, patience: float = PATIENCE) -> None:
        reached = wait_until(lambda: self.step >= step, patience, self.still_running)
        assert reached, f"step {self.step} instead of {step}:\n{self.output}"

    def wait_for_event(self, name: str, patience: float = PATIENCE) -> dict[str, Any]:
        found = wait_until(lambda: self.events(name), patience, self.still_running)
        assert found, f"no event {name!r}:\n{self.output}"
        return dict(found[-1])


class SeedDaemon(Daemon):
    """`noloco-bootstrap` on a free port."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        host: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
        program: tuple[str, ...] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        command = [
            *(program or (sys.executable, "-m", "bootstrap.found_cli")), "--state-dir", str(directory),
            "--host", host, "--port", "0", *arguments,
        ]  # fmt: skip
        super().__init__(command, directory / "output.log", prefix)

    def join_address(self, starting_with: str = "/ip4/127.0.0.1/") -> str:
        return self.wait_for(rf"(?:noloco join|noloco-node --join) ({re.escape(starting_with)}\S+)").group(1)


def wait_until(
    condition: Callable[[], Any], patience: float = PATIENCE, while_true: Callable[[], bool] = lambda: True
) -> Any:
    """The first true value of `condition`; its last value when patience or `while_true` ends."""
    end = time.monotonic() + patience
    while time.monotonic() < end and while_true():
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    return condition()


def run_tool(
    *arguments: str,
    patience: float = PATIENCE,
    prefix: tuple[str, ...] = (),
    module: str = "bootstrap.tools_cli",
) -> subprocess.CompletedProcess[str]:
    """`noloco …`, to its end; `module` as in `NodeDaemon`."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
