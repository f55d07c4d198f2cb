"""A node's service at one stage: its replica, pipeline, rounds and record, from taking the stage to giving it up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import torch

from node.context import Context, Counters
from node.data.batches import Position
from node.first_state import FirstState
from node.link_probes import LinkProbes
from node.machine.ports import tcp_port
from node.membership.discovery import Discovery
from node.model.compute import Compute, Priority
from node.model.dry_run import rehearse
from node.model.execution import choose_execution, described
from node.model.replica import Replica
from node.model.resources import room_on
from node.model.sparing import sparing_for
from node.model.stage_work import StageWork, copies_of
from node.model.state_directory import Checkpoint
from node.node_resources import CLOSING_SECONDS, NodeResources
from node.node_statistics import announcement, statistics
from node.pipeline.draws import Draws
from node.pipeline.evaluation import EvaluationService
from node.pipeline.pipeline import Pipeline
from node.pipeline.prediction import PredictionService
from node.rounds.rounds import Rounds
from node.state.checkpoints import Checkpoints
from node.state.transfer import StateService
from node.trainer import Trainer
from protocol.announcement import Announcement, State
from protocol.errors import Refused, UserError
from protocol.messages.peers import GetStats, NodeStats
from protocol.rpc import Answer, Request, Traffic
from protocol.supervision import all_of

logger = logging.getLogger(__name__)


class Service:
    """Mutable state: the parts, made one after another by `make`, and what others are told of them."""

    def __init__(self, member: NodeResources, stage: int, seconds_left: float) -> None:
        """`seconds_left` is what the volunteer still gives; 0 is no limit."""
        self.stage = stage
        self.public_state: State = "joining"
        self.is_announced = False  # the parts exist, and others may know of this node's service
        self.context: Context
        self.replica: Replica
        self.trainer: Trainer
        self.rounds: Rounds
        self.checkpoints: Checkpoints
        self._pipeline: Pipeline
        self._discovery: Discovery
        self._member = member
        self._seconds_left = seconds_left
        self._since = member.transport.now()
        self._is_whole = False  # the replica has its stage's state: it is worth keeping
        self._compute: Compute | None = None
        self._supervisor = member.supervisor.group()  # of all parts
        self._background = self._supervisor.group()  # of those that run for ever

    # --- taking the stage ---------------------------------------------------------------------

    async def make(self) -> None:
        """The stage's replica and all that works on it. Raises `UserError` with what to do."""
        member, stage = self._member, self.stage
        config, manifest, device = member.config, member.signed.manifest, torch.device(member.config.device)
        member.abilities.require(stage)
        if stage == 0:
            await self._open_data()
        room = room_on(device, config.most_memory).free
        execution = choose_execution(
            manifest, stage, device, room, config.precision, config.recompute, config.compile
        )
        self._compute = member.surroundings.compute()
        self.context = self._make_context(self._compute)
        # nothing else waits yet; it is no training
        self.replica = await self._compute.run(
            Priority.SERVE, member.surroundings.replica, manifest, stage, config.device
        )
        self.replica.passes.execute(execution)
        await self._rehearse(self._compute)
        self._make_parts()

    async def _rehearse(self, compute: Compute) -> None:
        """Find out and say how microbatches are computed. Raises `ResourceError` when they cannot be."""
        member, replica = self._member, self.replica
        told, measured = "", dict[str, int]()
        if member.surroundings.rehearses:
            config = member.config
            rehearsed = await compute.run(
                Priority.SERVE, rehearse, replica, config.recompute, config.most_memory
            )
            told = f"; {rehearsed.described()}"
            measured = {"peak": rehearsed.cost.peak, "kept": rehearsed.cost.kept, "room": rehearsed.room}
        execution = replica.passes.execution  # the rehearsal may have changed it
        sentence = f"Stage {self.stage} {described(execution, replica.manifest, self.stage)}{told}."
        member.events.say(sentence, "execution", **asdict(execution), **measured)

    async def _open_data(self) -> None:
        """Raises `UserError`; a node that came from another stage does not try this one again."""
        member = self._member
        try:
            await member.tokenizer.get()
            await member.data.open(member.tokenizer.raw)
        except UserError:
            member.abilities.may_serve.discard(0)
            raise

    def _make_context(self, compute: Compute) -> Context:
        member, trace = self._member, self._member.surroundings.trace
        trace.name_process(f"stage {self.stage} …{member.transport.peer_id[-8:]}")
        return Context(
            me=member.transport.peer_id,
            run_id=member.signed.run_id,
            manifest=member.signed.manifest,
            stage=self.stage,
            transport=member.transport,
            rpc=member.rpc,
            view=member.view,
            compute=compute,
            events=member.events,
            counters=Counters(),
            trace=trace,
            links=member.links,
            supervisor=self._supervisor,
        )

    def _make_parts(self) -> None:
        member, context, replica = self._member, self.context, self.replica
        feed = member.data.feed(context.run_id, context.me) if self.stage == 0 else None
        sparing = sparing_for(replica, member.config.recompute, context.events)
        work = StageWork(context.manifest, replica.passes, copies_of(replica.device), sparing)
        self._pipeline = Pipeline(context, replica, work, member.random())
        self.rounds = Rounds(context, replica, member.random())
        self.checkpoints = Checkpoints(context, replica, member.surroundings.state, self._position)
        life = f"{member.surroundings.rng.getrandbits(32):08x}"
        draws = Draws(context, self._pipeline, feed, life, self._seconds_left) if feed is not None else None
        self.trainer = Trainer(context, replica, self._pipeline, self.rounds, self.checkpoints, draws)
        self._serve(EvaluationService(context, work), PredictionService(context, replica))
        self._discovery = self._make_discovery()
        self.is_announced = True

    def _position(self, step: int) -> Position | None:
        """In the data, after an inner step."""
        return self._member.data.position(step if self.stage == 0 else None)

    def _make_discovery(self) -> Discovery:
        member, manifest = self._member, self.context.manifest
        onward = manifest.stage_after(self.stage)
        neighbours = sorted({s for s in (self.stage - 1, self.stage, onward) if 0 <= s < manifest.stages})
        return Discovery(member.membership, member.surroundings.state, neighbours, onward, self._announcement)

    def _serve(self, evaluation: EvaluationService, prediction: PredictionService) -> None:
        rpc = self._member.rpc
        state = StateService(self.stage, self.replica, self.context.compute)
        rpc.handle(GetStats.answered_by(self._on_stats))
        for part in (self._pipeline, evaluation, prediction, self.rounds, state):
            part.serve(rpc)
        self._member.tokenizer.serve()

    async def start(self, checkpoint: Checkpoint | None = None, is_move: bool = False) -> None:
        """With all parts made: get the stage's state, then answer peers and say so in the DHT.

        Raises `UserError` with what to do. A node that moves does not begin with a state of its own where there
        are replicas to take it from: it raises `JoinError` instead.
        """
        member, context, replica, discovery = self._member, self.context, self.replica, self._discovery
        await discovery.announce()
        if not await self._load_state(checkpoint, is_move):
            return  # told to leave before the state was there
        self._is_whole, self.public_state = True, "serving"
        await discovery.refresh()
        await discovery.announce()
        self._tell_addresses()
        probes = LinkProbes(context)
        probes.serve()
        checkpoint_seconds = member.config.checkpoint_minutes * 60
        self._keep_discovery()
        keep = self._background.keep
        keep("measuring links", probes.run, "Nobody learns how fast this node's links are.")
        keep(
            "saving checkpoints",
            lambda: self.checkpoints.save_regularly(checkpoint_seconds),
            "Without checkpoints a restart goes on from an older state.",
        )
        keep("getting the tokenizer", member.tokenizer.get_in_time, "Others cannot get it from this node.")
        context.events.say(
            f"Serving stage {self.stage} of {context.manifest.stages} of run '{context.manifest.name}' "
            f"({replica.parameters:,} parameters) from step {replica.step}, round {replica.round}.",
            "serving",
            stage=self.stage,
            step=replica.step,
            round=replica.round,
        )

    async def _load_state(self, checkpoint: Checkpoint | None, is_move: bool) -> bool:
        """Whether it is there; the record is renewed meanwhile, since a download may outlast it."""
        source, discovery = self._member.config.from_checkpoint, self._discovery
        first_state = FirstState(
            self.context, self.replica, self.checkpoints, discovery, self.trainer, source
        )
        self._keep_discovery()
        try:
            return await first_state.load(checkpoint, is_move)
        finally:
            await self._background.close()

    def _keep_discovery(self) -> None:
        consequence = "Others stop seeing this node, and it stops seeing them."
        self._background.keep("discovery", self._discovery.run, consequence)

    def _tell_addresses(self) -> None:
        member = self._member
        addresses = member.transport.addresses()
        if member.surroundings.state is not None:
            member.surroundings.state.remember(port=tcp_port(addresses), stage=self.stage)
        member.events.emit("addresses", addresses=addresses)
        logger.info("Others may join through this node:")
        for address in addresses:
            logger.info("  noloco-node --join %s", address)

    # --- what others see ----------------------------------------------------------------------

    async def announce(self, state: State) -> None:
        """Tell others the new state of this node, the sooner the better. Raises as `Transport.put` does."""
        self.public_state = state
        await self._discovery.announce()

    def _announcement(self) -> Announcement:
        may_serve = self._member.abilities.may_serve
        return announcement(self.context, self.replica, self.public_state, self._since, may_serve)

    async def _on_stats(self, request: Request[GetStats]) -> Answer[NodeStats]:
        if not self.is_announced:
            raise Refused("moving", "this node is between two stages")
        return Answer(statistics(self.context, self.replica, self.public_state, self._member.since))

    # --- giving it up -------------------------------------------------------------------------

    async def withdraw(self) -> None:
        """Others stop routing here while what is in flight is finished."""
        seconds = self._member.time_to_end()
        await attempt(lambda: self.announce("leaving"), "withdrawing the record", seconds)

    async def end(self) -> None:
        """For good: save, withdraw, finish what is in flight. Each step is tried whatever becomes of the others."""
        if self.is_announced:
            await self._background.close()
            member = self._member
            await attempt(self.rounds.close, "stopping the gossip", member.time_to_end())
            unsaved = self._is_whole and self.public_state != "finished"
            saving = (
                [attempt(self.checkpoints.save, "saving the state", member.time_to_end())] if unsaved else []
            )
            await all_of(self.withdraw(), *saving)
            await attempt(self._pipeline.close, "closing the pipeline", member.time_to_end())
            replica = self.replica
            self.context.events.say("Left the swarm.", "left", step=replica.step, round=replica.round)

    async def close(self) -> None:
        """End the compute thread; also after a start that failed."""
        if self._compute is not None:
            await attempt(self._compute.close, "ending the compute thread", self._member.time_to_end())
        await attempt(self._supervisor.close, "ending what ran in the background", self._member.time_to_end())

    async def give_up(self) -> None:
        """To serve another stage: end everything that belongs to this one, and let go of its memory."""
        if not self.is_announced:
            await self.close()
            return
        await self._background.close()
        self.is_announced = self._is_whole = False
        await attempt(self.rounds.close, "stopping the gossip")
        await attempt(self._pipeline.close, "closing the pipeline")
        rpc = self._member.rpc
        rpc.stop_handling(Traffic.PIPELINE, Traffic.PAIRING, Traffic.GOSSIP, Traffic.STATE)
        await attempt(self._finish_computing, "ending the compute thread")
        await attempt(self._supervisor.close, "ending what ran in the background")
        del self._pipeline, self.rounds, self.trainer, self.checkpoints, self.replica

    async def _finish_computing(self) -> None:
        assert self._compute is not None
        await self._compute.run(Priority.SERVE, lambda: None)  # behind all that was asked for
        await self._compute.close()


async def attempt(
    action: Callable[[], Awaitable[None]], doing: str, seconds: float = CLOSING_SECONDS
) -> None:
    """One step of ending: what comes after it is done whatever becomes of it; the reason is told."""
    try:
        async with asyncio.timeout(seconds):
            await action()
    except Exception as error:  # noqa: BLE001  leaving goes on
        logger.warning("A problem while %s: %s", doing, error or type(error).__name__)
