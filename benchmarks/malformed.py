"""What a flood of malformed frames does to a swarm that trains: speed, memory, log, newcomers, and how soon it bans.

Two `noloco-node` processes train the preset tiny, one stage each. Attackers in another process, each identity with
its own p2pd, send a grammar of malformed frames to both as quickly as they can, and connect again whenever they are
thrown out, until `--frames` were sent or `--seconds` are over; with `--even` no faster than these two say. They share
the cores of this machine, and give way there. So speed is told four times, each by an undisturbed stretch before and
one after: steps by wall time (`speed_by_wall`), by processor time of the nodes' processes (`speed_by_nodes`), of
these and their p2pd (`speed_by_all`), and by what the attackers left of the machine (`speed_by_rest`: wall time less
the attackers' share of all cores). `cores_taken`: processor time of nodes and p2pd that their steps do not explain,
in cores, of all together; what else the machine does slows steps, not this. `memory_node`, `memory_p2pd`,
`memory_both` (of one stage, at the end by before, the larger), `lines_a_minute` (most in a minute of one log),
`newcomer` (seconds to join by those before), `most_frames_until_ban`, `not_banned` (identities, of either node).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from flooding.counting_node import BANS_FILE
from pipelines.chain import START_SECONDS, Chain, ChainFailed
from reporting.report import Report, arguments_of, parser_of, run

from protocol.run.manifest import Manifest, load_preset

FLOODING = Path(__file__).parent / "flooding"
PLACES: list[tuple[str, list[str]]] = [("127.0.0.1", [])] * 3
WARM_UP_STEPS = 20
SAMPLE_SECONDS = 1.0
MINUTE = 60.0
END_SECONDS = 30.0
STAGES = (0, 1)
TOLD = ("sent", "offered", "opened")  # by the attackers; the banned ones' streams end before all is sent


class Victims(Chain):
    program = (str(FLOODING / "counting_node.py"),)


def endless_tiny() -> Manifest:
    tiny = load_preset("tiny")
    return tiny.model_copy(update={"inner": tiny.inner.model_copy(update={"total_steps": 10_000_000})})


def processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@dataclass
class Moment:
    """What the clocks and meters said at one time."""

    time: float
    nodes: float  # processor seconds of both nodes' processes
    p2pd: float  # of their p2pd
    attackers: float  # of all of theirs
    memory: dict[str, float]  # megabytes of each node and p2pd
    lines: dict[str, int]  # in each log


class Watch:
    """Looks at the victims and the attackers. Mutable state: the attackers' process, once there is one."""

    def __init__(self, chain: Victims) -> None:
        self._chain = chain
        self._nodes = [psutil.Process(pid) for pid in chain.pids()[1:]]
        self.attackers: psutil.Process | None = None

    def look(self) -> Moment:
        self._chain.require_alive()
        p2pds = [children_of(node) for node in self._nodes]
        memory = {}
        for stage, node in enumerate(self._nodes):
            memory[f"node{stage}"] = node.memory_info().rss / 1e6
            memory[f"p2pd{stage}"] = sum(child.memory_info().rss for child in p2pds[stage]) / 1e6
        crowd = [self.attackers, *children_of(self.attackers)] if self.attackers else []
        return Moment(
            time.time(),
            sum(map(processor_seconds, self._nodes)),
            sum(processor_seconds(child) for children in p2pds for child in children),
            sum(map(processor_seconds, crowd)),
            memory,
            {f"{log.parent.name}/{log.name}": _lines_in(log) for log in self._logs()},
        )

    def _logs(self) -> list[Path]:
        folder = self._chain.directory
        kept = [folder / f"stage{stage}" / "node.log" for stage in STAGES]
        return [*(folder / f"stage{stage}.log" for stage in STAGES), *filter(Path.exists, kept)]


def _lines_in(log: Path) -> int:
    return log.read_bytes().count(b"\n")


