"""One `Passage` by hand: what it hears, what it wants done."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from node.pipeline.next_stage import NextStage
from node.pipeline.passage import (
    MOST_ASKED,
    Action,
    Answer,
    AskBacklog,
    Blame,
    Due,
    Ended,
    Event,
    Passage,
    Phase,
    Send,
    SetTimer,
    Told,
)
from node.pipeline.routing import Router
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused, TransportDown, WireError
from protocol.ground import PeerId

A, B, C, D = PEERS = [PeerId(name) for name in "abcd"]
LIMIT = 30.0
BUSY = Refused("busy", "others wait here already")
ODD = Refused("odd-loss", "far above that of others")
GONE, SILENT, BROKEN = PeerUnreachable("the stream broke"), DeadlineExceeded("6 s"), WireError("nonsense")


class Way:
    """A machine with its clock and the peers that may be asked."""

    def __init__(self, *peers: PeerId, seed: int = 0, home: PeerId | None = None) -> None:
        self.now, self.peers = 100.0, peers
        self.following = NextStage(Router(random.Random(seed)), LIMIT, 1)
        self.machine = Passage(self.following, self.now, home)

    def another(self) -> Way:
        """Another microbatch of the same node."""
        way = Way(*self.peers)
        way.now, way.following = self.now, self.following
        way.machine = Passage(self.following, self.now)
        return way

    def hears(self, event: Event) -> list[Action]:
        return self.machine.handle(event, self.now)

    def is_due(self, *peers: PeerId) -> list[Action]:
        return self.hears(Due(peers or self.peers))

    def is_sent(self, *peers: PeerId) -> list[Action]:
        """What it wants done when it is due and nobody says how much there is to do."""
        actions = self.is_due(*peers)
        for question in [action for action in actions if isinstance(action, AskBacklog)]:
            actions = self.hears(Told(question.peer, BUSY))
        return actions

    def sends(self, *peers: PeerId) -> PeerId:
        return sent_in(self.is_sent(*peers))

    def is_answered(self, peer: PeerId, after: float = 1.0) -> list[Action]:
        self.now += after
        return self.hears(Ended(peer, Answer(after, after)))

    def knows_answers(self, seconds: float = 1.0, count: int = 8) -> None:
        """Let earlier microbatches have been answered, each after so many seconds."""
        for number in range(count):
            peer = PEERS[number % len(PEERS)]
            self.following.sent(peer, self.now)
            self.following.answered(peer, self.now, self.now + seconds, seconds, seconds)


def sent_in(actions: Sequence[Action]) -> PeerId:
    [send] = [action for action in actions if isinstance(action, Send)]
    return send.peer


def way_of(seed: int) -> Way:
    """Every second one's node has had answers before."""
    way = Way(*PEERS, seed=seed)
    if seed % 2:
        way.knows_answers()
    return way


def life(seed: int) -> Iterator[tuple[Way, Event, float, list[Action]]]:
    """What one microbatch hears among peers that do anything, when, and what it wants done, until all have ended."""
    dice, way = random.Random(seed), way_of(seed)
    under_way: list[PeerId] = []
    questions: list[PeerId] = []
    is_set = True
    while under_way or way.machine.phase is not Phase.OVER:
        way.now += dice.uniform(0.0, 3.0)
        is_over = way.machine.phase is Phase.OVER
        if questions and not is_over and (not under_way or dice.random() < 0.5):
            peer = questions.pop()
            events: list[Event] = [
                Told(peer, dice.random()),
                Told(peer, dice.choice([BUSY, GONE, SILENT])),
            ]
        elif under_way and (is_over or questions or not is_set or dice.random() < 0.5):
            peer = under_way.pop(dice.randrange(len(under_way)))
            refusals: list[Event] = [Ended(peer, BUSY), Ended(peer, ODD)]
            failures: list[Event] = [Ended(peer, GONE), Ended(peer, SILENT), Ended(peer, BROKEN)]
            events = [Ended(peer, Answer(1.0, 1.0)), Ended(peer, TransportDown("")), *refusals, *failures]
        else:
            assert is_set, "it waits for nothing"
            events, is_set = [Due(dice.sample(PEERS, dice.randrange(len(PEERS) + 1)))], False
        event = dice.choice(events)
        actions = way.hears(event)
        yield way, event, way.now, actions
        assert not is_over or all(isinstance(action, Blame) for action in actions)
        for action in actions:
            match action:
                case AskBacklog(peer):
                    questions.append(peer)
                case Send(peer):
                    assert peer not in under_way
                    under_way.append(peer)
                    assert len(under_way) <= MOST_ASKED
                case SetTimer():
                    is_set = True
