"""A node's service at one stage: its replica, pipeline, rounds and record, from taking the stage to giving it up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial

import torch

from node.context import Context, Throughput, announcement, history_point, statistics
from node.giving.bandwidth import most_by_bandwidth
from node.giving.policy import VolunteerLimits
from node.machine.limits import tcp_port
from node.membership.discovery import Discovery
from node.membership.hearsay import show
from node.membership.ways_in import WaysIn
from node.model.compilers import keep_compiled_in
from node.model.compiling import NOT_COMPILED, Compiling
from node.model.compute import Compute, Priority
from node.model.dry_run import dry_run
from node.model.execution import choose_execution, described, why_not_compiled
from node.model.oom_fallback import OomFallback
from node.model.replica import Replica
from node.model.resources import room_on
from node.model.stage_work import StageWork
from node.model.transfer import transfer_for
from node.pipeline.inference import Inference
from node.pipeline.pipeline import Pipeline
from node.pipeline.source import MicrobatchSource
from node.rounds.rounds import Rounds
from node.service.first_state import FirstState
from node.service.link_probes import LinkProbes
from node.service.node_resources import HISTORY_SECONDS, NodeResources, attempt
from node.service.receipts import Receipts
from node.service.trainer import Trainer
from node.state.checkpoints import Checkpoints
from node.state.copies import StageCopies
from node.state.download import WantedState
from node.state.transfer import StateService
from node.storage.checkpoint_files import Checkpoint
from node.storage.position import Position
from node.watch.history import Thinned
from node.watch.words import missing_sentence
from protocol.access.peer_limits import Allowance
from protocol.errors import Refused, UserError
from protocol.messages import Asker
from protocol.messages.peers import GetHistory, GetStats, History, HistoryPoint, NodeStats
from protocol.messages.training import GetBacklog
from protocol.records.addresses import is_loopback
from protocol.records.announcement import Announcement, State
from protocol.rpc.door import VISITOR_BYTES, VISITOR_DOWNLOADS, Door
from protocol.rpc.rpc import Answer, Request, Traffic
from protocol.supervision import Supervisor, all_of
from protocol.windows import short, window

logger = logging.getLogger(__name__)

FEW_OTHERS = 4  # replicas, up to which a stage is small
TRAINED = ("serving", "finished")  # states of a replica that has its stage's state
LONGEST_LOOK = 30.0  # seconds for finding out whether others can dial this node
SETTLE_SECONDS = 1.0  # for the last receipts: nobody waits longer for them to leave


@asynccontextmanager
async def taken_stage(member: NodeResources, stage: int, seconds_left: float) -> AsyncIterator[Service]:
    """The service of a stage with all its parts, not yet started.

    `seconds_left` is what the volunteer still gives; 0 is no limit. Raises `UserError` with what to do. On the way
    out, also from a failed beginning, everything that belongs to the stage is ended and its memory released, each
    step whatever becomes of the others. Saving, and telling others, is `Service.leave`.
    """
    member.abilities.require(stage)
    if stage == 0:
        member.events.begin("reading the text")
        await _open_data(member)
    async with AsyncExitStack() as ending:

        def at_the_end(action: Callable[[], Awaitable[None]], doing: str) -> None:
            ending.push_async_callback(lambda: attempt(action, doing, member.time_to_end()))

        supervisor = member.supervisor.group()
        at_the_end(supervisor.close, "ending what ran in the background")
        compute = member.surroundings.compute(stage)
        compute.end_node = supervisor.end_node
        at_the_end(compute.close, "ending the compute thread")
        context = _context_of(member, stage, compute, supervisor)
        replica = await _replica_of(member, stage, compute)
        service = Service(member, context, replica, seconds_left)
        # behind all that was asked for
        at_the_end(lambda: compute.run(Priority.SERVE, lambda: None), "finishing what is computed")
        ending.push_async_callback(service.end)
        yield service


async def _open_data(member: NodeResources) -> None:
    """Open the data. Raises `UserError`; a node that came from another stage does not try this one again."""
    try:
        await member.tokenizer.get()
        await member.data.open(member.tokenizer.raw)
    except UserError:
        member.abilities.may_serve.discard(0)
        raise


def _context_of(member: NodeResources, stage: int, compute: Compute, supervisor: Supervisor) -> Context:
    trace = member.surroundings.trace
    trace.name_process(f"stage {stage} …{member.transport.peer_id[-8:]}")
    return Context(
        member.membership,
        stage,
        compute,
        throughput=Throughput(most_by_bandwidth(member.config, member.signed.manifest, stage)),
        supervisor=supervisor,
        trace=trace,
        name=member.config.name,
        random=member.random,
    )


async def _replica_of(member: NodeResources, stage: int, compute: Compute) -> Replica:
    """The stage's replica, computing in the fastest way that fits. Raises `ResourceError` when none does."""
    config, manifest, around = member.config, member.signed.manifest, member.surroundings
    device = torch.device(config.device)
    room = room_on(device, config.most_memory).free
    if device.type != "cpu" or config.compile == "on":
        keep_compiled_in(config.state_dir / "cache" / "compiled")
    execution = choose_execution(
        manifest, stage, device, room, config.precision, config.recompute, config.compile
    )
    if reason := why_not_compiled(device, config.compile):
        member.events.warn(reason, NOT_COMPILED)
    doing = "measuring memory and compiling the stage" if execution.compiles else "measuring memory"
    member.events.begin(doing)
    # nothing else waits yet; it is no training
    replica = await compute.run(Priority.SERVE, around.replica, manifest, stage, config.device)
    if execution.compiles:
        replica.passes.compiling = Compiling(_teller(member))
    replica.passes.execute(execution)
    told, measured = "", dict[str, int]()
    if around.makes_dry_run:
        found = await compute.run(Priority.SERVE, dry_run, replica, config.recompute, config.most_memory)
        told = f"; {found.described()}"
        measured = {"peak": found.cost.peak, "kept": found.cost.kept, "room": found.room}
    execution = replica.passes.execution  # the dry run may have changed it
    sentence = f"Stage {stage} {described(execution, manifest, stage)}{told}."
    member.events.say(sentence, "execution", **asdict(execution), **measured)
    return replica