@dataclass
class Stretch:
    """Some time of training, perhaps in several parts: what was done in it, and what it took."""

    name: str
    steps: int = 0
    seconds: float = 0.0
    nodes: float = 0.0
    p2pd: float = 0.0
    attackers: float = 0.0
    moments: list[Moment] = field(default_factory=list)

    def add(self, begin: Moment, end: Moment, steps: int) -> None:
        self.steps += steps
        self.seconds += end.time - begin.time
        self.nodes += end.nodes - begin.nodes
        self.p2pd += end.p2pd - begin.p2pd
        self.attackers += end.attackers - begin.attackers

    def speeds(self) -> dict[str, float]:
        cores = psutil.cpu_count() or 1
        return {
            "wall": self.steps / self.seconds,
            "nodes": self.steps / self.nodes,
            "all": self.steps / (self.nodes + self.p2pd),
            "rest": self.steps / max(1e-9, self.seconds - self.attackers / cores),
        }

    def row(self) -> dict[str, Any]:
        speeds = {f"steps_by_{name}": round(speed, 3) for name, speed in self.speeds().items()}
        cores = {
            name: round(getattr(self, name) / self.seconds, 3) for name in ("nodes", "p2pd", "attackers")
        }
        return {
            "stretch": self.name,
            "seconds": round(self.seconds, 1),
            "steps": self.steps,
            **cores,
            **speeds,
        }


def most_in_a_minute(moments: list[Moment]) -> int:
    """Of the lines that any one log got."""
    most = 0
    for begin, first in enumerate(moments):
        for later in moments[begin:]:
            if later.time - first.time > MINUTE:
                break
            most = max(most, *(count - first.lines.get(log, 0) for log, count in later.lines.items()))
    return most


class Attack:
    """The attackers' process. Mutable state: what it has told so far."""

    def __init__(self, folder: Path, victims: list[str], arguments: argparse.Namespace) -> None:
        self._go, self._log = folder / "go", folder / "attackers.log"
        command = [sys.executable, "-m", "flooding.attackers", "--victims", *victims, "--go", str(self._go)]
        for name in ("identities", "frames", "seconds"):
            command += [f"--{name}", str(getattr(arguments, name))]
        command += ["--even"] * arguments.even
        self._complaints = folder / "attackers.err"
        with self._log.open("wb") as output, self._complaints.open("wb") as complaints:
            self.process = subprocess.Popen(command, cwd=FLOODING.parent, stdout=output, stderr=complaints)

    def told(self) -> dict[str, Any]:
        """All that it has said, the latest of each."""
        said: dict[str, Any] = {}
        for line in self._log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                said |= json.loads(line)
        return said

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise ChainFailed(f"the attackers ended: {self._complaints.read_text()[-800:]}")
        return "ready" in self.told()

    def begin(self) -> None:
        self._go.touch()

    def is_over(self) -> bool:
        return self.process.poll() is not None or "done" in self.told()

    def end(self) -> None:
        """Politely at first: its p2pd would take seconds to notice that it is gone."""
        self._go.unlink(missing_ok=True)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Trial:
    """One run of the benchmark. Mutable state: what was measured so far."""

    def __init__(self, chain: Victims, arguments: argparse.Namespace, report: Report) -> None:
        self._chain = chain
        self._arguments = arguments
        self._report = report
        self._watch = Watch(chain)
        self._address = str(chain.events("addresses")[-1]["addresses"][0])
        self.newcomers: list[float] = []
        self.stretches = [Stretch(name) for name in ("before", "during", "after")]
        self.attack: Attack | None = None

    def measure(self) -> None:
        arguments, (before, during, after) = self._arguments, self.stretches
        self.newcomers.append(self._newcomer("before"))
        victims = [self._chain.events("addresses", stage)[-1]["addresses"][0] for stage in STAGES]
        self.attack = Attack(self._chain.directory, victims, arguments)
        try:
            self._watch.attackers = psutil.Process(self.attack.process.pid)
            while not self.attack.is_ready():  # fifty take minutes on a busy machine
                self._chain.require_alive()
                time.sleep(SAMPLE_SECONDS)
            self._train(before, arguments.undisturbed)
            self.attack.begin()
            self._train(during, arguments.seconds / 3)
            if not self.attack.is_over():
                self.newcomers.append(self._newcomer("during", during))
            self._train(during, arguments.seconds)
        finally:
            self.attack.end()
        self._watch.attackers = None
        self._train(after, arguments.undisturbed)

    def _train(self, stretch: Stretch, seconds: float) -> None:
        """For so long, while there is an attack no longer than that."""
        begin = self._sample(stretch)
        first = self._steps_until(begin.time)
        now = begin
        while now.time < begin.time + seconds:
            if stretch.name == "during" and self.attack is not None and self.attack.is_over():
                break
            time.sleep(SAMPLE_SECONDS)
            now = self._sample(stretch)
        if now is not begin:
            stretch.add(begin, now, self._steps_until(now.time) - first)
            said = self.attack.told() if self.attack is not None else {}
            self._report.tell_row(stretch.row() | {k: said[k] for k in TOLD if k in said})

    def _sample(self, stretch: Stretch) -> Moment:
        moment = self._watch.look()
        stretch.moments.append(moment)
        return moment

    def _steps_until(self, end: float) -> int:
        return sum(ended <= end for ended in self._chain.step_times())

    def _newcomer(self, name: str, stretch: Stretch | None = None) -> float:
        """Seconds from its start until it serves; it leaves then."""
        state, began = self._chain.directory / f"newcomer-{name}", time.monotonic()
        command = [
            sys.executable, "-m", "node.cli", "--join", self._address, "--stage", "1", "--state-dir", str(state),
            "--host", "127.0.0.1", "--no-relay", "--threads", "1", "--device", "cpu",
        ]  # fmt: skip
        with _running(command, self._chain.directory / f"newcomer-{name}.log") as process:
            while not _serves(state):
                if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise ChainFailed(f"the newcomer did not join {name} the attack")
                time.sleep(0.1)
                if stretch is not None and (
                    not stretch.moments or time.time() - stretch.moments[-1].time > 1
                ):
                    self._sample(stretch)
            took = time.monotonic() - began
        self._report.tell_row({"newcomer": name, "seconds": round(took, 2)})
        return took

    # --- what came of it

    def ratios(self) -> dict[str, float]:
        before, during, after = self.stretches
        undisturbed = Stretch("undisturbed")
        for each in (before, after):
            undisturbed.add(each.moments[0], each.moments[-1], each.steps)
        usual = undisturbed.speeds()
        found = {f"speed_by_{name}": speed / usual[name] for name, speed in during.speeds().items()}
        worked = during.nodes + during.p2pd - during.steps / usual["all"]
        found["cores_taken"] = worked / during.seconds
        for name, kinds in (("node", ["node"]), ("p2pd", ["p2pd"]), ("both", ["node", "p2pd"])):
            found[f"memory_{name}"] = max(self._growth([f"{k}{stage}" for k in kinds]) for stage in STAGES)
        found["lines_a_minute"] = most_in_a_minute([*during.moments, *after.moments])
        if len(self.newcomers) > 1:
            found["newcomer"] = self.newcomers[1] / self.newcomers[0]
        bans = self.bans()
        found["most_frames_until_ban"] = max(bans.values(), default=0)
        found["not_banned"] = len(STAGES) * self._arguments.identities - len(bans)
        return {name: round(value, 3) for name, value in found.items()}

    def _growth(self, names: list[str]) -> float:
        before, during, _ = self.stretches
        first, last = (
            [sum(moment.memory[name] for name in names) for moment in moments]
            for moments in (before.moments, during.moments[-10:])
        )
        return median(last) / median(first)

    def bans(self) -> dict[tuple[int, str], int]:
        """Frames that a node began to read of a peer until it banned it, the most where that was repeated."""
        found: dict[tuple[int, str], int] = {}
        for stage in STAGES:
            file = self._chain.directory / f"stage{stage}" / BANS_FILE
            rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
            for row in rows:
                if row["banned"]:
                    who = stage, row["peer"]
                    found[who] = max(found.get(who, 0), row["frames"])
        return found


