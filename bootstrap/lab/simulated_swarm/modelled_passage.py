"""A microbatch at a simulated peer: drives the daemon's `Passage` to the next stage, as `StageClient` does."""

from __future__ import annotations

from typing import Protocol

from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE, Host
from bootstrap.lab.simulated_swarm.swarm_space import SwarmSpace
from node.membership.view import View
from node.pipeline.next_stage import NextStage
from node.pipeline.passage import (
    Answer,
    AskBacklog,
    Blame,
    Due,
    Ended,
    Event,
    LetFinish,
    Passage,
    Report,
    Send,
    SetTimer,
    Take,
    Told,
)
from protocol.errors import DeadlineExceeded, Refused
from protocol.ground import PeerId
from protocol.rpc.answering import PROGRESS_SECONDS

BUSY, SILENT = Refused("busy"), DeadlineExceeded()


class ForwardingPeer(Host, Protocol):
    """A peer that takes microbatches and sends them on."""

    peer: PeerId
    view: View

    @property
    def world(self) -> SwarmSpace[ForwardingPeer]: ...

    def pipeline_at(self, stage: int) -> Station: ...


class Station(Protocol):
    """A peer's pipeline, as the microbatches see it that are there or on their way there."""

    stage: int
    following: NextStage
    expected: dict[Passing, None]  # sent here and not answered, ordered
    late: dict[Passing, None]  # at the next stage, of which another answer was taken; ordered

    @property
    def peer(self) -> ForwardingPeer: ...

    def name(self, place: str) -> str: ...
    def backlog(self) -> float | None: ...
    def arrive(self, passing: Passing) -> None: ...
    def take_gradient(self, passing: Passing) -> None: ...
    def let_finish(self, child: Passing) -> None: ...
    def cancel(self, passing: Passing) -> None: ...


class Passing:
    """One microbatch at one peer, and whom it came from.

    Mutable state: how far it is, and who has it at the next stage.
    """

    __slots__ = (
        "_asks_since", "_passage", "_timers", "asked", "at", "began", "is_over",
        "onward", "parent", "place", "ready", "silence",
    )  # fmt: skip

    def __init__(
        self, at: Station, place: str, parent: Passing | None, asked: float, silence: float = 0.0
    ) -> None:
        """The `parent` has `asked` for it, and gives it up after `silence` without a sign of life."""
        self.at = at
        self.place = place
        self.parent = parent
        self.asked = self.began = self.ready = asked
        self.silence = silence
        self.is_over = False
        self.onward: dict[PeerId, Passing] = {}  # at the next stage
        self._passage: Passage | None = None  # to the next stage, once its forward pass is done
        self._timers = 0  # set so far; the last one counts
        self._asks_since = asked

    def go_onward(self) -> None:
        """Pass it on, as its forward pass is done."""
        self.ready = self.at.peer.world.now
        self._passage = Passage(self.at.following, self.ready)
        self._due(self._timers)

    def _due(self, timer: int) -> None:
        if timer == self._timers and not self.is_over:
            peer = self.at.peer
            self._handle(Due(peer.view.serving(self.at.stage + 1, peer.world.now)))

    def _handle(self, event: Event) -> None:
        world, view = self.at.peer.world, self.at.peer.view
        assert self._passage is not None
        for action in self._passage.handle(event, world.now):
            match action:
                case AskBacklog(peer, deadline):
                    self._ask(world.peers[peer], deadline)
                case Send(peer, silence):
                    self._send(world.peers[peer], silence)
                case SetTimer(seconds):
                    self._timers += 1
                    world.queue.after(seconds, self._due, self._timers)
                case Take(peer):
                    self._timers += 1
                    view.trust(peer)
                    self.at.take_gradient(self)
                case LetFinish(peer):
                    self.at.let_finish(self.onward[peer])
                case Report(peer, _, asked):
                    view.suspect(peer, asked=asked)
                    world.measures.resent(world.now, self.at.peer.peer, peer)
                case Blame(peer):
                    view.suspect(peer)

    # --- what others are asked ----------------------------------------------------------------

    def _ask(self, other: ForwardingPeer, deadline: float) -> None:
        peer = self.at.peer
        asked = self._asks_since = peer.world.now
        peer.world.network.send(peer, other, "questions", MESSAGE, self._reached, other, asked)
        peer.world.queue.after(deadline, self._told, asked, Told(other.peer, SILENT))

    def _reached(self, other: ForwardingPeer, asked: float) -> None:
        backlog = other.pipeline_at(self.at.stage + 1).backlog()
        told = Told(other.peer, BUSY if backlog is None else backlog)
        other.world.network.send(other, self.at.peer, "questions", MESSAGE, self._told, asked, told)

    def _told(self, asked: float, event: Event) -> None:
        if asked == self._asks_since and not self.is_over:
            self._handle(event)

    def _send(self, other: ForwardingPeer, silence: float) -> None:
        peer, stage = self.at.peer, self.at.stage + 1
        world, target = peer.world, other.pipeline_at(stage)
        world.measures.offered(stage, other.peer, world.serving[stage])
        child = Passing(target, self.at.name(self.place), self, world.now, silence)
        self.onward[other.peer] = child
        if other.is_alive and world.network.reaches(peer, other):
            target.expected[child] = None
        else:
            world.queue.after(silence, self.fail, child)
        size = world.scenario.run.activation_bytes
        world.network.send(peer, other, "activations", size, target.arrive, child)

    # --- what becomes of it -------------------------------------------------------------------

    def _lose(self, child: Passing) -> bool:
        """Wait for the child no longer; return whether it was waited for."""
        if self.onward.get(child.at.peer.peer) is not child or not self.at.peer.is_alive:
            return False
        del self.onward[child.at.peer.peer]
        self.at.late.pop(child, None)
        return True

    def answer(self, child: Passing, said: float) -> None:
        """Take the gradient that came, and what the other says of its load."""
        if self._lose(child):
            world = self.at.peer.world
            silence = min(world.now - child.asked, PROGRESS_SECONDS + world.network.round_trip)
            self._handle(Ended(child.at.peer.peer, Answer(said, silence)))

    def refuse(self, child: Passing) -> None:
        if self._lose(child):
            self._handle(Ended(child.at.peer.peer, BUSY))

    def fail(self, child: Passing) -> None:
        """Give up the child's peer, which showed no sign of life within the deadline."""
        if self._lose(child):
            child.at.cancel(child)  # whether it is cut off or dead: its end of the stream broke, too
            self._handle(Ended(child.at.peer.peer, SILENT))

    def withdraw(self, child: Passing) -> None:
        """Let the child's peer know that nobody waits for it."""
        if self._lose(child):
            self._handle(Ended(child.at.peer.peer, None))
            network = self.at.peer.world.network
            network.send(self.at.peer, child.at.peer, "refusals", MESSAGE, child.at.cancel, child)

    def drop(self) -> None:
        """Give it up here, and what the next stage does for it; those who are late with it may finish."""
        self.is_over = True
        if self._passage is not None and not self._passage.is_over:
            for child in list(self.onward.values()):
                self.withdraw(child)