def _teller(member: NodeResources) -> Callable[[str, str], None]:
    """Return a function that tells the volunteer of events, to be called by the compute thread."""
    loop, events = asyncio.get_running_loop(), member.events

    def tell(sentence: str, event: str) -> None:
        loop.call_soon_threadsafe(events.warn if event == NOT_COMPILED else events.say, sentence, event)

    return tell


class Service:
    """Everything that serves one stage, from taking it to giving it up, and what others are told of it."""

    def __init__(
        self, member: NodeResources, context: Context, replica: Replica, seconds_left: float
    ) -> None:
        self.public_state: State = "joining"
        self.context, self.replica = context, replica
        self._member = member
        self._since = member.transport.now()
        self._is_whole = False  # the replica has its stage's state: it is worth keeping
        self._first_state: FirstState | None = None  # while it is being found, and after that
        self._told_missing: list[int] = []  # stages whose joining line was logged last
        self._background = context.supervisor.group()  # of those parts that run for ever
        feed = member.data.feed(context.run_id, context.me) if self.stage == 0 else None
        fallback = OomFallback(replica, member.config.recompute, context.events)
        work = StageWork(context.manifest, replica.passes, transfer_for(replica.device), fallback)
        self._pipeline = Pipeline(context, replica, work, member.random())
        self.rounds = Rounds(context, replica, member.random())
        kept = member.config.keep_stages, member.config.keep_days
        self.checkpoints = Checkpoints(context, replica, member.surroundings.state, self._position, *kept)
        life = f"{member.surroundings.rng.getrandbits(32):08x}"
        source = MicrobatchSource(context, self._pipeline, feed, life, seconds_left) if feed else None
        self.trainer = Trainer(context, replica, self._pipeline, self.rounds, self.checkpoints, source)
        self._receipts = Receipts(member)
        self._serve(Inference(context, replica, work))
        self._discovery = self._make_discovery()

    @window
    def __repr__(self) -> str:
        replica, tasks = self.replica, self.context.supervisor.running()
        state = f"{self.public_state} | Step: {replica.step}, round {replica.round}"
        return f"Peer: {short(self.context.me)} | Stage: {self.stage} | State: {state} | Tasks: {tasks}"

    @property
    def stage(self) -> int:
        return self.context.stage

    def _position(self, step: int) -> Position | None:
        """The position in the data after an inner step."""
        return self._member.data.position(step if self.stage == 0 else None)

    def _make_discovery(self) -> Discovery:
        member, manifest = self._member, self.context.manifest
        onward = manifest.stage_after(self.stage)
        neighbours = self._neighbours
        return Discovery(member.membership, member.surroundings.state, neighbours, onward, self._announcement)

    @property
    def _neighbours(self) -> list[int]:
        """This stage and those that it exchanges microbatches with; the view has their records."""
        manifest = self.context.manifest
        around = {self.stage - 1, self.stage, manifest.stage_after(self.stage)}
        return sorted(stage for stage in around if 0 <= stage < manifest.stages)

    def _serve(self, inference: Inference) -> None:
        rpc = self._member.rpc
        rpc.open_door(self._door())
        state = StateService(self.stage, self.replica, self.context.compute)
        rpc.handle(GetStats.answered_by(self._on_stats))
        rpc.handle(
            GetHistory.answered_by(partial(_on_history, self._member.history))
        )  # longer than the service
        for part in (self._pipeline, inference, self.rounds, state):
            part.serve(rpc)
        self._member.tokenizer.serve()
        self._member.copies.serve()
        self._receipts.serve()

    def _door(self) -> Door:
        context, manifest = self.context, self.context.manifest
        return Door(
            context.run_id,
            {Asker.REPLICA: self.stage, Asker.BEFORE: (self.stage - 1) % manifest.stages},
            lambda peer: context.view.stage_of(peer, context.transport.now()),
            context.transport.now,
            VISITOR_BYTES + 16 * manifest.tokens_per_microbatch,  # tokens and labels
            self._member.membership.admission,
            context.view.introduced,
            context.view.network_at,
            Allowance.shared(*VolunteerLimits.of(self._member.config).visitors_bytes(*VISITOR_DOWNLOADS)),
        )

    # --- beginning ----------------------------------------------------------------------------

    async def start(self, checkpoint: Checkpoint | None = None, is_move: bool = False) -> None:
        """Get the stage's state, then answer peers and say so in the DHT.

        Raises `UserError` with what to do. A node that moves does not begin with a state of its own where there
        are replicas to take it from: it raises `JoinError` instead.
        """
        member, context, replica, discovery = self._member, self.context, self.replica, self._discovery
        checkpoint = await self.checkpoints.of_stage(checkpoint)
        await discovery.announce()
        context.events.begin(f"getting the state of stage {self.stage}", lambda: self.trainer.downloading)
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
        keep(
            "collecting receipts", self._receipts.run, "Others do not sign for what this node does for them."
        )
        keep("keeping history", self._keep_history, "Whoever begins to watch later sees less.")
        keep("getting the tokenizer", member.tokenizer.get_in_time, "Others cannot get it from this node.")
        context.events.say(
            f"Serving stage {self.stage} of {context.manifest.stages} of run '{context.manifest.name}' "
            f"({replica.parameters:,} parameters) from step {replica.step}, round {replica.round}.",
            "serving",
            stage=self.stage,
            step=replica.step,
            round=replica.round,
        )
        context.events.begin("waiting for the first step", self._microbatches_done, self._missing_stages)

    def _microbatches_done(self) -> str:
        batch = self.context.manifest.inner.microbatches
        return f"{self.context.throughput.microbatches} of {batch} microbatches are through"

    def _missing_stages(self) -> str:
        """Name the stages beside this one that nobody serves; the line that brings somebody is logged once."""
        view, now = self.context.view, self.context.transport.now()
        missing = [
            stage
            for stage in self._neighbours
            if stage != self.stage
            and not any(member.announcement.state in TRAINED for member in view.members(stage, now))
        ]
        if not missing:
            return ""
        if missing != self._told_missing:
            self._told_missing = missing
            address = min(self.context.transport.addresses_to_join(), key=is_loopback)
            token = " --token TOKEN" if self.context.manifest.access.private else ""
            told = "Another machine serves stage %s with: noloco join %s --stage %s%s"
            logger.info(told, missing[0], address, missing[0], token)
        return missing_sentence(missing)

    async def _load_state(self, checkpoint: Checkpoint | None, is_move: bool) -> bool:
        """Load the state; returns whether it is there. The record is renewed meanwhile: a download may outlast it."""
        member, config = self._member, self._member.config
        wanted = WantedState.of(self.context.manifest, self.stage, self.replica.parameters)
        self._first_state = FirstState(
            self.context, self.replica, self.checkpoints, self._discovery, self.trainer,
            StageCopies(member.membership, wanted), member.plan,
            config.from_checkpoint, config.begin_anew,
        )  # fmt: skip
        self._keep_discovery()
        try:
            return await self._first_state.load(checkpoint, is_move)
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
        if member.ways is None or member.ways.has_looked.is_set():
            self._tell_how_to_join()
        else:
            self._background.spawn(self._tell_once_known(member.ways), "telling how others join")

    async def _tell_once_known(self, ways: WaysIn) -> None:
        """Log the lines to join with once this node knows whether others can dial it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_LOOK):
                await ways.has_looked.wait()
        self._tell_how_to_join()

    def _tell_how_to_join(self) -> None:
        transport, whose = self._member.transport, " through this node"
        if transport.joined_through:
            whose = "; not through this node, which nobody can dial, but through its peers"
        logger.info("Others may join%s:", whose)
        addresses = transport.addresses_to_join()
        for address in [one for one in addresses if not is_loopback(one)] or addresses:
            logger.info("  noloco join %s", address)

    # --- what others see ----------------------------------------------------------------------

    async def announce(self, state: State) -> None:
        """Tell others the new state of this node, the sooner the better. Raises as `Transport.put` does."""
        self.public_state = state
        await self._discovery.announce()

    def _announcement(self) -> Announcement:
        may_serve = self._member.abilities.may_serve
        return announcement(self.context, self.replica, self.public_state, self._since, may_serve)

    async def _on_stats(self, request: Request[GetStats]) -> Answer[NodeStats]:
        awaited = None if self._first_state is None else self._first_state.awaited
        return Answer(statistics(self.context, self.replica, self.public_state, self._member.since, awaited))

    async def _keep_history(self) -> None:
        while True:
            point = history_point(self.context)
            self._member.history.add(point.time, point)
            await asyncio.sleep(HISTORY_SECONDS)

    # --- giving it up -------------------------------------------------------------------------

    async def withdraw(self) -> None:
        """Withdraw the record: others stop routing here while what is in flight is finished.

        The others that train a small stage are shown so at once: one of them may be the last from now on.
        """
        seconds, context, trained = self._member.time_to_end(), self.context, self.public_state == "serving"
        await attempt(lambda: self.announce("leaving"), "withdrawing the record", seconds)
        others = {*context.view.serving(self.stage, context.transport.now())} - {context.me}
        if trained and len(others) <= FEW_OTHERS:
            telling = show(context.rpc, sorted(others))
            await attempt(lambda: telling, "telling the stage of it", min(seconds, SETTLE_SECONDS))

    async def leave(self) -> None:
        """Save, withdraw, give up what is in flight. Each step is tried whatever becomes of the others."""
        await self._stop_gossip()
        is_readable = self.context.compute.failure is None
        unsaved = self._is_whole and is_readable and self.public_state != "finished"
        saving = (
            [attempt(self.checkpoints.save, "saving the state", self._member.time_to_end())]
            if unsaved
            else []
        )
        await all_of(self.withdraw(), *saving, self._settle())
        await self._close_pipeline()
        self.context.events.say("Left the swarm.", "left", step=self.replica.step, round=self.replica.round)

    def progress(self) -> dict[str, int]:
        """The progress of this node, for whoever asks."""
        replica = self.replica
        tokens = self.context.counters.tokens
        return {"stage": self.stage, "step": replica.step, "round": replica.round, "tokens": tokens}

    async def copied(self) -> Checkpoint | None:
        """The state to go on from after a rest, on the host, with all microbatches whose gradients are in, or None.

        Raises nothing: what cannot be copied is told, and the last checkpoint on disk stands.
        """
        await self._stop_gossip()
        await self._close_pipeline()
        if not self._is_whole:
            return None
        await self._settle()
        taken: list[Checkpoint] = []

        async def take() -> None:
            await self.trainer.step_with_what_is_in()
            taken.append(await self.checkpoints.taken())

        await attempt(take, "copying the state", self._member.time_to_end())
        return taken[0] if taken else None

    async def _settle(self) -> None:
        """Exchange the last receipts, as far as others are quick, and save what they say."""
        await attempt(
            self._receipts.collect, "collecting receipts", min(SETTLE_SECONDS, self._member.time_to_end())
        )
        self._receipts.save()

    async def end(self) -> None:
        """Answer nobody any more, and end every part."""
        await self._stop_gossip()
        await self._close_pipeline()
        rpc = self._member.rpc
        rpc.stop_handling(Traffic.PIPELINE, Traffic.PAIRING, Traffic.GOSSIP, Traffic.STATE, GetBacklog)
        rpc.handle(GetStats.answered_by(_between_stages))

    async def _stop_gossip(self) -> None:
        await self._background.close()
        await attempt(self.rounds.close, "stopping the gossip", self._member.time_to_end())

    async def _close_pipeline(self) -> None:
        await attempt(self._pipeline.close, "closing the pipeline", self._member.time_to_end())


async def _on_history(history: Thinned[HistoryPoint], request: Request[GetHistory]) -> Answer[History]:
    return Answer(History(points=[point for _, point in history.all()]))


async def _between_stages(request: Request[GetStats]) -> Answer[NodeStats]:
    raise Refused("moving", "this node is between two stages")
