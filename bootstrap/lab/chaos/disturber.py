"""Faults, their times and victims drawn from a seed so that a run can be repeated; doing and undoing them."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import psutil

from bootstrap.lab.chaos import faults
from bootstrap.local.nodes import LocalNode
from bootstrap.local.swarm import LocalSwarm
from node.watch.health import SOCKET_FILE
from protocol.files.folders import folders_of_others
from protocol.supervision import Supervisor

PERIOD_SECONDS = 15.0  # between the beginnings of two faults

Kind = Literal["kill", "freeze", "p2pd", "cut", "disk", "clock", "nan"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SECONDS: dict[Kind, tuple[float, float]] = {  # how long each lasts, from and to
    "kill": (1.0, 4.0),  # until the node is started again
    "freeze": (10.0, 20.0),
    "p2pd": (0.0, 0.0),
    "cut": (5.0, 10.0),
    "disk": (20.0, 20.0),
    "clock": (30.0, 30.0),
    "nan": (20.0, 20.0),
}
CLOCK_HOURS = 2.0  # forward or back
WORDS = 16 * 1024  # bytes that a node may say while its disk is full
WATCH_SECONDS = 1.0
AFTERMATH_SECONDS = 5.0  # after a fault, until it is noted what the swarm showed of it

WHAT = {
    "kill": "is killed by kill -9 and started again {seconds:.0f} s later",
    "freeze": "is frozen for {seconds:.0f} s",
    "p2pd": "has its p2pd killed",
    "cut": "is cut off: its p2pd is frozen for {seconds:.0f} s",
    "disk": "has a full disk for {seconds:.0f} s",
    "clock": "has a clock that is {hours:+.0f} h off for {seconds:.0f} s",
    "nan": "computes losses that are NaN for {seconds:.0f} s",
}


@dataclass(frozen=True)
class Fault:
    """A fault; `hours` is how far a clock jumps."""

    kind: Kind
    node: str
    seconds: float
    hours: float = 0.0


@dataclass
class SeenFault:
    """A fault that began `seconds` after all were training and `lasted` seconds, and what was seen of it."""

    seconds: float
    kind: str
    node: str
    lasted: float
    answering: int = 0  # nodes, a moment after it
    warning: str = ""  # the last one in the node's log


class Schedule:
    """Draws the faults of a chaos run.

    Mutable state: the random generator, and the kinds still to come before any is repeated.

    A kind comes again only after all others, so that seven periods show each.
    """

    def __init__(self, seed: int, stages: Mapping[str, int]) -> None:
        """`stages` maps each node's name to its stage."""
        self._rng = random.Random(seed)
        self._stages = stages
        self._last_stage = max(stages.values())
        self._bag: list[Kind] = []

    def draw(self, well: Collection[str]) -> Fault | None:
        """The next fault, for one of the nodes that are `well`; never for the only such replica of its stage.

        None when nobody may be disturbed. Only replicas of the last stage compute a loss that can be NaN.
        """
        self._bag = self._bag or self._rng.sample(KINDS, len(KINDS))
        kind = self._bag.pop()
        candidates = [
            node
            for node in sorted(well)
            if sum(self._stages[other] == self._stages[node] for other in well) > 1
            and (kind != "nan" or self._stages[node] == self._last_stage)
        ]
        if not candidates:
            return None
        seconds = round(self._rng.uniform(*SECONDS[kind]), 1)
        hours = self._rng.choice((-CLOCK_HOURS, CLOCK_HOURS)) if kind == "clock" else 0.0
        return Fault(kind, self._rng.choice(candidates), seconds, hours)


