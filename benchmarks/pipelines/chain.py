"""One replica of each stage as real daemons, and how fast they train: for benchmarks of the pipeline."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from protocol.run.manifest import Manifest, as_toml

START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
MOST_STOLEN = 0.02  # of the processor time, by other guests of a hypervisor, in a step that counts

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
class Step:
    """One inner step of the first stage."""

    speed: float  # tokens per second
    computing: float  # the share of its time in which the last stage computed
    processor: float  # of the processor time that this machine had, what the stages' busiest threads got
    stolen: float  # of the machine's processor time, what its hypervisor gave to others instead


@dataclass(frozen=True)
class _Clock:
    """Seconds, and processor seconds of each stage's threads and of the hypervisor's other guests."""

    wall: float
    threads: list[dict[int, float]]  # of each stage: by the thread's id
    stolen: float

    def busiest_since(self, began: _Clock) -> float:
        """Processor seconds of the threads that got most of them since then, one of each stage."""
        return sum(
            max(seconds - earlier.get(thread, 0.0) for thread, seconds in now.items())
            for now, earlier in zip(self.threads, began.threads, strict=True)
        )


class Chain:
    """Mutable state: a seed peer and a node for each stage, until the end of the `with` block.

    `places` are for the seed peer first, then for the stages in order. With `traced` each stage writes a trace.
    """

    program: Sequence[str] = ("-m", "node.cli")  # of a node, for Python

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
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End all processes; what they wrote is still there."""
        for process, _ in reversed(self._processes):
            process.send_signal(signal.SIGINT)
        ends = time.monotonic() + STOP_SECONDS
        for process, _ in self._processes:
            try:
                process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def directory(self) -> Path:
        return Path(self._folder.name)

    @property
    def traces(self) -> list[Path]:
        """Of the nodes, as far as they are written."""
        return [self.directory / f"stage{number}.json" for number in range(len(self.stages()))]

    def stages(self) -> list[int]:
        """Which stage each node has, in the order of their places."""
        return list(range(self._manifest.stages))

    def _start(self) -> None:
        (self.directory / "manifest.toml").write_text(as_toml(self._manifest))
        host, prefix = self._places[0]
        seed = self._run(
            "seed",
            [*prefix, sys.executable, "-m", "bootstrap.found_cli", "--manifest", f"{self.directory}/manifest.toml",
             "--state-dir", f"{self.directory}/run", "--host", host, "--port", "0", *self._founding],
        )  # fmt: skip
        address = self.wait_for(lambda: _address_in(seed))
        for number, stage in enumerate(self.stages()):
            host, prefix = self._places[1 + number]
            trace = ["--trace", str(self.traces[number])] if self._traced else []
            self._run(
                f"stage{number}",
                [*prefix, sys.executable, *self.program, "--join", address, "--stage", str(stage), "--state-dir",
                 f"{self.directory}/stage{number}", "--host", host, "--no-relay", "--threads", "1",
                 "--device", self._device, "--checkpoint-minutes", "60", *trace, *self._options],
            )  # fmt: skip

    def _run(self, name: str, command: list[str]) -> Path:
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._processes.append((process, log))
        return log

    def wait_for(self, look: Callable[[], Any]) -> Any:
        """What `look` finds, once it finds something. Raises `ChainFailed`."""
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
        self.wait_for(lambda: len(self.events("step", stage)) > last)
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
        self.wait_for(lambda: len(self.step_times()) >= steps)

    def steady_steps(self, count: int) -> list[Step]:
        """The next `count` inner steps, after the present one.

        Where a hypervisor takes more than `MOST_STOLEN` of the machine's processor time from some of them: of up to
        twice as many, those from which it took least.
        """
        first = len(self.step_times())
        clocks = []
        steps: list[Step] = []
        while sum(step.stolen <= MOST_STOLEN for step in steps) < count and len(steps) < 2 * count:
            self.wait_for_steps(first + len(clocks) + 1)
            clocks.append(self._clock())
            if len(clocks) > 1:
                steps.append(self._step(first + len(steps), *clocks[-2:]))
        undisturbed = sorted(steps, key=lambda step: step.stolen)[:count]
        return [step for step in steps if step in undisturbed]

    def _step(self, first: int, began: _Clock, ended: _Clock) -> Step:
        """From the end of the step `first`, counted from 0, to that of the next."""
        begin, end = self.step_times()[first : first + 2]
        tokens = self._manifest.inner.microbatches * self._manifest.tokens_per_microbatch
        had = psutil.cpu_count() * (ended.wall - began.wall)
        stolen = ended.stolen - began.stolen
        return Step(
            speed=tokens / (end - begin),
            computing=self.share_computed(self._manifest.stages - 1, first, first + 1),
            processor=ended.busiest_since(began) / (had - stolen),
            stolen=stolen / had,
        )

    def _clock(self) -> _Clock:
        threads = [
            {
                thread.id: thread.user_time + thread.system_time
                for thread in psutil.Process(process.pid).threads()
            }
            for process, _ in self._processes[1:]
        ]
        stolen = getattr(psutil.cpu_times(), "steal", 0.0)  # only Linux tells
        return _Clock(time.monotonic(), threads, stolen)

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
