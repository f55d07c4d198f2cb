"""The passage of one microbatch to the next stage: events in, actions out. Pure; the time is passed in.

It decides which peer is asked, when another one is asked beside it or after it, how long to wait where there is none,
when the microbatch is given up, and what follows for the peers that were asked. The daemon (`StageClient`) and the
simulator drive the same machine. Tensors, gradients' screens and the messages themselves stay with them.

One peer is asked, of two drawn at random the one with less to do. One that refuses or fails costs one resend to
another peer. When an answer takes far longer than usual, another peer is asked as well: the first answer counts, and
the others may finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, assert_never

from node.pipeline.gradient_screen import CONTENT
from node.pipeline.next_stage import NextStage
from protocol.errors import DeadlineExceeded, NolocoError, Refused, TransportDown, WireError
from protocol.ground import PeerId

RETRY_SECONDS = 0.05  # before asking again peers that were all busy, doubling up to the next line
MOST_RETRY_SECONDS = 0.8
PAUSE_SECONDS = 0.5  # between looks for a live peer of the next stage
MOST_ASKED = 3  # peers that have one microbatch at once
ENOUGH_REFUSALS = 2  # peers that refuse a microbatch for its content: it is the content

# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Due:
    """The microbatch is ready, or the time of the last `SetTimer` has come."""

    peers: Sequence[PeerId]  # of the next stage, that may be asked


@dataclass(frozen=True, slots=True)
class Told:
    """`AskBacklog` has its answer, or has failed."""

    peer: PeerId
    backlog: float | NolocoError  # in seconds of work; `Refused` if the peer takes no more


@dataclass(frozen=True, slots=True)
class Answer:
    """A gradient that this node took. `said` is what the peer makes of its load, see `Router.note`."""

    said: float
    silence: float  # seconds, the longest without a sign of life


@dataclass(frozen=True, slots=True)
class Ended:
    """`Send` has come to its end: an answer, a failure, or None as nobody waits for it any more."""

    peer: PeerId
    how: Answer | NolocoError | None


Event: TypeAlias = Due | Told | Ended

# --- actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskBacklog:
    """Ask the peer how much it has to do; `Told` follows."""

    peer: PeerId
    deadline: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send the microbatch; `Ended` follows. Signs of life of the peer may be `silence` seconds apart."""

    peer: PeerId
    silence: float


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `Due` in this many seconds, in place of an earlier timer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Take:
    """Take the peer's answer: the passage is over."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LetFinish:
    """Let a peer finish although another one's answer was taken; `Ended` follows all the same."""

    peer: PeerId
    asked: float
    took: float  # seconds that the other peer needed
    usual: float  # seconds after which the other peer was asked


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give the microbatch up: the passage is over."""

    error: NolocoError


@dataclass(frozen=True, slots=True)
class Report:
    """Record what the peer, asked at `asked`, did: no answer or a broken protocol, or an overruled refusal."""

    peer: PeerId
    did: NolocoError
    asked: float


@dataclass(frozen=True, slots=True)
class Blame:
    """Record an offence of the peer: it fell silent with what another one has answered, or answered nonsense."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ReportNobody:
    """Record that there is no live peer to ask."""


Action: TypeAlias = AskBacklog | Send | SetTimer | Take | LetFinish | GiveUp | Report | Blame | ReportNobody

# --- the machine ------------------------------------------------------------------------------------


class Phase(Enum):
    """Who has the microbatch."""

    WAITING = auto()  # nobody has it: the timer runs until a peer is asked
    CHOOSING = auto()  # two are asked how much they have to do, perhaps beside those that have it
    ASKING = auto()  # one has it, or several: the timer runs until another one is asked, while it is few
    OVER = auto()  # an answer was taken, or it was given up


