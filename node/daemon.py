"""One node's life: join, take a stage, train, perhaps move to another stage, leave."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from node.config import NodeConfig
from node.context import Context, Counters
from node.links.links import Links
from node.links.probes import LinkProbes
from node.machine.ports import tcp_port
from node.machine.resources import free_memory
from node.model.compute import Compute, Priority
from node.model.copies import copies_of
from node.model.evaluation import EvaluationService
from node.model.execution import choose_execution, described
from node.model.replica import PIECE_PARAMETERS, Replica
from node.model.stage import work_of
from node.model.stage_work import StageWork
from node.pipeline.pipeline import Pipeline
from node.places.abilities import Abilities, ReadCorpus
from node.places.discovery import Discovery
from node.places.greeting import serve_greeting
from node.places.joining import find_run, find_stage
from node.places.membership import View
from node.places.moving import Mover
from node.rounds.rounds import Rounds
from node.state.checkpoints import Checkpoints
from node.state.directory import Checkpoint, StateDirectory
from node.state.transfer import StateService
from node.trainer import Trainer
from node.watch.events import Events
from node.watch.portrait import announcement, statistics
from node.watch.trace import NO_TRACE, Trace
from protocol.announcement import Announcement, State
from protocol.errors import JoinError, NolocoError, Refused, ResourceError, TransportDown
from protocol.manifest import Manifest, SignedManifest
from protocol.messages import (
    Contribute,
    Evaluate,
    Forward,
    GetStateIndex,
    GetStatePiece,
    GetStats,
    Propose,
    Ready,
    Reduce,
    Release,
    SitOut,
)
from protocol.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import PeerId, Transport

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 40.0  # what a graceful end may take before it is cut short, where nobody says less
LAST_SECOND = 0.5  # what each action has when that time is over
FINISH_SHARE = 0.5  # of that is for the microbatches in flight; the rest for saving and saying goodbye
MOVE_SECONDS = 120.0  # what the microbatches in flight may take before a move: nobody waits for it
DOWNLOADS = 3  # tries to get the state of the stage that a node moves to
PAUSE_SECONDS = 5.0  # between them
OLD_ROUNDS = 4  # a checkpoint this many rounds behind the live replicas is not worth going on from


End = Literal["complete", "left", "moving"]  # of training at a stage


@dataclass(frozen=True)
class Surroundings:
    """Everything that differs between a real node and a simulated one."""

    transport: Transport
    compute: Callable[[], Compute]
    events: Events
    rng: random.Random
    state: StateDirectory | None = None
    corpus: ReadCorpus | None = None
    replica: Callable[[Manifest, int, str], Replica] = Replica
    trace: Trace = NO_TRACE


class Node:
    """Mutable state: the parts, made one after another while joining, and the public state of the node."""

    def __init__(self, config: NodeConfig, surroundings: Surroundings) -> None:
        self._config = config
        self.surroundings = surroundings
        self._events = surroundings.events
        self.transport = surroundings.transport
        self.rpc = Rpc(self.transport, watch=surroundings.trace.frames())
        self.view = View()
        self.links = Links()  # kept when the node moves to another stage
        self.public_state: State = "joining"
        self.context: Context
        self.replica: Replica
        self.signed: SignedManifest
        self._pipeline: Pipeline
        self._rounds: Rounds
        self.checkpoints: Checkpoints
        self._trainer: Trainer | None = None
        self._discovery: Discovery | None = None
        self._background: list[asyncio.Task[Any]] = []
        self._compute: Compute | None = None
        self._leaving = asyncio.Event()
        self._patience = LEAVE_SECONDS
        self._leave_by: float | None = None  # loop time; None while nobody has asked this node to leave
        self._since = 0.0
        self._stage_since = 0.0
        self._is_whole = False  # the replica has its stage's state: it is worth keeping
        self._abilities: Abilities
        self._mover: Mover | None = None
        self._target = -1  # the stage that this node is about to move to

    async def run(self) -> None:
        """The whole life. Raises `UserError` with what to do when the node cannot join."""
        try:
            await self._unless_leaving(self.join())
            while (end := await self.train()) == "moving":
                await self.move()
            if end == "complete":
                await self.stay_available()
        finally:
            await self.leave()

    def stop(self, patience: float = LEAVE_SECONDS) -> None:
        """Leave gracefully, within `patience` seconds: finish what is in flight, save, withdraw."""
        self._patience = patience
        self._leave_by = asyncio.get_running_loop().time() + patience
        self._leaving.set()
        if self._trainer is not None:
            self._trainer.stop()

    def health(self) -> dict[str, Any]:
        """For whoever asks on this machine (`node.watch.health`): well is a node that has its network."""
        report: dict[str, Any] = {"peer": self.transport.peer_id, "state": self.public_state}
        if hasattr(self, "replica"):  # not while it joins or moves
            report |= {
                "stage": self.context.stage, "step": self.replica.step, "round": self.replica.round
            }  # fmt: skip
        try:
            return report | {"healthy": True, "addresses": self.transport.addresses()}
        except TransportDown as problem:
            return report | {"healthy": False, "reason": str(problem)}

    def abandon(self) -> None:
        """For simulations of kill -9: whatever still runs of this node saves nothing any more."""
        self.surroundings = replace(self.surroundings, state=None)
        if self._discovery is not None:
            self.checkpoints.stop()

    # --- joining ------------------------------------------------------------------------------

    async def join(self) -> None:
        """From the command line's address to a serving replica. Raises `UserError` with what to do."""
        await self.transport.start()
        self._since = self.transport.now()
        await self.rpc.start()
        state = self.surroundings.state
        known = state.manifest() if state is not None else None
        if known is not None:  # others that return at the same time may reach this node first
            serve_greeting(self.rpc, self.transport, known, is_seed=False)
        self.signed = await find_run(self._config, self.transport, self.rpc, state, self._events)
        manifest = self.signed.manifest
        self.rpc.limit(payload_limits(manifest))
        serve_greeting(self.rpc, self.transport, self.signed, is_seed=False)
        checkpoint = state.checkpoint(self.signed.run_id) if state is not None else None
        me, previous = self.transport.peer_id, checkpoint.stage if checkpoint else None
        stage = await find_stage(
            self._config, self.transport, self.rpc, self.signed, self.view, me, previous, self._events
        )
        self._abilities = Abilities(self._config, manifest, state, self.surroundings.corpus)
        await self._serve(stage, checkpoint)

    async def _serve(self, stage: int, checkpoint: Checkpoint | None = None, is_move: bool = False) -> None:
        """Take the stage: its replica, its state, a record. Raises `UserError` with what to do.

        A node that moves does not begin with a state of its own where there are replicas to take it from: it
        raises `JoinError` instead.
        """
        config, device = self._config, torch.device(self._config.device)
        manifest = self.signed.manifest
        self._abilities.require(stage)
        execution = choose_execution(
            manifest, stage, device, free_memory(device), config.precision, config.recompute, config.compile
        )
        self._stage_since = self.transport.now()
        self.public_state = "joining"
        self._compute = self.surroundings.compute()
        self.context = self._make_context(stage)
        self.replica = await self._compute.run(
            Priority.SERVE, self.surroundings.replica, manifest, stage, self._config.device
        )  # nothing else waits yet; it is no training
        self.replica.execute(execution)
        self._events.say(f"Stage {stage} {described(execution, manifest, stage)}.", "execution")
        await self._take_up_training(stage, checkpoint, is_move)

    def _make_context(self, stage: int) -> Context:
        assert self._compute is not None
        trace = self.surroundings.trace
        trace.name_process(f"stage {stage} …{self.transport.peer_id[-8:]}")
        return Context(
            me=self.transport.peer_id,
            run_id=self.signed.run_id,
            manifest=self.signed.manifest,
            stage=stage,
            transport=self.transport,
            rpc=self.rpc,
            view=self.view,
            compute=self._compute,
            events=self._events,
            counters=Counters(),
            trace=trace,
            links=self.links,
        )

    async def _take_up_training(self, stage: int, checkpoint: Checkpoint | None, is_move: bool) -> None:
        """Build the parts, get the stage's state, then answer peers and say so in the DHT."""
        context, replica, rng = self.context, self.replica, self.surroundings.rng
        corpus = self._abilities.corpus() if stage == 0 else None
        work = StageWork(context.manifest, replica, copies_of(replica.device))
        self._pipeline = Pipeline(context, replica, work, random.Random(rng.getrandbits(64)))
        self._rounds = Rounds(context, replica, random.Random(rng.getrandbits(64)))
        self._trainer = Trainer(
            context, replica, self._pipeline, self._rounds, corpus, rng, self._seconds_left()
        )
        self.checkpoints = Checkpoints(context, replica, self.surroundings.state)
        self._register_handlers(stage, EvaluationService(context, work))
        neighbours = [s for s in (stage - 1, stage, stage + 1) if 0 <= s < context.manifest.stages]
        lifetime = context.manifest.limits.record_lifetime
        self._discovery = Discovery(
            self.transport,
            context.run_id,
            lifetime,
            self.view,
            self._events,
            self.surroundings.state,
            neighbours,
            self._announcement,
        )
        await self._discovery.announce()
        await self._load_state(stage, checkpoint, is_move)
        self._is_whole, self.public_state = True, "serving"
        await self._discovery.refresh()
        await self._discovery.announce()
        self._tell_addresses(stage)
        self._background.append(asyncio.get_running_loop().create_task(self._discovery.run()))
        probes = LinkProbes(self.context)
        probes.serve()
        self._background.append(asyncio.get_running_loop().create_task(probes.run()))
        saving = self.checkpoints.save_regularly(self._config.checkpoint_minutes * 60)
        self._background.append(asyncio.get_running_loop().create_task(saving))
        self._events.say(
            f"Serving stage {stage} of {context.manifest.stages} of run '{context.manifest.name}' "
            f"({replica.parameters:,} parameters) from step {replica.step}, round {replica.round}.",
            "serving",
            stage=stage,
            step=replica.step,
            round=replica.round,
        )

    def _tell_addresses(self, stage: int) -> None:
        addresses = self.transport.addresses()
        if self.surroundings.state is not None:
            self.surroundings.state.remember(port=tcp_port(addresses), stage=stage)
        self._events.emit("addresses", addresses=addresses)
        logger.info("Others may join through this node:")
        for address in addresses:
            logger.info("  noloco-node --join %s", address)

    def _seconds_left(self) -> float:
        """Of the time that the volunteer gave; 0 is no limit."""
        most, is_first = self._config.max_minutes * 60, self._mover is None
        return most if is_first or not most else max(1e-3, most - (self.transport.now() - self._since))

    async def _load_state(self, stage: int, checkpoint: Checkpoint | None, is_move: bool) -> None:
        """From the own checkpoint when it is recent, else from live replicas, else from the seed."""
        if checkpoint is not None and checkpoint.stage == stage:
            if self._furthest(stage) - checkpoint.state.round < OLD_ROUNDS:
                await self.checkpoints.restore(checkpoint)
                return
            self._events.say(
                "The saved state is far behind the other replicas; taking theirs.", "checkpoint-old"
            )
        if not await (self._download_for_move(stage) if is_move else self._download(stage)):
            self._events.say(
                f"First replica of stage {stage}: starting from the run's seed.", "initialised", stage=stage
            )

    def _holders(self, stage: int) -> list[PeerId]:
        return [p for p in self.view.holding(stage, self.transport.now()) if p != self.context.me]

    def _furthest(self, stage: int) -> int:
        """The latest round of the replicas that hold the stage's state."""
        holders, members = self._holders(stage), self.view.members(stage, self.transport.now())
        return max((m.announcement.round for m in members if m.peer in holders), default=0)

    async def _download(self, stage: int) -> bool:
        """Whether there is anyone to take the state from. When that fails the own state is kept."""
        if not self._holders(stage):
            return False
        assert self._trainer is not None
        await self._trainer.download()
        return True

    async def _download_for_move(self, stage: int) -> bool:
        """The same, tried again, also where nobody is found at first: a lookup may fail.

        Raises `JoinError` when there are replicas and none gives its state.
        """
        assert self._trainer is not None
        assert self._discovery is not None
        for attempt in range(DOWNLOADS):
            await asyncio.sleep(PAUSE_SECONDS if attempt else 0.0)
            await self._discovery.refresh()  # the node's view was that of its old stage
            if self._holders(stage) and await self._trainer.download():
                return True
        if self._holders(stage):
            raise JoinError(f"The state of stage {stage} could not be had.")
        return False

    def _register_handlers(self, stage: int, evaluation: EvaluationService) -> None:
        service = StateService(stage, self.replica, self.context.compute)
        self.rpc.handle(Traffic.CONTROL, GetStats, self._on_stats)
        self.rpc.handle(Traffic.PIPELINE, Forward, self._pipeline.on_forward)
        self.rpc.handle(Traffic.PIPELINE, Evaluate, evaluation.on_evaluate)
        self.rpc.handle(Traffic.PAIRING, Propose, self._rounds.matchmaker.on_propose)
        self.rpc.handle(Traffic.PAIRING, Ready, self._rounds.matchmaker.on_ready)
        self.rpc.handle(Traffic.PAIRING, Release, self._rounds.matchmaker.on_release)
        self.rpc.handle(Traffic.PAIRING, SitOut, self._rounds.matchmaker.on_sit_out)
        self.rpc.handle(Traffic.GOSSIP, Contribute, self._rounds.on_contribute)
        if self.context.manifest.outer.method == "diloco":
            self.rpc.handle(Traffic.GOSSIP, Reduce, self._rounds.all_reduce.on_reduce)
        self.rpc.handle(Traffic.STATE, GetStateIndex, service.on_index)
        self.rpc.handle(Traffic.STATE, GetStatePiece, service.on_piece)

    # --- training -----------------------------------------------------------------------------

    async def train(self) -> End:
        """At this stage: until the run is complete, this node is told to leave, or another stage needs it."""
        if self._leaving.is_set():
            return "left"
        assert self._trainer is not None
        training = asyncio.get_running_loop().create_task(self._trainer.run())
        leaving = asyncio.get_running_loop().create_task(self._leaving.wait())
        moving = asyncio.get_running_loop().create_task(self._called_away())
        try:
            await asyncio.wait([training, leaving, moving], return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                return "complete" if training.result() else "left"
            if moving.done():
                self._target = moving.result()
                self._tell_move(self.context.stage, self._target)
                await self._withdraw()
                self._trainer.stop()
                await asyncio.wait(
                    [training, leaving], timeout=MOVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not self._leaving.is_set():
                    return "moving"
            logger.info("Leaving: finishing the microbatches in flight (again Ctrl-C leaves at once).")
            await asyncio.wait([training], timeout=self._patience * FINISH_SHARE)
            return "complete" if training.done() and training.result() else "left"
        finally:
            for task in (training, leaving, moving):
                task.cancel()
            await asyncio.gather(training, leaving, moving, return_exceptions=True)

    async def stay_available(self) -> None:
        """The run is complete here: save, say so, and serve the model until told to leave."""
        await self.checkpoints.save()
        self.public_state = "finished"
        assert self._discovery is not None
        await self._discovery.announce()
        self._events.say(
            "The run is complete here. This node stays to serve the model; Ctrl-C leaves.",
            "finished",
            step=self.replica.step,
            round=self.replica.round,
        )
        await self._leaving.wait()

    # --- moving -------------------------------------------------------------------------------

    async def _called_away(self) -> int:
        """The stage to move to, once that is called for; never for a node that stays where it is."""
        abilities, source = self._abilities, self.context.stage
        if not abilities.may_serve:
            await asyncio.Event().wait()
        if self._mover is None:
            manifest, rng = self.signed.manifest, random.Random(self.surroundings.rng.getrandbits(64))
            work = [work_of(manifest, stage) for stage in range(manifest.stages)]
            lifetime = manifest.limits.record_lifetime
            self._mover = Mover(
                self.transport, self.rpc, self.signed.run_id, lifetime, work, self._events, rng
            )
        return await self._mover.wait(
            source, abilities.may_serve, lambda target: abilities.check_move(source, target)
        )

    def _tell_move(self, source: int, target: int) -> None:
        sentence = f"Stage {target} is short of replicas; moving there from stage {source}."
        self._events.say(sentence, "moving", source=source, target=target)

    async def _withdraw(self) -> None:
        """Others stop routing here while what is in flight is finished."""
        self.public_state = "leaving"
        assert self._discovery is not None
        await self._try(self._discovery.announce, "withdrawing the record")

    async def move(self) -> None:
        """From this stage to the one that needs replicas; to a third, or back, when that cannot be had.

        The other replicas keep the state of the old stage: what is lost are the inner steps since the last round.
        The checkpoint of the old stage stays until the new one has its state.
        """
        assert self._mover is not None
        await self._give_up_stage()
        await self._unless_leaving(self._arrive(self.context.stage, self._target))
        await self._mover.let_go()

    async def _unless_leaving(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        leaving = asyncio.get_running_loop().create_task(self._leaving.wait())
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    async def _arrive(self, source: int, target: int) -> None:
        """Serve the stage; when that fails, choose one as a newcomer does. Raises `UserError` if that fails, too."""
        try:
            await self._serve(target, is_move=True)
        except NolocoError as failure:
            self._events.warn(f"{failure} This node chooses a stage anew.", "move-failed", stage=target)
            if self._discovery is not None:
                await self._withdraw()
                await self._give_up_stage()
            me = self.transport.peer_id
            stage = await find_stage(
                self._config, self.transport, self.rpc, self.signed, self.view, me, None, self._events
            )
            await self._serve(source if isinstance(failure, ResourceError) else stage)
        arrived = self.context.stage
        self._events.say(
            f"Moved from stage {source} to stage {arrived}.", "moved", source=source, target=arrived
        )
        await self._try(self.checkpoints.save, "saving the state")

    async def _give_up_stage(self) -> None:
        """End everything that belongs to the stage but the network, and let go of its memory."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background.clear()
        self._discovery, self._is_whole = None, False
        await self._try(self._rounds.close, "stopping the gossip")
        await self._try(self._pipeline.close, "closing the pipeline")
        self.rpc.stop_handling(Traffic.PIPELINE, Traffic.PAIRING, Traffic.GOSSIP, Traffic.STATE)
        await self._try(self._end_compute, "ending the compute thread")
        self._trainer = None
        del self._pipeline, self._rounds, self.checkpoints, self.replica
        gc.collect()  # the parts know each other
        if torch.device(self._config.device).type == "cuda":
            torch.cuda.empty_cache()

    async def _end_compute(self) -> None:
        assert self._compute is not None
        await self._compute.run(Priority.SERVE, lambda: None)  # behind all that was asked for
        await self._compute.close()

    # --- leaving ------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Withdraw the record, save, close. Each step is tried whatever becomes of the others."""
        if self._mover is not None:
            await self._mover.let_go()
        if self._discovery is None:  # joining failed half way: there is nothing to save or withdraw
            await self._close()
            return
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._try(self._rounds.close, "stopping the gossip")
        is_saved = not self._is_whole or self.public_state == "finished"
        self.public_state = "leaving"
        await asyncio.gather(
            self._try(self._discovery.announce, "withdrawing the record"),
            *([] if is_saved else [self._try(self.checkpoints.save, "saving the state")]),
        )
        await self._try(self._pipeline.close, "closing the pipeline")
        self._events.say("Left the swarm.", "left", step=self.replica.step, round=self.replica.round)
        await self._close()

    async def _close(self) -> None:
        """End the network and the compute thread; also after a failed join."""
        await self._try(self.rpc.close, "closing the streams")
        await self._try(self.transport.close, "closing the network")
        if self._compute is not None:
            await self._try(self._compute.close, "ending the compute thread")

    async def _try(self, action: Callable[[], Awaitable[None]], doing: str) -> None:
        try:
            async with asyncio.timeout(self._time_to_leave()):
                await action()
        except Exception as error:  # noqa: BLE001  leaving goes on; the reason is told
            logger.warning("A problem while %s: %s", doing, error or type(error).__name__)

    def _time_to_leave(self) -> float:
        """Seconds that the next action may take; a little in any case, for it may take no more."""
        if self._leave_by is None:
            return LEAVE_SECONDS
        return max(LAST_SECOND, self._leave_by - asyncio.get_running_loop().time())

    # --- what others see ----------------------------------------------------------------------

    def _announcement(self) -> Announcement:
        return announcement(
            self.context, self.replica, self.public_state, self._stage_since, self._abilities.may_serve
        )

    async def _on_stats(self, request: Request) -> Answer:
        if self._discovery is None:
            raise Refused("moving", "this node is between two stages")
        return Answer(statistics(self.context, self.replica, self.public_state, self._since))


def payload_limits(manifest: Manifest) -> dict[Traffic, int]:
    """The largest frame of each class that this run can need, with some room for headers and scales."""
    activations = manifest.tokens_per_microbatch * (manifest.model.hidden_size * 4 + 8)
    piece = PIECE_PARAMETERS * 4
    return {
        Traffic.CONTROL: 1024 * 1024,
        Traffic.PIPELINE: activations + 64 * 1024,
        Traffic.PAIRING: 64 * 1024,
        Traffic.GOSSIP: 2 * piece + 64 * 1024,
        Traffic.STATE: 4 * piece + 64 * 1024,
    }
