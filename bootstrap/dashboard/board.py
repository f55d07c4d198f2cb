"""The board, all that is known of a run: members, curves, happenings, its past. Pure; one writer, many readers.

Everything is bounded, however many members claim to be there and however long the run takes.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, TypedDict

from bootstrap.dashboard.rows import Row, row_of
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.status import progress_of
from bootstrap.inspect.verdict import SPREAD_BAND
from bootstrap.local.summary import TokenCount
from node.watch.history import Thinned
from protocol.ground import PeerId
from protocol.run.manifest import Manifest

MOST_MEMBERS = 2_000
MOST_POINTS = 2_000
MOST_PICTURES = 300
PICTURE_BYTES = 48 * 2**20  # of all pictures kept, compressed
MOST_HAPPENINGS = 300
MOST_GONE = 4_096
MOST_SAMPLES = 20


class Remark(NamedTuple):
    """One sentence of the verdict, as it is on the wire."""

    level: str  # of `LEVELS`
    text: str
    since: float  # wall clock at which this board first saw it; while it stands, its numbers may change


LEVELS = {Severity.FINE: "fine", Severity.WARNING: "warning", Severity.ALARM: "alarm"}


class Happening(NamedTuple):
    time: float
    kind: str  # joined, silent, back, moved, left
    peer: str
    stage: int
    name: str  # the member's, of which the page may have no row any more


class Sample(NamedTuple):
    """A text that the weights of some moment wrote, with the prompt that it begins with."""

    time: float
    step: int
    round: int  # of the weights
    loss: float | None
    text: str


class Giver(NamedTuple):
    """The contributions of one peer that others have signed for."""

    name: str
    peer: str
    tokens: int
    share: float  # of all that is signed for
    rounds: int
    signers: int


class Measured(TypedDict):
    """Losses in nats per token on a text that all measurements share, with the bigram entropy of that text."""

    held_out: bool  # the text; else it is trained on
    points: list[tuple[float, int, float]]  # wall clock, tokens trained on by then, loss
    bigram: float | None


class Point(NamedTuple):
    """The run at one moment, as a line of an array on the wire. None: nobody tells."""

    time: float
    tokens: int
    loss: float | None
    rate: float
    spread: float | None
    expected: float | None
    members: int


class RunFacts(TypedDict):
    """The facts that do not change, from the signed manifest; names are their founder's text."""

    name: str
    id: str
    private: bool
    stages: int
    steps: int  # 0: not known, as are the next two
    tokens_per_step: int  # of one replica of the first stage
    inner_steps: int
    band: tuple[float, float]  # of the spread, in times the predicted one


def facts_of(manifest: Manifest, run_id: str) -> RunFacts:
    inner = manifest.inner
    return RunFacts(
        name=manifest.name,
        id=run_id,
        private=manifest.access.private,
        stages=manifest.stages,
        steps=inner.total_steps,
        tokens_per_step=inner.microbatches * manifest.tokens_per_microbatch,
        inner_steps=manifest.outer.inner_steps,
        band=SPREAD_BAND,
    )


class BoardUpdate(TypedDict):
    """The news that a reader has not seen yet. With `whole` it replaces everything."""

    version: int
    whole: bool
    time: float
    rows: list[Row]
    gone: list[str]
    remarks: list[Remark]
    now: Point
    left: float | None  # seconds of training; None where it stands still or is complete
    points: list[Point]
    happenings: list[Happening]
    samples: list[Sample]
    givers: list[Giver] | None  # all of them, where they have changed
    measured: Measured | None  # all of it, where it has changed
    pictures: tuple[int, float, float]  # how many are kept, and the times of the first and the last


@dataclass(frozen=True)
class _Seen:
    """A member's last row, and the version in which it changed."""

    row: Row
    sighting: Sighting
    version: int


Verdict = Callable[[Sequence[Sighting], float], Sequence[Finding]]