@dataclass
class Disturber:
    """Does the faults of a schedule to the nodes of a local swarm, and undoes them.

    Mutable state: who is being disturbed, what was done, who ended by itself; processes and places seen.
    """

    swarm: LocalSwarm
    schedule: Schedule
    say: Callable[[str], None]
    done: list[SeenFault] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)  # by themselves, with their last words
    processes: set[psutil.Process] = field(default_factory=set)
    places: set[Path] = field(default_factory=set)  # outside their state directories
    _disturbed: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Disturb nodes until this is cancelled, and undo every fault then."""
        began = last = time.monotonic()
        supervisor = Supervisor()
        try:
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                self._watch()
                if time.monotonic() - last >= PERIOD_SECONDS:
                    last = time.monotonic()
                    if (fault := self.schedule.draw(self._well())) is not None:
                        supervisor.spawn(self._disturb(fault, last - began), f"the fault {fault.kind}")
        finally:
            await supervisor.close()

    def _well(self) -> list[str]:
        """The nodes that run and answer, and that nobody disturbs."""
        answering = {self.swarm.names.get(s.member.peer) for s in self.swarm.sightings if s.stats is not None}
        running = {node.name for node in self.swarm.nodes.all if node.is_running}
        return sorted(running & answering - self._disturbed)

    def _watch(self) -> None:
        for node in self.swarm.nodes.all:
            if node.is_running:
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(node.pid)
                    self.processes |= {process, *process.children(recursive=True)}
                self.places |= _places_of(node)
            elif node.name not in self.swarm.away and node.name not in self.ended:
                self.ended[node.name] = f"exit code {node.process.exitcode}\n{node.last_words()}"
                self.say(f"Node {node.name} ended by itself: {self.ended[node.name]}")

    async def _disturb(self, fault: Fault, at: float) -> None:
        node = next(node for node in self.swarm.nodes.all if node.name == fault.node)
        done = SeenFault(round(at, 1), fault.kind, fault.node, fault.seconds)
        self.done.append(done)
        self.say(f"{node.name} {WHAT[fault.kind].format(seconds=fault.seconds, hours=fault.hours)}.")
        said = node.log.stat().st_size
        self._disturbed.add(node.name)
        try:
            await getattr(self, f"_{fault.kind}")(node, fault)
            await asyncio.sleep(AFTERMATH_SECONDS)
        finally:
            self._disturbed.discard(node.name)
            done.answering = sum(s.stats is not None for s in self.swarm.sightings)
            done.warning = _last_warning(node, said)

    async def _kill(self, node: LocalNode, fault: Fault) -> None:
        with self._away(node):
            node.signal(signal.SIGKILL)
            await asyncio.sleep(fault.seconds)
            await self.swarm.nodes.start_again(node)

    async def _freeze(self, node: LocalNode, fault: Fault) -> None:
        await self._frozen(node, fault.seconds, node.signal)

    async def _p2pd(self, node: LocalNode, fault: Fault) -> None:
        _signal_p2pd(node, signal.SIGKILL)

    async def _cut(self, node: LocalNode, fault: Fault) -> None:
        """Cut all its links: without privileges nothing cuts one of them on loopback. Others see silence, no end."""
        await self._frozen(node, fault.seconds, partial(_signal_p2pd, node))

    async def _frozen(self, node: LocalNode, seconds: float, send: Callable[[signal.Signals], None]) -> None:
        with self._away(node):
            try:
                send(signal.SIGSTOP)
                await asyncio.sleep(seconds)
            finally:
                send(signal.SIGCONT)

    @contextmanager
    def _away(self, node: LocalNode) -> Iterator[None]:
        """Let nobody expect the node to answer while the block runs."""
        self.swarm.away.add(node.name)
        try:
            yield
        finally:
            self.swarm.away.discard(node.name)

    async def _disk(self, node: LocalNode, fault: Fault) -> None:
        """Let no file grow beyond a few kilobytes; writing fails with EFBIG instead of ENOSPC.

        The node's output goes to a file here, which may still grow a little: a terminal has no disk that is full.
        """
        most = node.log.stat().st_size + WORDS
        hard = resource.prlimit(node.pid, resource.RLIMIT_FSIZE)[1]
        try:
            resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (most, hard))
            await asyncio.sleep(fault.seconds)
        finally:
            if node.is_running:
                resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (hard, hard))

    async def _clock(self, node: LocalNode, fault: Fault) -> None:
        """Ask the node's own process for the fault, as for losses that are NaN."""
        faults.ask(node.directory, fault.hours, fault.kind == "nan")
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            faults.ask(node.directory)

    _nan = _clock


def _signal_p2pd(node: LocalNode, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(node.pid).children(recursive=True):
            if "p2pd" in child.name():
                child.send_signal(number)


def _places_of(node: LocalNode) -> set[Path]:
    """The temporary directories of p2pd's sockets and of the health check's."""
    places = {path for folder in folders_of_others() for path in folder.glob(f"noloco-{node.pid}-*")}
    with suppress(OSError):
        places.add(Path(os.fsdecode((node.directory / SOCKET_FILE).read_bytes())).parent)
    return places


def _last_warning(node: LocalNode, since: int) -> str:
    """The last warning that the node logged after the first `since` bytes; empty if there is none."""
    with node.log.open("rb") as log:
        log.seek(since)
        lines = log.read().decode(errors="replace").splitlines()
    warnings = [line.split(" ! ", 1)[1] for line in lines if " ! " in line]
    return warnings[-1] if warnings else ""
