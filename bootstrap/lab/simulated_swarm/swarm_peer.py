"""One simulated peer, its view of the others, its device, its stage: what `node.service.service` puts together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from bootstrap.lab.simulated_swarm.disagreement import Opinion
from bootstrap.lab.simulated_swarm.modelled_device import ModelledDevice
from bootstrap.lab.simulated_swarm.modelled_dht import ANNOUNCEMENT_BYTES, RECORD_BYTES, look_bytes
from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE, Host
from bootstrap.lab.simulated_swarm.modelled_pipeline import ModelledPipeline
from bootstrap.lab.simulated_swarm.modelled_rounds import AveragingPeer, ModelledRounds
from bootstrap.lab.simulated_swarm.swarm_scenario import PeerKind
from bootstrap.lab.simulated_swarm.swarm_space import SwarmSpace
from node.context import LEAST_MARKS
from node.membership.discovery import (
    ANNOUNCEMENTS_PER_LIFETIME,
    LONELY_SECONDS,
    POLLS_PER_LIFETIME,
    is_due,
    keys_to_announce,
    look_at,
)
from node.membership.hearsay import audience
from node.membership.ledger import Shares
from node.membership.view import Member, View
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from protocol.ground import PeerId
from protocol.records.announcement import Announcement, State

RUN_ID = "simulated"


class SwarmPeer:
    """One simulated peer with its view, device and stage.

    Mutable state: all that changes in a peer's life.
    """

    def __init__(self, world: SwarmSpace[SwarmPeer], number: int, kind: PeerKind, rng: random.Random) -> None:
        self.world = world
        self.number = number
        self.kind = kind
        self.rng = rng
        self.peer = PeerId(f"{rng.getrandbits(96):024x}")
        self.region = rng.choices(range(len(world.regions)), world.regions)[0]
        self.side = 0  # of a network that is cut in two
        self.dials_out = rng.random() < kind.dials_out
        self.speed = kind.speed * max(0.2, rng.gauss(1.0, kind.spread))
        self.uplink = kind.uplink * 1e6 / 8  # bytes per second
        self.uplink_free = self.passing_free = 0.0
        self.ways: list[Host] = []
        network, host = divmod(number, kind.in_network)
        first = (11 if kind.in_network == 1 else 60) + network // 65_536
        self.address = f"/ip4/{first}.{network // 256 % 256}.{network % 256}.{1 + host}/tcp/1"
        self.view = View(world.queue.clock)
        self.device = ModelledDevice(world.queue, self.speed, world.measures, self._why_idle)
        self.is_alive = True
        self.died = float("inf")
        self.serves = False
        self.stage = -1
        self.arrived = self.since = world.now
        self.is_newcomer = world.now > 0
        self.has_learned = False
        self.steps = 0
        self.pipelines: dict[int, ModelledPipeline] = {}
        self.rounds: ModelledRounds | None = None
        self._step_began = 0.0
        self._announced = float("-inf")
        self.record: Member | None = None  # its own
        world.network.came(self)
        self._known: tuple[Sequence[PeerId], Shares] | None = None

    # --- its stage ----------------------------------------------------------------------------

    @property
    def pipeline(self) -> ModelledPipeline | None:
        return self.pipelines.get(self.stage)

    def pipeline_at(self, stage: int) -> ModelledPipeline:
        """The pipeline of a stage that it says, or said, to serve."""
        known = self.pipelines.get(stage)
        if known is None:
            known = self.pipelines[stage] = ModelledPipeline(self, stage, self.rng)
        return known

    def serve(self, stage: int, opinion: Opinion) -> None:
        """Serve a stage from now on."""
        world = self.world
        self.stage, self.serves, self.since = stage, True, world.now
        self.pipelines[stage] = pipeline = ModelledPipeline(self, stage, self.rng)
        self.rounds = ModelledRounds(self, opinion, self.rng)
        self.steps, self._step_began = 0, world.now
        world.serving[stage] += 1
        world.measures.log(world.now, "serves", self.peer, str(stage))
        self.announce()
        for sender in audience(self.view, stage, world.now, self.rng):
            other = world.peers[sender]
            world.network.send(self, other, "discovery", RECORD_BYTES, other._introduced, self)
        pipeline.begin()

    def leave_stage(self) -> None:
        """Leave the stage in good order, for another one."""
        assert self.rounds is not None
        assert self.pipeline is not None
        self.rounds.let_go()
        self.serves = False
        self.world.serving[self.stage] -= 1
        self.pipeline.close()

    def die(self) -> None:
        world = self.world
        world.measures.log(world.now, "dies", self.peer)
        if self.serves:
            world.serving[self.stage] -= 1
        self.is_alive = self.serves = False
        self.died = world.now
        for pipeline in self.pipelines.values():
            pipeline.leave()
        self.device.stop()
        self.view = View(world.queue.clock)  # what it knew takes no memory any more

    def _why_idle(self) -> str:
        pipeline = self.pipeline
        return "joining" if not self.serves or pipeline is None else pipeline.why_idle()

    # --- training -----------------------------------------------------------------------------

    def gradient_in(self) -> None:
        """Count a microbatch whose gradient is here."""
        if not self.is_newcomer:
            self.world.measures.at(self.world.now).done_by_first += 1
        if self.has_learned:
            return
        self.has_learned = True
        measures = self.world.measures
        if self.is_newcomer and measures.counts:
            measures.useful_after.append(self.world.now - self.arrived)

    def step_done(self) -> None:
        rounds, pipeline = self.rounds, self.pipeline
        assert rounds is not None
        assert pipeline is not None
        now = self.world.now
        self.steps += 1
        if not rounds.step_done(now - self._step_began):
            self._go_on()
            return
        if rounds.has_partner:
            pipeline.hold()
        rounds.finish()

    def round_over(self) -> None:
        if self.serves:
            self._go_on()

    def _go_on(self) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        self._step_began = self.world.now
        pipeline.next_step()

    # --- the others ---------------------------------------------------------------------------

    def shares(self, peers: Sequence[PeerId]) -> Shares:
        """The shares of replicas of its own stage; the same for the same list."""
        if self._known is None or self._known[0] is not peers:
            self._known = peers, self.view.shares(peers)
        return self._known[1]

    def announcement(self, state: State) -> Announcement:
        device = self.device
        is_measured = self.steps >= LEAST_MARKS and device.busy_seconds > 0
        rate = device.microbatches / (self.world.now - self.since) if self.world.now > self.since else 0.0
        return Announcement(
            stage=self.stage,
            state=state,
            since=self.since,
            step=self.steps,
            tokens_per_second=rate,
            capacity=device.microbatches / device.busy_seconds if is_measured else None,
            may_serve=self.world.stages,
            addresses=[self.address],
        )

    def announce(self, state: State = "serving") -> None:
        """Announce the peer as `Discovery.announce` does."""
        world, level = self.world, self.view.level(self.stage)
        now = world.now
        said = self.announcement(state).model_copy(update={"level": level})
        member = self.record = Member(self.peer, said, now + world.scenario.run.record_lifetime)
        stored = True
        for key in keys_to_announce(RUN_ID, self.stage, self.peer, level):
            stored &= world.dht.put(self, key, member)
            world.measures.looked_up(ANNOUNCEMENT_BYTES)
        if level:
            self.view.take([member])
        self._announced = now if stored else float("-inf")

    def look(self, stage: int, view: View | None = None) -> int:
        """Look up a stage as `read_stage` does; returns the bytes that it took."""
        look, nbytes = look_at(view or self.view, RUN_ID, stage, self.peer, self.world.now), 0
        with contextlib.suppress(StopIteration):
            key, copies = next(look)
            while True:
                found = self.world.dht.get(self, key)
                nbytes += look_bytes(len(found), copies)
                key, copies = look.send(found)
        self.world.measures.looked_up(nbytes)
        return nbytes

    def discover(self) -> Iterator[float]:
        """Discover others as `Discovery.run` does: yields the seconds to wait."""
        world, stage = self.world, self.stage
        lifetime, stages = world.scenario.run.record_lifetime, len(world.serving)
        neighbours = [s for s in (stage - 1, stage, stage + 1) if 0 <= s < stages]
        while self.is_alive and self.serves and self.stage == stage:
            if world.now >= self._announced + lifetime / ANNOUNCEMENTS_PER_LIFETIME:
                self.announce()
            nbytes = sum(self.look(s) for s in neighbours if is_due(self.view, s, world.now))
            self.view.expire(world.now)
            is_lonely = stage + 1 < stages and not self.view.knows_any(stage + 1, world.now)
            pause = LONELY_SECONDS if is_lonely else lifetime / POLLS_PER_LIFETIME
            yield pause + world.dht.seconds(len(world.alive), nbytes, self.uplink)

    # --- what others ask ----------------------------------------------------------------------

    def on_propose(
        self, asker: AveragingPeer, proposal: Proposal, stage: int, theirs: ModelledRounds
    ) -> None:
        answer: Meeting | Refusal = Refusal("other-stage")
        self._introduced(asker)
        if self.serves and self.stage == stage and self.rounds is not None:
            answer = self.rounds.on_propose(asker, proposal)
        self.world.network.send(self, asker, "pairing", MESSAGE, theirs.answered, proposal, answer)

    def _introduced(self, asker: AveragingPeer) -> None:
        """Note the record of a member that this peer did not know, as `protocol.rpc.door` does."""
        record = asker.record
        if record is not None and not self.view.knows(asker.peer):
            self.view.shown(record)

    def on_get_record(
        self, asker: AveragingPeer, named: PeerId, theirs: ModelledRounds, asked: Proposal
    ) -> None:
        """Show the record of another one of the stage, if it is known."""
        known = self.view.record_of(named)
        nbytes = MESSAGE if known is None else RECORD_BYTES
        self.world.network.send(self, asker, "discovery", nbytes, theirs.heard_about, asked, known)

    def on_sit_out(self, stage: int, meeting: Meeting) -> None:
        if self.serves and self.stage == stage and self.rounds is not None:
            self.rounds.on_sit_out(meeting)

    def on_ready(self, pair: Pair) -> None:
        if self.rounds is not None:
            self.rounds.on_ready(pair)

    def on_unknown_pair(self, pair: Pair) -> None:
        if self.rounds is not None:
            self.rounds.on_unknown_pair(pair)

    def on_release(self, pair: Pair) -> None:
        if self.rounds is not None:
            self.rounds.on_release(pair)

    def on_contribution(self, sender: AveragingPeer, pair: Pair, z: Any) -> None:
        """Take what a partner sends at the end of a round."""
        theirs = sender.rounds
        assert theirs is not None
        if self.rounds is not None and self.rounds.contributed(pair, z):
            self.world.network.send(self, sender, "pairing", MESSAGE, theirs.acknowledged, pair.name)
        else:
            mine = Pair(self.peer, pair.name)
            self.world.network.send(self, sender, "pairing", MESSAGE, theirs.give_up, mine)