class Board:
    """All that is known of a run: members, curves, happenings and pictures of the past, each bounded.

    Mutable state: `version` grows with each change.
    """

    def __init__(self, run: RunFacts, verdict: Verdict) -> None:
        """`verdict` puts the sightings at a wall clock into words, the worst first."""
        self.run = run
        self.version = 0
        self._verdict = verdict
        self._seen: dict[PeerId, _Seen] = {}
        self._gone: deque[tuple[int, PeerId]] = deque(maxlen=MOST_GONE)
        self._count = TokenCount()
        self._has_heard = False  # an answer of any member: before, there is nothing to draw
        self._points = Thinned[tuple[int, Point]](MOST_POINTS, interval=1.0)
        self._recalled: list[Point] = []
        self._rewritten = 0  # the version in which those changed
        self._pictures = Thinned[bytes](MOST_PICTURES, interval=2.0)
        self._happenings: deque[tuple[int, Happening]] = deque(maxlen=MOST_HAPPENINGS)
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=MOST_SAMPLES)
        self._givers: tuple[int, list[Giver]] = (0, [])  # and the version in which they changed
        self._measured: tuple[int, Measured | None] = (0, None)  # and the version in which it changed
        self._findings: Sequence[Finding] = ()
        self._standing: dict[tuple[str, int | None], float] = {}  # when each finding, by kind and stage, came
        self._remarks: list[Remark] = []
        self._now = Point(0.0, 0, None, 0.0, None, None, 0)
        self._left: float | None = None

    # --- writing ------------------------------------------------------------------------------

    def see(
        self,
        sighting: Sighting,
        now: float,
        silent: float | None = None,
        to: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Note a member at wall clock `now`: record, last answer, since when it is `silent`, whom it sends `to`."""
        peer, known = sighting.member.peer, self._seen.get(sighting.member.peer)
        if known is None and len(self._seen) >= MOST_MEMBERS and not self._makes_room(sighting, now):
            return
        row = row_of(sighting, silent, to)
        if known is None:
            self._tell(max(0.0, min(now, sighting.member.announcement.since)), "joined", row)
        else:
            if row["stage"] != known.row["stage"]:
                self._tell(now, "moved", row)
            if (silent is None) != (known.row["silent"] is None):
                self._tell(now, "back" if silent is None else "silent", row)
        is_news = known is None or row != known.row
        self.version += is_news
        version = self.version if known is None or is_news else known.version
        self._seen[peer] = _Seen(row, sighting, version)

    def _makes_room(self, sighting: Sighting, now: float) -> bool:
        """Drop one that has never answered for one that answers, if possible: anybody can claim to be there."""
        if sighting.stats is None:
            return False
        mute = next((peer for peer, seen in self._seen.items() if seen.sighting.stats is None), None)
        if mute is not None:
            self._drop(mute, now)
        return mute is not None

    def _drop(self, peer: PeerId, now: float) -> None:
        self._tell(now, "left", self._seen.pop(peer).row)
        self._gone.append((self.version, peer))

    def keep_only(self, peers: Iterable[PeerId], now: float) -> None:
        """Drop all others: they have left, or their records have run out."""
        for peer in self._seen.keys() - set(peers):
            self._drop(peer, now)

    def conclude(self, now: float) -> None:
        """Draw the curves' next point, the verdict, and the picture that is kept, from what was seen until `now`."""
        sightings, rows = self.sightings(), self.rows()
        self._count.note(sightings)
        self._has_heard = self._has_heard or any(sighting.stats for sighting in sightings)
        self._findings = self._verdict(sightings, now)
        self._standing = {
            (f.kind, f.stage): self._standing.get((f.kind, f.stage), now) for f in self._findings
        }
        self._remarks = [
            Remark(LEVELS[f.severity], f.sentence, round(self._standing[f.kind, f.stage], 3))
            for f in self._findings
        ]
        self._now = point_of(rows, self._count.total, now)
        seen, run = Seen(self.run["stages"], sightings), self.run
        self._left = progress_of(seen, run["steps"], run["tokens_per_step"]).seconds_left
        self.version += 1
        if not self._has_heard:
            return
        self._points.add(now, (self.version, self._now))
        if self._pictures.is_due(now):
            picture = {
                "time": now,
                "rows": rows,
                "remarks": self._remarks,
                "now": self._now,
                "left": self._left,
            }
            packed = zlib.compress(json.dumps(picture, allow_nan=False).encode(), 1)
            if len(packed) * MOST_PICTURES <= PICTURE_BYTES:
                self._pictures.add(now, packed)

    def recall(self, points: Iterable[Point]) -> None:
        """Replace what was recalled by these curves from before this board began, in the order of their times."""
        own = self._points.all()
        self._recalled = [point for point in points if not own or point.time < own[0][0]][-MOST_POINTS:]
        self.version += 1
        self._rewritten = self.version

    def note_sample(self, sample: Sample) -> None:
        self.version += 1
        self._samples.append((self.version, sample))

    def note_givers(self, givers: list[Giver]) -> None:
        """Note all givers that are known, the largest first."""
        if givers != self._givers[1]:
            self.version += 1
            self._givers = self.version, givers

    def note_measured(self, measured: Measured) -> None:
        """Note all losses that were measured beside those of training."""
        if measured != self._measured[1]:
            self.version += 1
            self._measured = self.version, measured

    def _tell(self, now: float, kind: str, row: Row) -> None:
        self.version += 1
        happening = Happening(round(now, 3), kind, row["id"], row["stage"], row["name"])
        self._happenings.append((self.version, happening))

    # --- reading ------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The members' rows, by stage and peer id."""
        return sorted((seen.row for seen in self._seen.values()), key=lambda row: (row["stage"], row["id"]))

    def sightings(self) -> list[Sighting]:
        """The members' sightings, without numbers of those that are silent."""
        return [
            seen.sighting if seen.row["silent"] is None else Sighting(seen.sighting.member, None)
            for seen in self._seen.values()
        ]

    @property
    def now(self) -> Point:
        return self._now

    @property
    def findings(self) -> Sequence[Finding]:
        """The verdict on the moment, the worst first."""
        return self._findings

    @property
    def remarks(self) -> list[Remark]:
        return self._remarks

    def change_since(self, version: int) -> BoardUpdate:
        """The update for a reader that has seen everything up to `version`; 0 is nothing."""
        forgotten = max(self._rewritten, self._gone[0][0] if len(self._gone) == MOST_GONE else 0)
        whole = not 0 < version <= self.version or version < forgotten
        since = -1 if whole else version
        kept = self._pictures.all()
        return BoardUpdate(
            version=self.version,
            whole=whole,
            time=self._now.time,
            rows=[seen.row for seen in self._seen.values() if seen.version > since],
            gone=[peer for when, peer in self._gone if when > since and peer not in self._seen],
            remarks=self._remarks,
            now=self._now,
            left=self._left,
            points=[
                *(self._recalled if whole else ()),
                *(point for _, (when, point) in self._points.all() if when > since),
            ],
            happenings=[happening for when, happening in self._happenings if when > since],
            samples=[sample for when, sample in self._samples if when > since],
            givers=self._givers[1] if self._givers[0] > since else None,
            measured=self._measured[1] if self._measured[0] > since else None,
            pictures=(len(kept), kept[0][0] if kept else 0.0, kept[-1][0] if kept else 0.0),
        )

    def picture(self, time: float) -> bytes | None:
        """The run as it was at `time`, as JSON: time, rows, remarks, now and left; None when nothing is kept."""
        kept = self._pictures.at(time)
        return zlib.decompress(kept[1]) if kept else None


def point_of(rows: Sequence[Row], tokens: int, now: float) -> Point:
    """The run by medians over the members that tell, so that one liar moves nothing; a silent one tells nothing."""
    told = [row for row in rows if row["silent"] is None]
    losses, spreads, expected = (
        [value for row in told if (value := row[name]) is not None] for name in ("loss", "spread", "expected")
    )
    return Point(
        time=round(now, 3),
        tokens=tokens,
        loss=median(losses) if losses else None,
        rate=round(sum(row["rate"] for row in told if row["stage"] == 0 and row["state"] == "serving"), 3),
        spread=median(spreads) if spreads else None,
        expected=median(expected) if expected else None,
        members=len(told),
    )
