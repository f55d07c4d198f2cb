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
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused, TransportDown, WireError
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
class BacklogKnown:
    peer: PeerId
    seconds: float | None  # of work that it has; None if it takes no more


@dataclass(frozen=True, slots=True)
class BacklogUnknown:
    """The peer did not say how much it has to do."""

    peer: PeerId
    was_silent: bool = True  # for the whole deadline


@dataclass(frozen=True, slots=True)
class Answered:
    peer: PeerId
    said: float  # what the peer makes of its load, see `Router.note`
    silence: float  # seconds, the longest without a sign of life


@dataclass(frozen=True, slots=True)
class TurnedDown:
    """The peer refused the microbatch, or this node what the peer made of it."""

    peer: PeerId
    refusal: Refused


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer gave no answer, or broke the protocol."""

    peer: PeerId
    failure: PeerUnreachable | DeadlineExceeded | WireError


@dataclass(frozen=True, slots=True)
class NetworkDown:
    """This node's own network failed it."""

    peer: PeerId
    problem: TransportDown


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nobody waits for the peer's answer any more."""

    peer: PeerId


Event: TypeAlias = (
    Due | BacklogKnown | BacklogUnknown | Answered | TurnedDown | Failed | NetworkDown | Withdrawn
)

# --- actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskBacklog:
    """Ask the peer how much it has to do; `BacklogKnown` or `BacklogUnknown` follows."""

    peer: PeerId
    deadline: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send the microbatch; one of the events of a request follows. Signs of life may be `silence` seconds apart."""

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
    """Let a peer finish although another one's answer was taken. Its end is an event, too."""

    peer: PeerId
    asked: float
    took: float  # seconds that the other peer needed
    usual: float  # seconds after which the other peer was asked


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give the microbatch up: the passage is over."""

    error: Refused | TransportDown


@dataclass(frozen=True, slots=True)
class Report:
    """Record what the peer, asked at `asked`, did: no answer or a broken protocol, or an overruled refusal."""

    peer: PeerId
    did: PeerUnreachable | DeadlineExceeded | WireError | Refused
    asked: float


@dataclass(frozen=True, slots=True)
class Blame:
    """Record an offence of the peer: what another one did was not done here in the time that was left."""

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
        following = self._next
        match event:
            case Due(peers):
                return self._due(peers, now)
            case BacklogKnown(peer, seconds) if peer in self._awaited:
                following.choices.times.answered(peer, now - self._questioned_at)
                return self._told(peer, seconds, now)
            case BacklogUnknown(peer, was_silent) if peer in self._awaited:
                if was_silent:
                    following.choices.times.missed(peer)
                return self._told(peer, None, now)
            case BacklogKnown() | BacklogUnknown():  # too late
                return []
            case Answered(peer, said, silence):
                asked = self._asked.pop(peer)
                following.answered(peer, asked, now, said, silence)
                return [] if self.is_over else self._answered(peer, now - asked)
            case TurnedDown(peer, refusal):
                asked = self._return(peer)
                return [] if self.is_over else self._turned_down(peer, refusal, asked)
            case Failed(peer, failure):
                return self._failed(peer, failure, self._return(peer), now)
            case NetworkDown(peer, problem):
                self._return(peer)
                if self.is_over:
                    return []
                return self._give_up(problem) if following.is_leaving else self._ask_another(PAUSE_SECONDS)
            case Withdrawn(peer):
                self._return(peer)
                return []
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

    def _told(self, peer: PeerId, seconds: float | None, now: float) -> list[Action]:
        self._awaited.remove(peer)
        if seconds is not None:
            self._backlogs[peer] = seconds
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

    def _return(self, peer: PeerId) -> float:
        """Note that nothing came of a request; return when the peer was asked."""
        asked = self._asked.pop(peer)
        self._next.unanswered(peer, asked)
        return asked

    def _answered(self, peer: PeerId, took: float) -> list[Action]:
        self.is_over = True
        usual = self._next.times.second_after()
        late = [LetFinish(other, asked, took, usual) for other, asked in self._asked.items()]
        return [Take(peer), *late, *(Report(other, *what) for other, what in self._refusals.items())]

    def _turned_down(self, peer: PeerId, refusal: Refused, asked: float) -> list[Action]:
        self._tried.add(peer)
        if refusal.code in CONTENT:
            self._refusals[peer] = refusal, asked
            if len(self._refusals) >= ENOUGH_REFUSALS:
                return self._give_up(refusal)
        return self._ask_another()

    def _failed(
        self, peer: PeerId, failure: PeerUnreachable | DeadlineExceeded | WireError, asked: float, now: float
    ) -> list[Action]:
        if self.is_over:  # one that is gone holds nothing
            return [] if isinstance(failure, PeerUnreachable) else [Blame(peer)]
        self._next.failed(peer, was_silent=isinstance(failure, DeadlineExceeded))
        self._tried.add(peer)
        self._waits_since = now
        return [Report(peer, failure, asked), *self._ask_another()]

    def _ask_another(self, pause: float = 0.0) -> list[Action]:
        """Have another peer asked, unless one is about to be."""
        return [] if self._awaited else [SetTimer(pause)]

    def _give_up(self, error: Refused | TransportDown) -> list[Action]:
        self.is_over = True
        return [GiveUp(error)]
