"""The way of a microbatch through a simulated peer and to the next stage, as node/pipeline/ has it.

What is admitted, how many are on their way and to whom each goes is decided by the daemon's `Admission`, `Window` and
`Passage`; computing and links take modelled time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Protocol

from bootstrap.lab.simulated_swarm.modelled_device import ModelledDevice
from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE
from bootstrap.lab.simulated_swarm.modelled_passage import ForwardingPeer, Passing
from node.membership.ledger import Shares
from node.pipeline import admission
from node.pipeline.gate import Window
from node.pipeline.late_answers import MOST_LATE
from node.pipeline.next_stage import NextStage
from node.pipeline.passage import RETRY_SECONDS
from node.pipeline.routing import Router
from protocol.ground import PeerId


class Worker(ForwardingPeer, Protocol):
    """A peer that a pipeline belongs to."""

    number: int
    device: ModelledDevice
    serves: bool
    stage: int

    @property
    def pipeline(self) -> ModelledPipeline | None: ...

    def gradient_in(self) -> None: ...
    def step_done(self) -> None: ...


class ModelledPipeline:
    """Takes microbatches through a simulated peer and to the next stage.

    Mutable state: what was admitted and sent, what is on its way here, and what router and deadline learned.
    """

    def __init__(self, peer: Worker, stage: int, rng: random.Random) -> None:
        world, run = peer.world, peer.world.scenario.run
        self.peer = peer
        self.stage = stage
        self.is_last = stage == run.stages - 1
        self._world = world
        batch = run.microbatches
        staleness = 0 if self.is_last else run.staleness
        self._in_flight = (1 + staleness) * batch
        self._admission = admission.Admission(batch, staleness, self._in_flight)
        self._draws_ahead = bool(staleness)
        self._window = Window(batch, self._in_flight)
        router = Router(rng, self._shares, peer.view.ledger.is_proven, self._goes_through_others)
        behind = run.stages - 1 - stage
        self.following = NextStage(router, run.microbatch_deadline, behind, peer.view.group_of)
        self._here: dict[str, Passing] = {}  # by place
        self.expected: dict[Passing, None] = {}  # sent here and not answered, ordered
        self.late: dict[Passing, None] = {}  # at the next stage, of which another answer was taken; ordered
        self._names = itertools.count()
        self._known: tuple[Sequence[PeerId], Shares] | None = None

    def _shares(self, peers: Sequence[PeerId]) -> Shares:
        """The peers' shares, kept for the same list: `View.serving` returns another list when something changed."""
        if self._known is None or self._known[0] is not peers:
            self._known = peers, self.peer.view.shares(peers)
        return self._known[1]

    def _goes_through_others(self, other: PeerId) -> bool:
        return self._world.network.goes_through_others(self.peer, self._world.peers[other])

    # --- the beginning of a step --------------------------------------------------------------

    def begin(self) -> None:
        if self.stage == 0:
            for _ in range(self._admission.batch * (1 + self._draws_ahead)):
                self._draw()

    def next_step(self) -> None:
        """Begin the next step: the weights have changed."""
        self._handle(admission.StepBegan())
        if self.stage == 0:
            for _ in range(self._admission.batch):
                self._draw()

    def _draw(self) -> None:
        self.arrive(Passing(self, f"{next(self._names)}", None, self._world.now))

    def hold(self) -> None:
        """Hold work as `Pipeline.hold` does: what waits goes elsewhere."""
        if self.stage == 0:
            return
        self._handle(admission.Held())

    # --- one microbatch -----------------------------------------------------------------------

    def arrive(self, passing: Passing) -> None:
        if passing.is_over:
            return
        if not self._serves():
            self._refuse(passing)
            return
        self._here[passing.place] = passing
        self._handle(admission.Asked(passing.place))

    def _serves(self) -> bool:
        return self.peer.serves and self.peer.stage == self.stage

    def _handle(self, event: admission.Event) -> None:
        """Hand the event to the admission and do what follows, as `Gate` does."""
        for action in self._admission.handle(event):
            match action:
                case admission.Forward(place):
                    self._run(self._here[place])
                case admission.Backward(place):
                    self.peer.device.backward(self._learned, self._here[place])
                case admission.Refuse(place, _):
                    self._refuse(self._here[place])
                case admission.TakeStep():
                    self.peer.step_done()

    def _run(self, passing: Passing) -> None:
        passing.began = self._world.now
        if self.is_last:
            self.peer.device.both(self._learned, passing)
        else:
            self.peer.device.forward(self._forwarded, passing)

    def _forwarded(self, passing: Passing) -> None:
        if not passing.is_over:
            passing.go_onward()

    def backlog(self) -> float | None:
        """Seconds of work that are here; None when no more would be taken."""
        if not self._serves() or self._admission.why_busy() is not None:
            return None
        return (self._admission.running + self._admission.waiting) * self._seconds_each()

    def _seconds_each(self) -> float:
        device = self.peer.device
        return device.busy_seconds / (device.microbatches + 1)

    # --- answers ------------------------------------------------------------------------------

    def name(self, place: str) -> str:
        """The name of a microbatch at the next stage."""
        return f"{self.peer.number}/{place}/{next(self._names)}"

    def let_finish(self, child: Passing) -> None:
        """Let a late one at the next stage finish, or the one that is waited for longest make room."""
        self.late[child] = None
        if len(self.late) > MOST_LATE:
            oldest = next(iter(self.late))
            if oldest.parent is not None:
                oldest.parent.withdraw(oldest)
                self.peer.view.suspect(oldest.at.peer.peer)

    def take_gradient(self, passing: Passing) -> None:
        self._adapt(self._world.now - passing.ready)
        self._handle(admission.GradientCame(passing.place))

    def _adapt(self, seconds: float) -> None:
        in_flight = self._window.in_flight(seconds, self._seconds_each())
        self._handle(admission.Allowed(min(self._in_flight, in_flight)))

    def _learned(self, passing: Passing) -> None:
        """Count a microbatch whose backward pass is done; the sender gets the gradient."""
        if passing.is_over or not self.peer.is_alive:
            return
        passing.is_over = True
        del self._here[passing.place]
        self.peer.device.microbatches += 1
        self._reply(passing)
        self.peer.gradient_in()
        self._handle(admission.Counted(passing.place))

    def _reply(self, passing: Passing) -> None:
        parent, world = passing.parent, self._world
        self.expected.pop(passing, None)
        if parent is None:
            world.measures.microbatch_done(world.now, self.peer.side)
            return
        said = (world.now - passing.began) * (1 + self._admission.waiting)
        size = world.scenario.run.activation_bytes
        world.network.send(self.peer, parent.at.peer, "gradients", size, parent.answer, passing, said)

    def _refuse(self, passing: Passing) -> None:
        """Refuse a microbatch as busy: the sender asks another peer."""
        world = self._world
        if world.measures.counts:
            world.measures.refusals += 1
        self._drop(passing)
        parent = passing.parent
        if parent is None:  # nobody else would take what stage 0 drew
            if self.peer.serves and self.peer.pipeline is self:
                world.queue.after(RETRY_SECONDS, self._draw)
            return
        world.network.send(self.peer, parent.at.peer, "refusals", MESSAGE, parent.refuse, passing)

    # --- places -------------------------------------------------------------------------------

    def _drop(self, passing: Passing) -> None:
        """Give up a microbatch here, and what the next stages do for it."""
        passing.drop()
        self.expected.pop(passing, None)
        if self._here.pop(passing.place, None) is not None:
            self._handle(admission.GivenUp(passing.place))

    def cancel(self, passing: Passing) -> None:
        """Drop a microbatch that the sender has given up."""
        if not passing.is_over:
            self._drop(passing)

    # --- the end ------------------------------------------------------------------------------

    def why_idle(self) -> str:
        if self._admission.is_held:
            return "round"
        if self._admission.is_complete:
            return "step"
        return "gradients" if self._admission.running else "microbatches"

    def leave(self) -> None:
        """Leave the stage without a word: senders wait for their deadlines, broken streams tell the next stages."""
        queue = self._world.queue
        for child in self.expected:
            sender = child.parent
            if sender is not None:
                queue.after(child.silence, sender.fail, child)
        for passing in self._here.values():
            passing.is_over = True
            for onward in passing.onward.values():
                queue.after(self._world.network.round_trip / 2, onward.at.cancel, onward)
        self._here.clear()
        self.expected.clear()

    def close(self) -> None:
        """Refuse what is here, so that it goes elsewhere: the peer goes to another stage."""
        self._handle(admission.Held())
        for passing in list(self._here.values()):
            if not passing.is_over:
                self._refuse(passing)

    def cut_off(self) -> None:
        """Leave what is on its way between the halves unanswered: the network is cut in two."""
        for child in list(self.expected):
            sender = child.parent
            if sender is not None and sender.at.peer.side != self.peer.side:
                self._world.queue.after(child.silence, sender.fail, child)
                self.expected.pop(child)
