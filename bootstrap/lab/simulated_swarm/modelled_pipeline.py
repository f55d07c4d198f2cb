"""The way of a microbatch through a simulated peer and to the next stage, as node/pipeline/ has it.

What is admitted, to whom it goes, how many are on their way and how long one waits for an answer is decided by the
daemon's `MicrobatchAdmission`, `Router`, `Window` and `AdaptiveDeadline`; computing and links take modelled time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE
from bootstrap.lab.simulated_swarm.modelled_question import Question
from node.links.links import AdaptiveDeadline
from node.membership.ledger import Shares
from node.model.memory_model import QUEUE_BATCHES
from node.pipeline.gate import Decision, MicrobatchAdmission, Window
from node.pipeline.next_stage import LEAST_DEADLINE
from node.pipeline.routing import Router
from node.pipeline.stage_client import MOST_RETRY_SECONDS, PAUSE_SECONDS, RETRY_SECONDS
from node.pipeline.two_choices import TwoChoices
from protocol.ground import PeerId
from protocol.rpc.answering import PROGRESS_SECONDS

if TYPE_CHECKING:
    from bootstrap.lab.simulated_swarm.swarm_peer import SwarmPeer


class Passing:
    """One microbatch at one peer, and whom it came from. Mutable state: how far it is."""

    __slots__ = (
        "asked", "at", "began", "child", "is_over", "learns",
        "parent", "pause", "place", "runs", "tried", "waits_since",
    )  # fmt: skip

    def __init__(self, at: ModelledPipeline, place: str, parent: Passing | None, asked: float) -> None:
        self.at = at
        self.place = place
        self.parent = parent
        self.asked = asked
        self.began = asked
        self.child: Passing | None = None  # at the next stage
        self.tried: set[PeerId] = set()
        self.pause = RETRY_SECONDS
        self.waits_since = asked
        self.runs = False  # its forward pass may run
        self.learns = False  # its gradient is here
        self.is_over = False


class ModelledPipeline:
    """Takes microbatches through a simulated peer and to the next stage.

    Mutable state: what was admitted and sent, what is on its way here, and what router and deadline learned.
    """

    def __init__(self, peer: SwarmPeer, stage: int, rng: random.Random) -> None:
        world, run = peer.world, peer.world.scenario.run
        self.peer = peer
        self.stage = stage
        self.is_last = stage == run.stages - 1
        self._world = world
        batch = run.microbatches
        staleness = 0 if self.is_last else run.staleness
        self._in_flight = (1 + staleness) * batch
        self._admission = MicrobatchAdmission(
            batch, QUEUE_BATCHES * batch, staleness * batch, self._in_flight
        )
        self._draws_ahead = bool(staleness)
        self._window = Window(batch, self._in_flight)
        self._router = Router(rng, self._shares, peer.view.ledger.is_proven)
        self.choices = TwoChoices(self._router)
        self._deadline = AdaptiveDeadline(run.microbatch_deadline, LEAST_DEADLINE)
        self._here: dict[str, Passing] = {}  # by place
        self.expected: dict[Passing, None] = {}  # sent here and not answered, ordered
        self._held = False
        self._steps = False  # a step is being taken: its batch is in
        self._names = itertools.count()
        self._known: tuple[Sequence[PeerId], Shares] | None = None

    def _shares(self, peers: Sequence[PeerId]) -> Shares:
        """The peers' shares, kept for the same list: `View.serving` returns another list when something changed."""
        if self._known is None or self._known[0] is not peers:
            self._known = peers, self.peer.view.shares(peers)
        return self._known[1]

    # --- the beginning of a step --------------------------------------------------------------

    def begin(self) -> None:
        if self.stage == 0:
            for _ in range(self._admission.batch * (1 + self._draws_ahead)):
                self._draw()

    def next_step(self) -> None:
        """Begin the next step: the weights have changed."""
        self._held = self._steps = False
        self._wake(self._admission.next_step())
        if self.stage == 0:
            for _ in range(self._admission.batch):
                self._draw()

    def _draw(self) -> None:
        self.arrive(Passing(self, f"{next(self._names)}", None, self._world.now))

    def hold(self) -> None:
        """Hold work as `Gate.hold` does: what waits goes elsewhere."""
        if self.stage == 0:
            return
        self._held = True
        for passing in list(self._here.values()):
            waits = passing.learns and not self._admission.is_of_this_step(passing.place)
            if not passing.is_over and (not passing.runs or waits):
                self._refuse(passing)

    # --- one microbatch -----------------------------------------------------------------------

    def arrive(self, passing: Passing) -> None:
        if passing.is_over:
            return
        if not self.peer.serves or self.peer.stage != self.stage or self._held:
            self._refuse(passing)
            return
        decision = self._admission.request(passing.place)
        if decision is Decision.FULL:
            self._refuse(passing)
            return
        self._here[passing.place] = passing
        if decision is not Decision.QUEUED:
            self._run(passing)

    def _run(self, passing: Passing) -> None:
        passing.runs, passing.began = True, self._world.now
        if self.is_last:
            self.peer.device.both(self._learned, passing)
        else:
            self.peer.device.forward(self._forwarded, passing)

    def _forwarded(self, passing: Passing) -> None:
        if not passing.is_over:
            passing.waits_since = self._world.now
            self._onward(passing)

    def _onward(self, passing: Passing) -> None:
        """Pass a microbatch on to a peer of the next stage that was not tried yet; later, where there is none."""
        if passing.is_over or not self.peer.is_alive:
            return
        world, peer, now = self._world, self.peer, self._world.now
        serving = peer.view.serving(self.stage + 1, now)
        candidates = self.choices.candidates(serving, passing.tried, now - passing.waits_since)
        if not candidates:
            world.queue.after(passing.pause if serving else PAUSE_SECONDS, self._onward, passing)
            passing.pause = min(MOST_RETRY_SECONDS, 2 * passing.pause)
            passing.tried.clear()
        elif len(candidates) > 1 and self.choices.asks:
            Question(self, passing, candidates).ask()
        else:
            self.send(passing, self.choices.chosen(candidates, {}, now))

    def backlog(self) -> float | None:
        """Seconds of work that are here; None when no more would be taken."""
        is_full = self._held or self._admission.waiting >= self._admission.queue_limit
        if not self.peer.serves or self.peer.stage != self.stage or is_full:
            return None
        return (self._admission.running + self._admission.waiting) * self._seconds_each()

    def _seconds_each(self) -> float:
        device = self.peer.device
        return device.busy_seconds / (device.microbatches + 1)

    def send(self, passing: Passing, chosen: PeerId) -> None:
        """Send a microbatch to that peer of the next stage."""
        if passing.is_over or not self.peer.is_alive:
            return
        world, peer, now = self._world, self.peer, self._world.now
        world.measures.offered(self.stage + 1, chosen, world.serving[self.stage + 1])
        self._router.turns.taken(chosen)
        self.choices.sent(chosen, now)
        other = world.peers[chosen]
        target = other.pipeline_at(self.stage + 1)
        child = Passing(target, f"{peer.number}/{passing.place}/{next(self._names)}", passing, now)
        passing.child = child
        is_there = other.is_alive and world.network.reaches(peer, other)
        network_bytes = world.scenario.run.activation_bytes
        if not is_there:
            serving = peer.view.serving(self.stage + 1, now)
            silence = self._silence(len(serving) - len(passing.tried) > 1)
            world.queue.after(silence, self.failed, passing, child)
        else:
            target.expected[child] = None
        world.network.send(peer, other, "activations", network_bytes, target.arrive, child)

    def _silence(self, has_others: bool) -> float:
        limit = self._world.scenario.run.microbatch_deadline
        return self._deadline.seconds() if has_others else limit

    # --- answers ------------------------------------------------------------------------------

    def _answered(self, passing: Passing, child: Passing, said: float) -> None:
        """Take the gradient that came, and what the other says of its load."""
        if passing.child is not child:
            return
        now = self._world.now
        self._lose_child(passing)
        seconds = now - child.asked
        self._deadline.note(min(seconds, PROGRESS_SECONDS + self._world.network.round_trip))
        target = child.at.peer.peer
        self._router.note(target, seconds, said)
        self.peer.view.trust(target)
        if passing.is_over:
            return
        self._adapt(seconds)
        passing.learns = True
        if self._admission.is_of_this_step(passing.place):
            self.peer.device.backward(self._learned, passing)
        elif self._held:
            self._refuse(passing)

    def _adapt(self, seconds: float) -> None:
        in_flight = self._window.in_flight(seconds, self._seconds_each())
        self._wake(self._admission.allow(min(self._in_flight, in_flight)))

    def _learned(self, passing: Passing) -> None:
        """Count a microbatch whose backward pass is done; the sender gets the gradient."""
        if passing.is_over or not self.peer.is_alive:
            return
        passing.is_over = True
        del self._here[passing.place]
        self.peer.device.microbatches += 1
        self._reply(passing)
        self._wake(self._admission.done(passing.place))
        self.peer.gradient_in()
        if self._admission.complete and not self._steps:
            self._steps = True
            self.peer.step_done()

    def _reply(self, passing: Passing) -> None:
        parent, world = passing.parent, self._world
        self.expected.pop(passing, None)
        if parent is None:
            world.microbatch_done(self.peer)
            return
        said = (world.now - passing.began) * (1 + self._admission.waiting)
        size = world.scenario.run.activation_bytes
        world.network.send(
            self.peer, parent.at.peer, "gradients", size, parent.at._answered, parent, passing, said
        )

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
        world.network.send(
            self.peer, parent.at.peer, "refusals", MESSAGE, parent.at._refused, parent, passing
        )

    def _refused(self, passing: Passing, child: Passing) -> None:
        if passing.child is child:
            self._lose_child(passing)
            self._router.turns.given_back(child.at.peer.peer)
            passing.tried.add(child.at.peer.peer)
            self._onward(passing)

    def failed(self, passing: Passing, child: Passing) -> None:
        """Give up the next peer, which showed no sign of life within the deadline, and try another."""
        if passing.child is not child or not self.peer.is_alive:
            return
        world, other = self._world, child.at.peer.peer
        self._lose_child(passing)
        child.at.cancel(child)  # whether it is cut off or dead: its end of the stream broke, too
        self._deadline.note_missed()
        self.peer.view.suspect(other, asked=child.asked)
        self._router.forget(other)
        self._router.turns.given_back(other)
        if world.measures.counts:
            world.measures.resends += 1
        world.measures.log(world.now, "resend", self.peer.peer, other)
        passing.tried.add(other)
        passing.waits_since = world.now
        self._onward(passing)

    def _lose_child(self, passing: Passing) -> Passing | None:
        """Forget what was sent on, and return it: the next stage has it no more, or that does not matter."""
        child, passing.child = passing.child, None
        if child is not None:
            self.choices.returned(child.at.peer.peer, child.asked)
        return child

    # --- places -------------------------------------------------------------------------------

    def _wake(self, moved: Sequence[str]) -> None:
        for place in moved:
            passing = self._here.get(place)
            if passing is None:
                continue
            if not passing.runs:
                self._run(passing)
            elif passing.learns and self._admission.is_of_this_step(place):
                self.peer.device.backward(self._learned, passing)

    def _drop(self, passing: Passing) -> None:
        """Give up a microbatch here, and what the next stages do for it."""
        passing.is_over = True
        self.expected.pop(passing, None)
        child = self._lose_child(passing)
        if child is not None:
            self._router.turns.given_back(child.at.peer.peer)
            self._world.network.send(self.peer, child.at.peer, "refusals", MESSAGE, child.at.cancel, child)
        if self._here.pop(passing.place, None) is not None:
            self._wake(self._admission.release(passing.place))

    def cancel(self, passing: Passing) -> None:
        """Drop a microbatch that the sender has given up."""
        if not passing.is_over:
            self._drop(passing)

    # --- the end ------------------------------------------------------------------------------

    def why_idle(self) -> str:
        if self._held:
            return "round"
        if self._admission.complete:
            return "step"
        return "gradients" if self._admission.running else "microbatches"

    def leave(self) -> None:
        """Leave the stage without a word: senders wait for their deadlines, broken streams tell the next stages."""
        queue = self._world.queue
        for child in self.expected:
            sender = child.parent
            if sender is not None:
                queue.after(sender.at._silence(True), sender.at.failed, sender, child)
        for passing in self._here.values():
            onward, passing.is_over = passing.child, True
            if onward is not None:
                queue.after(self._world.network.round_trip / 2, onward.at.cancel, onward)
        self._here.clear()
        self.expected.clear()

    def close(self) -> None:
        """Refuse what is here, so that it goes elsewhere: the peer goes to another stage."""
        for passing in list(self._here.values()):
            if not passing.is_over:
                self._refuse(passing)

    def cut_off(self) -> None:
        """Leave what is on its way between the halves unanswered: the network is cut in two."""
        for child in list(self.expected):
            sender = child.parent
            if sender is not None and sender.at.peer.side != self.peer.side:
                self._world.queue.after(sender.at._silence(True), sender.at.failed, sender, child)
                self.expected.pop(child)