def _serves(state: Path) -> bool:
    events = state / "events.jsonl"
    return events.exists() and '"serving"' in events.read_text()


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--identities", type=int, default=50, help="70 MB of memory each")
    parser.add_argument("--seconds", type=float, default=600.0, help="that the attack may take")
    parser.add_argument("--even", action="store_true", help="spread the frames over the seconds")
    parser.add_argument("--undisturbed", type=float, default=60.0, help="seconds before it, and after it")
    arguments = arguments_of(parser, frames=1_000_000, identities=3, seconds=6.0, undisturbed=3.0)
    report = Report("malformed", arguments.json)
    with Victims(endless_tiny(), PLACES) as chain:
        chain.wait_for_steps(WARM_UP_STEPS)
        trial = Trial(chain, arguments, report)
        trial.measure()
        assert trial.attack is not None
        said = trial.attack.told()
        frames = sorted(trial.bans().values())
        results: list[dict[str, Any]] = [stretch.row() for stretch in trial.stretches]
        told = {name: said.get(name, 0) for name in TOLD} | {"frames_until_ban": frames}
        results.append(told | {"newcomers": [round(seconds, 2) for seconds in trial.newcomers]})
        ratios = trial.ratios()
    for row in results:
        report.tell_row(row)
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main, ChainFailed)
