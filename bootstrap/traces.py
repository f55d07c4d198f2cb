"""Traces of nodes: several as one file, and in numbers where each node's time went.

Nodes of one machine share a clock, so that their rows line up. Each instant in which a compute thread does nothing
is counted once, under the first of `Idle` that fits.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypedDict

import numpy as np
from rich.table import Table

from node.watch.spans import NOTHING, Spans, common, length, merged
from node.watch.time_use import Idle, idle_shares
from node.watch.trace import Track
from protocol.errors import StateError
from protocol.files.keeping import FOR_OTHERS, replacing

LEAST_SHOWN = 0.0005  # of the time: shorter jobs have no line of their own
FILE_NAME = "trace.json"  # of a node, in its state directory


class TraceEvent(TypedDict, total=False):
    """The part of an event that is read; times in microseconds."""

    ph: str  # phase: M names a process, X is a span, b and e are the halves of an asynchronous one
    pid: int
    name: str
    cat: str  # a `Track`
    ts: float
    dur: float
    id: str
    args: dict[str, str]


@dataclass(frozen=True)
class NodeTime:
    """Fractions of the time from the node's first work to its last, which together are one."""

    name: str
    seconds: float
    jobs: dict[str, float]  # by what the compute thread did, the longest first
    idle: dict[Idle, float]

    @property
    def computing(self) -> float:
        return sum(self.jobs.values())


@dataclass
class _Process:
    """The contents of one process's events. Mutable while they are read."""

    name: str = ""
    jobs: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    spans: dict[Track, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    begun: dict[str, float] = field(default_factory=dict)  # halves of asynchronous events, by id

    def note(self, event: TraceEvent) -> None:
        phase, track = event["ph"], event.get("cat")
        if phase == "M" and event["name"] == "process_name":
            self.name = str(event["args"]["name"])
        elif phase == "X":
            began = event["ts"] / 1e6
            span = (began, began + event["dur"] / 1e6)
            if track == Track.COMPUTE:
                self.jobs[event["name"]].append(span)
            self.spans[Track(str(track))].append(span)
        elif phase == "b" and track == Track.GRADIENT:
            self.begun[event["id"]] = event["ts"] / 1e6
        elif phase == "e" and event["id"] in self.begun:
            self.spans[Track.GRADIENT].append((self.begun.pop(event["id"]), event["ts"] / 1e6))


def time_of_nodes(files: Sequence[Path], skip: float = 0.0) -> list[NodeTime]:
    """The time of each process in the traces, which must be of one machine, without the first `skip` seconds.

    Raises `StateError` when a file cannot be read or holds no trace.
    """
    processes: dict[int, _Process] = defaultdict(_Process)
    for path in files:
        count = len(processes)
        try:
            for event in read_trace(path):
                processes[int(event["pid"])].note(event)
        except OSError as error:
            raise StateError(f"Cannot read the trace {path} ({error.strerror}). Check the path.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{path} cannot be read as a trace of noloco-node ({error!r}). Name another file."
            ) from None
        if len(processes) == count:
            raise StateError(f"There is no trace in {path}. Write one with noloco join --trace {path}.")
    work = {pid: merged(process.spans[Track.COMPUTE]) for pid, process in processes.items()}
    begins = [spans[0, 0] for spans in work.values() if len(spans)]
    if not begins:
        raise StateError("No node has computed anything in these traces. Trace a run for longer.")
    start = min(begins) + skip
    times = []
    for pid, process in processes.items():
        others = merged(np.vstack([NOTHING, *(spans for other, spans in work.items() if other != pid)]))
        if len(work[pid]) and work[pid][-1, 1] > start:
            times.append(_time_of(process, others, (max(start, work[pid][0, 0]), work[pid][-1, 1])))
    return times


def _time_of(process: _Process, others: Spans, within: tuple[float, float]) -> NodeTime:
    whole = np.array([within])
    seconds = within[1] - within[0]
    jobs = {name: length(common(merged(spans), whole)) / seconds for name, spans in process.jobs.items()}
    fractions = idle_shares(process.spans, whole, others)
    ordered = dict(sorted(jobs.items(), key=lambda job: -job[1]))
    return NodeTime(process.name, seconds, ordered, fractions)


def table_of(nodes: list[NodeTime]) -> Table:
    """A column for each node, a line for each job and each cause of standing still."""
    table = Table(
        caption="percent of each node's time; an idle instant counts under the first cause that fits"
    )
    table.add_column("")
    for node in nodes:
        table.add_column(f"{node.name}\n{node.seconds:.1f} s", justify="right")

    def line(name: str, shares: Iterable[float], style: str = "") -> None:
        table.add_row(name, *(f"{100 * share:.1f}" for share in shares), style=style)

    line("computing", (node.computing for node in nodes), "bold")
    for job in dict.fromkeys(job for node in nodes for job in node.jobs):
        shares = [node.jobs.get(job, 0.0) for node in nodes]
        if max(shares) >= LEAST_SHOWN:
            line(f"  {job}", shares)
    line("idle", (1.0 - node.computing for node in nodes), "bold")
    for cause in Idle:
        line(f"  {cause}", (node.idle[cause] for node in nodes))
    return table


# --- files ----------------------------------------------------------------------------------


def merge_traces(processes: Mapping[str, int], directory: Path, into: Path) -> None:
    """Copy the events of all nodes, one at a time, to one file.

    `processes` has the number of each node's process, by the node's name, which becomes the process's label. Raises
    `StateError` when the file cannot be written; the nodes' own files stay where they are.
    """
    try:
        with replacing(into, FOR_OTHERS) as target:
            separator = "[\n"
            for name, process in processes.items():
                label = {"ph": "M", "name": "process_labels", "pid": process}
                labelled = json.dumps(label | {"args": {"labels": name}})
                for event in chain([labelled], _events(directory / name / FILE_NAME)):
                    target.write(f"{separator}{event}".encode())
                    separator = ",\n"
            target.write(b"\n]\n")
    except OSError as error:
        raise StateError(
            f"Cannot write the trace {into} ({error.strerror}). The nodes' own are complete, and can be opened: "
            f"{directory}/*/{FILE_NAME}"
        ) from None


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """The events of a trace, whether its node ended by itself or was killed."""
    for line in _events(path):
        yield json.loads(line)


def _events(path: Path) -> Iterator[str]:
    """The whole events of a file, as text; nothing when there is no file."""
    if not path.exists():  # the node ended before it began to trace
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith(",\n"):
                yield line[:-2]
            elif _is_whole(line):  # the last one, which a kill may have cut
                yield line.rstrip()


def _is_whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