class Passage:
    """Passes one microbatch on to the next stage."""

    def __init__(self, following: NextStage, now: float, home: PeerId | None = None) -> None:
        """`home` is asked first: in a ring, the peer that drew the microbatch."""
        self._next = following
        self._home = home
        # Mutable state besides: who was asked, who refused, and for how long none has taken it.
        self._waits_since = now
        self._pause = RETRY_SECONDS
        self._peers: Sequence[PeerId] = ()  # that may be asked
        self._candidates: list[PeerId] = []
        self._backlogs: dict[PeerId, float] = {}  # of these, as far as they are known
        self._awaited: set[PeerId] = set()  # whose backlogs are not known yet
        self._questioned_at = now
        self._asked: dict[PeerId, float] = {}  # under way, and since when
        self._tried: set[PeerId] = set()
        self._refusals: dict[PeerId, tuple[Refused, float]] = {}  # for the content, and when they were asked
        self.is_over = False

    def __repr__(self) -> str:
        names = ", ".join(peer[-8:] for peer in self._asked) or "nobody"
        return f"<Passage, {self.phase.name.lower()}, asks {names}, {len(self._tried)} tried>"

    @property
    def phase(self) -> Phase:
        if self.is_over:
            return Phase.OVER
        return Phase.CHOOSING if self._awaited else Phase.ASKING if self._asked else Phase.WAITING

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in at `now`, in seconds of the driver's clock; return what is to be done, in this order."""
        match event:
            case Due(peers):
                return self._due(peers, now)
            case Told(peer, backlog):
                return self._told(peer, backlog, now) if peer in self._awaited else []
            case Ended(peer, how):
                return self._ended(peer, how, now)
        assert_never(event)

    # --- asking -------------------------------------------------------------------------------

    def _due(self, peers: Sequence[PeerId], now: float) -> list[Action]:
        following, self._peers = self._next, peers
        out = self._tried | self._refusals.keys() | self._asked.keys()
        if self._asked and not following.times.is_known:  # all may still compile, or be as slow
            out |= set(following.choices.holders)
        if self._home is not None and self._home not in out:
            self._candidates = [self._home]
        else:
            self._candidates = following.candidates(peers, out, now - self._waits_since)
        if not self._candidates:
            return self._nobody()
        if len(self._candidates) == 1 or not following.choices.asks:
            return self._send({}, now)
        self._backlogs, self._awaited, self._questioned_at = {}, set(self._candidates), now
        deadline_of = following.choices.times.deadline_of
        return [AskBacklog(peer, deadline_of(peer)) for peer in self._candidates]

    def _told(self, peer: PeerId, backlog: float | NolocoError, now: float) -> list[Action]:
        times = self._next.choices.times
        if isinstance(backlog, float | Refused):
            times.answered(peer, now - self._questioned_at)
        elif isinstance(
            backlog, DeadlineExceeded
        ):  # else it may be gone, which shows when it is sent something
            times.missed(peer)
        if isinstance(backlog, float):
            self._backlogs[peer] = backlog
        self._awaited.remove(peer)
        return [] if self._awaited else self._send(self._backlogs, now)

    def _send(self, backlogs: Mapping[PeerId, float], now: float) -> list[Action]:
        following = self._next
        peer = following.choices.chosen(self._candidates, backlogs, now)
        has_others = bool(set(self._peers) - self._tried - {peer})
        self._asked[peer] = now
        following.sent(peer, now)
        send = Send(peer, following.silence(has_others))
        return [send] if len(self._asked) >= MOST_ASKED else [send, SetTimer(following.times.second_after())]

    def _nobody(self) -> list[Action]:
        """There is nobody to ask at present: wait a while, beside those that are asked if there are any."""
        actions: list[Action] = []
        if not self._asked:
            if self._refusals and self._refusals.keys() >= set(self._peers):
                return self._give_up(next(iter(self._refusals.values()))[0])
            if not self._peers:
                if self._next.is_leaving:
                    what = "this node is leaving and nobody can take its microbatches"
                    return self._give_up(TransportDown(what))
                actions.append(ReportNobody())
        pause = self._pause if self._peers or self._asked else PAUSE_SECONDS
        # doubled, since each try carries the whole activations
        self._pause = min(MOST_RETRY_SECONDS, 2 * self._pause)
        self._tried.clear()
        return [*actions, SetTimer(pause)]

    # --- what becomes of it -------------------------------------------------------------------

    def _ended(self, peer: PeerId, how: Answer | NolocoError | None, now: float) -> list[Action]:
        asked, following = self._asked.pop(peer), self._next
        if isinstance(how, Answer):
            following.answered(peer, asked, now, how.said, how.silence)
        else:
            following.unanswered(peer, asked)
        if self.is_over:  # one that has refused or is gone holds nothing
            return [Blame(peer)] if isinstance(how, DeadlineExceeded | WireError) else []
        match how:
            case None:
                return []
            case Answer():
                return self._answered(peer, now - asked)
            case Refused():
                return self._refused(peer, how, asked)
            case TransportDown():
                return self._give_up(how) if following.is_leaving else self._ask_another(PAUSE_SECONDS)
            case _:
                following.failed(peer, was_silent=isinstance(how, DeadlineExceeded))
                self._tried.add(peer)
                self._waits_since = now
                return [Report(peer, how, asked), *self._ask_another()]

    def _answered(self, peer: PeerId, took: float) -> list[Action]:
        self.is_over = True
        usual = self._next.times.second_after()
        late = [LetFinish(other, asked, took, usual) for other, asked in self._asked.items()]
        return [Take(peer), *late, *(Report(other, *what) for other, what in self._refusals.items())]

    def _refused(self, peer: PeerId, refusal: Refused, asked: float) -> list[Action]:
        self._tried.add(peer)
        if refusal.code in CONTENT:
            self._refusals[peer] = refusal, asked
            if len(self._refusals) >= ENOUGH_REFUSALS:
                return self._give_up(refusal)
        return self._ask_another()

    def _ask_another(self, pause: float = 0.0) -> list[Action]:
        """Have another peer asked, unless one is about to be."""
        return [] if self._awaited else [SetTimer(pause)]

    def _give_up(self, error: NolocoError) -> list[Action]:
        self.is_over = True
        return [GiveUp(error)]
