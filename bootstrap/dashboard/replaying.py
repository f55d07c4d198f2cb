"""A run that is over, from what its nodes wrote: the board as it would have been, at moments all along the run."""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootstrap.dashboard.board import MOST_POINTS, Board, RunFacts, facts_of
from bootstrap.dashboard.measured import measured_in
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.verdict import SPREAD_BAND
from bootstrap.local import SUMMARY
from node.machine.named import is_there, unreadable
from node.membership.view import Member
from node.storage.state_directory import StateDirectory
from node.watch.events import before
from node.watch.loss_history import LossHistory
from node.watch.words import LONGEST_NAME, word
from protocol.errors import ManifestError, StateError
from protocol.ground import PeerId
from protocol.messages.peers import NodeStats
from protocol.records.announcement import Announcement, State
from protocol.run.manifest import Manifest

EVENTS = "events.jsonl"
MOST_LINE = 64 * 1024  # bytes; a longer line is no event of a node
SILENT_SECONDS = 30.0  # without an event: the node was killed, or hung
RATE_STEPS = 20
STATES: Mapping[str, State] = {"serving": "serving", "finished": "finished", "left": "leaving"}
Event = dict[str, object]


def board_of(paths: Sequence[Path]) -> Board:
    """The board after all events of the files, and of the `EVENTS` in the directories, with all their curves.

    A node is called by its directory's name, as those of a local swarm are: no event has the one of `--name`.
    Raises `StateError` when there is nothing to show.
    """
    outlines = [outline for file in _files(paths) if (outline := _outline(file)) is not None]
    if not outlines:
        named = ", ".join(map(str, paths))
        raise StateError(f"No events in {named}. Name a node's {EVENTS}, or directories of nodes.")
    files = [outline.file for outline in outlines]
    manifest, run_id = _manifest(files)
    lives = {
        outline.file: Life(outline.peer, word(outline.file.absolute().parent.name, LONGEST_NAME), manifest)
        for outline in outlines
    }
    stages = manifest.stages if manifest else 1 + max(outline.stage for outline in outlines)
    facts = _facts(manifest, run_id, stages)
    board = Board(facts, Wording(stages, version="", total_steps=facts["steps"]))
    first, last = min(o.first for o in outlines), max(o.last for o in outlines)
    pause = max(1.0, (last - first) / MOST_POINTS)
    due = first + pause
    for time, file, event in heapq.merge(*(_timed(file) for file in files), key=lambda entry: entry[0]):
        while time >= due:
            _look(board, lives.values(), due)
            due = max(due + pause, time - SILENT_SECONDS)  # where nobody wrote for long, nothing is to draw
        if time > last:
            break
        lives[file].take(time, event)
    _look(board, lives.values(), last)
    for path in paths:
        if measured := measured_in(path / SUMMARY, run_id):
            board.note_measured(measured)
    return board


def _look(board: Board, lives: Iterable[Life], now: float) -> None:
    present = [life for life in lives if life.is_there]
    for life in present:
        board.see(life.sighting(now), now, life.silent(now))
    board.keep_only([life.peer for life in present], now)
    board.conclude(now)


