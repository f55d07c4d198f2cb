"""One replica of each stage as real daemons, and how fast they train: for benchmarks of the pipeline."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from protocol.manifest import Manifest
from protocol.manifest_text import as_toml

START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1

Place = tuple[str, list[str]]  # the address to listen on, and what to put before a command to run it there


class ChainFailed(Exception):
    """A process ended, or training did not begin; the text holds its last words."""


def manifest_of(
    hidden: int, microbatches: int = 8, staleness: int = 0, sequences: int = 4, **wire: str
) -> Manifest:
    """A Llama of eight layers in two stages; a microbatch has so many sequences of 256 tokens."""
    return Manifest.model_validate(
        {
            "name": f"hidden-{hidden}",
            "stages": 2,
            "model": {
                "vocab_size": 256,
                "hidden_size": hidden,
                "layers": 8,
                "heads": max(2, hidden // 64),
                "intermediate_size": hidden * 8 // 3 // 64 * 64,
            },
            "data": {"source": "python-stdlib", "sequence_tokens": 256},
            "inner": {
                "learning_rate": 1e-3,
                "min_learning_rate": 1e-4,
                "warmup_steps": 20,
                "total_steps": 100_000,
                "microbatches": microbatches,
                "sequences": sequences,
                "staleness": staleness,
            },
            "outer": {"inner_steps": 50},
            "wire": wire,
        }
    )


@dataclass(frozen=True)
class Steps:
    """Inner steps one after another."""

    speeds: list[float]  # tokens per second of each
    computing: float  # the share of their time in which the last stage computed


class Chain:
    """Mutable state: a seed peer and a node for each stage, until the end of the `with` block.

    `places` are for the seed peer first, then for the stages in order. With `traced` each stage writes a trace.
    """

    def __init__(
        self,
        manifest: Manifest,
        places: Sequence[Place],
        options: Sequence[str] = (),
        traced: bool = False,
        device: str = "cpu",
        founding: Sequence[str] = (),
    ) -> None:
        """`options` are the nodes', `founding` those of noloco-bootstrap."""
        self._device = device
        self._traced = traced
        self._manifest = manifest
        self._places = places
        self._options = options
        self._founding = founding
        self._folder = tempfile.TemporaryDirectory(prefix="noloco-bench-")
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Chain:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _ in reversed(self._processes):
            process.send_signal(signal.SIGINT)
        ends = time.monotonic() + STOP_SECONDS
        for process, _ in self._processes:
            try:
                process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    @property
    def directory(self) -> Path:
        return Path(self._folder.name)

    @property
    def traces(self) -> list[Path]:
        """Of the stages, as far as they are written."""
        return [self.directory / f"stage{stage}.json" for stage in range(self._manifest.stages)]

    def _start(self) -> None:
        (self.directory / "manifest.toml").write_text(as_toml(self._manifest))
        host, prefix = self._places[0]
        seed = self._run(
            "seed",
            [*prefix, sys.executable, "-m", "bootstrap.found_cli", "--manifest", f"{self.directory}/manifest.toml",
             "--dir", f"{self.directory}/run", "--host", host, "--port", "0", *self._founding],
        )  # fmt: skip
        address = self._wait_for(lambda: _address_in(seed))
        for stage in range(self._manifest.stages):
            host, prefix = self._places[1 + stage]
            trace = ["--trace", str(self.traces[stage])] if self._traced else []
            self._run(
                f"stage{stage}",
                [*prefix, sys.executable, "-m", "node.cli", "--join", address, "--stage", str(stage), "--state-dir",
                 f"{self.directory}/stage{stage}", "--host", host, "--no-relay", "--threads", "1",
                 "--device", self._device, "--checkpoint-minutes", "60", *trace, *self._options],
            )  # fmt: skip

    def _run(self, name: str, command: list[str]) -> Path:
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._processes.append((process, log))
        return log

    def _wait_for(self, look: Any) -> Any:
        ends = time.monotonic() + START_SECONDS
        while not (found := look()):
            self.require_alive()
            if time.monotonic() > ends:
                raise ChainFailed(f"nothing happened in {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        return found

    def pids(self) -> list[int]:
        """Of the seed peer and the stages' nodes."""
        return [process.pid for process, _ in self._processes]

    def require_alive(self) -> None:
        """Raises `ChainFailed` when a process has ended."""
        for process, log in self._processes:
            if process.poll() is not None:
                raise ChainFailed(f"{log.stem} ended: {log.read_text(errors='replace')[-800:]}")

    def step_times(self) -> list[float]:
        """When the first stage's inner steps ended, in seconds."""
        return [float(event["time"]) for event in self.events("step")]

    def share_computed(self, stage: int, first: int, last: int) -> float:
        """Of the time from the end of a stage's inner step `first`, counted from 0, to that of `last`: computing."""
        self._wait_for(lambda: len(self.events("step", stage)) > last)
        steps = self.events("step", stage)[first : last + 1]
        seconds = steps[-1]["time"] - steps[0]["time"]
        return float((steps[-1]["computed"] - steps[0]["computed"]) / seconds)

    def events(self, name: str, stage: int = 0) -> list[dict[str, Any]]:
        """Of one stage, those of one kind."""
        path = self.directory / f"stage{stage}" / "events.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line, half written
            if event["event"] == name:
                found.append(event)
        return found

    def wait_for_steps(self, steps: int) -> None:
        """Until the first stage has done so many in all."""
        self._wait_for(lambda: len(self.step_times()) >= steps)

    def steady_steps(self, count: int) -> Steps:
        """The next `count` inner steps, after the present one."""
        first = len(self.step_times())
        last = first + count
        for steps in range(first, last + 1):  # each has START_SECONDS
            self.wait_for_steps(steps + 1)
        times = self.step_times()[first : last + 1]
        tokens = self._manifest.inner.microbatches * self._manifest.tokens_per_microbatch
        speeds = [tokens / (end - begin) for begin, end in pairwise(times)]
        return Steps(speeds, self.share_computed(self._manifest.stages - 1, first, last))

    def tokens_per_second(self, seconds: float) -> float:
        """Of the inner steps of the first stage that begin and end within about `seconds` from now."""
        first, ends = len(self.step_times()), time.monotonic() + seconds
        self.wait_for_steps(first + 1)
        while time.monotonic() < ends or len(self.step_times()) <= first + 2:
            self.require_alive()
            time.sleep(POLL_SECONDS)
        times = self.step_times()[first:]
        tokens = self._manifest.inner.microbatches * self._manifest.tokens_per_microbatch
        return (len(times) - 1) * tokens / (times[-1] - times[0])


def _address_in(log: Path) -> str:
    found = re.search(r"/ip4/\S+/p2p/\w+", log.read_text(errors="replace"))
    return found.group() if found else ""