class Life:
    """One node's life as its events tell it.

    Mutable state: what one node's events have told so far.
    """

    def __init__(self, peer: PeerId, name: str, manifest: Manifest | None) -> None:
        self.peer = peer
        self._name = name
        self.is_there = False
        self._tokens_per_step = (
            manifest.inner.microbatches * manifest.tokens_per_microbatch if manifest else 0
        )
        self._stage = self._step = self._round = self._pairs = self._gossip = 0
        self._state: State = "joining"
        self._loss: float | None = None
        self._losses = LossHistory()
        self._partner = ""
        self._spread: float | None = None
        self._expected: float | None = None
        self._marks: deque[tuple[float, float]] = deque(
            maxlen=RATE_STEPS
        )  # time, seconds computed until then
        self._began = self._heard = 0.0

    def take(self, time: float, event: Event) -> None:
        """Take in one event; what is malformed in it, or is told again, counts for nothing."""
        if event.get("standing") and self.is_there:
            return
        self._began = self._began if self.is_there else time
        self._heard, kind = time, event.get("event")
        self.is_there = kind != "left"
        self._state = STATES.get(str(kind), self._state)
        self._stage = _natural(event.get("target" if kind == "moved" else "stage"), self._stage)
        self._step = _natural(event.get("step"), self._step)
        self._round = _natural(event.get("round"), self._round)
        if kind == "step":
            self._take_step(time, event)
        elif kind == "round":
            self._partner = str(event.get("partner") or "")[:64]
            self._pairs += bool(self._partner)
            self._gossip += _natural(event.get("gossip_bytes"), 0)
            self._spread, self._expected = _number(event.get("spread")), _number(event.get("expected_spread"))

    def _take_step(self, time: float, event: Event) -> None:
        self._state = "serving"
        self._loss = _number(event.get("loss"))
        if self._loss is not None:
            self._losses.note(time, self._loss)
        computed = _number(event.get("computed")) or 0.0
        if self._marks and computed < self._marks[-1][1]:  # the node was started again
            self._marks.clear()
        self._marks.append((time, computed))

    def silent(self, now: float) -> float | None:
        """Say since when it has been silent; None while that is not long, or it has nothing more to say."""
        usual = (self._marks[-1][0] - self._marks[0][0]) / len(self._marks) if self._marks else 0.0
        is_long = now - self._heard > max(SILENT_SECONDS, 5 * usual)
        return self._heard if is_long and self._state == "serving" else None

    def sighting(self, now: float) -> Sighting:
        record = Announcement(stage=self._stage, state=self._state, since=self._began, name=self._name)
        seconds, steps = self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0, len(self._marks) - 1
        busy = (self._marks[-1][1] - self._marks[0][1]) / seconds if seconds else None
        stats = NodeStats(
            stage=self._stage,
            state=self._state,
            step=self._step,
            round=self._round,
            loss=self._loss,
            tokens=self._step * self._tokens_per_step,
            tokens_per_second=self._tokens_per_step * steps / seconds
            if seconds and self._state == "serving"
            else 0.0,
            pair_averagings=self._pairs,
            partner=self._partner if self._partner.isalnum() else "",
            spread=self._spread,
            expected_spread=self._expected,
            gossip_bytes=self._gossip,
            uptime=now - self._began,
            recent_compute_fraction=None if busy is None else min(1.0, max(0.0, busy)),
            trend=self._losses.trend(),
            best=self._losses.best(now, now),
            time=now,
        )
        return Sighting(Member(self.peer, record, math.inf), stats)


# --- files --------------------------------------------------------------------------------------


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob(EVENTS))
        elif path.is_file():
            yield path
        else:
            raise StateError(f"There is no {path}. Name a node's {EVENTS}, or directories of nodes.")


def _events(file: Path) -> Iterator[Event]:
    """Yield the events that can be read; half a line, left at the end by a node that was killed, is none."""
    for each in (before(file), file):
        if is_there(each):
            try:
                yield from _events_in(each)
            except OSError as error:
                raise unreadable(each, error) from None


def _events_in(file: Path) -> Iterator[Event]:
    with file.open("rb") as lines:
        while line := lines.readline(MOST_LINE):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and _number(event.get("time")) is not None:
                yield event


def _timed(file: Path) -> Iterator[tuple[float, Path, Event]]:
    """Yield the events with times that never go back, as a clock's do when it is set."""
    latest = -math.inf
    for event in _events(file):
        latest = max(latest, _number(event["time"]) or 0.0)
        yield latest, file, event


@dataclass(frozen=True)
class _Outline:
    """The outline of a file; `first` and `last` are when its node began, and when it trained last."""

    file: Path
    peer: PeerId
    stage: int  # the highest that it served
    first: float
    last: float


def _outline(file: Path) -> _Outline | None:
    """Outline a file; None without an event. A node whose id no event tells is named after its directory."""
    peer, stage, first, last = PeerId(file.parent.name[:64]), 0, math.nan, math.nan
    for time, _, event in _timed(file):
        first = time if math.isnan(first) else first
        if event.get("event") in ("step", "round", "finished") or math.isnan(last):
            last = time
        stage = max(stage, _natural(event.get("stage"), 0))
        addresses = event.get("addresses")
        if isinstance(addresses, list) and addresses:
            peer = PeerId(str(addresses[0]).rpartition("/p2p/")[2][:64])
    return None if math.isnan(first) else _Outline(file, peer, stage, first, last)


def _manifest(files: Sequence[Path]) -> tuple[Manifest | None, str]:
    """The run's manifest and id, kept beside the events; else (None, ""): nobody knows the tokens of a step then."""
    for file in files:
        try:
            signed = StateDirectory(file.parent).manifest()
        except (StateError, ManifestError):
            continue
        if signed is not None:
            return signed.manifest, signed.run_id
    return None, ""


def _facts(manifest: Manifest | None, run_id: str, stages: int) -> RunFacts:
    if manifest is not None:
        return facts_of(manifest, run_id)
    return RunFacts(
        name="a run",
        id="",
        private=False,
        stages=stages,
        steps=0,
        tokens_per_step=0,
        inner_steps=0,
        band=SPREAD_BAND,
    )


def _number(value: object) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_one and math.isfinite(value) and abs(value) < 1e15 else None  # type: ignore[arg-type]


def _natural(value: object, otherwise: int) -> int:
    number = _number(value)
    return int(number) if number is not None and number >= 0 else otherwise
