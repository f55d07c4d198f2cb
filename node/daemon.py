"""One node's life: join, take a stage, train, leave."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from node.checkpoints import Checkpoints
from node.compute import Compute, Priority
from node.config import NodeConfig
from node.context import Context, Counters
from node.copies import copies_of
from node.data import Corpus, load_corpus
from node.discovery import Discovery
from node.evaluation import EvaluationService
from node.events import Events
from node.execution import choose_execution, described
from node.greeting import serve_greeting
from node.joining import find_run, find_stage
from node.link_probes import LinkProbes
from node.links import Links
from node.membership import View
from node.pipeline import Pipeline
from node.portrait import announcement, statistics
from node.ports import tcp_port
from node.replica import PIECE_PARAMETERS, Replica
from node.resources import free_memory, require_disk, require_memory
from node.rounds import Rounds
from node.stage_work import StageWork
from node.state_directory import Checkpoint, StateDirectory
from node.state_transfer import StateService
from node.trace import NO_TRACE, Trace
from node.trainer import Trainer
from protocol.announcement import Announcement, State
from protocol.errors import DataError
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
from protocol.transport.base import Transport

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 20.0  # what a graceful end may take before it is cut short
OLD_ROUNDS = 4  # a checkpoint this many rounds behind the live replicas is not worth going on from


@dataclass(frozen=True)
class Surroundings:
    """Everything that differs between a real node and a simulated one."""

    transport: Transport
    compute: Callable[[], Compute]
    events: Events
    rng: random.Random
    state: StateDirectory | None = None
    corpus: Callable[[Manifest, Sequence[str]], Corpus] | None = None
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
        self._since = 0.0

    async def run(self) -> None:
        """The whole life. Raises `UserError` with what to do when the node cannot join."""
        try:
            await self.join()
            if await self.train():
                await self.stay_available()
        finally:
            await self.leave()

    def stop(self) -> None:
        """Leave gracefully: finish what is in flight, save, withdraw."""
        self._leaving.set()
        if self._trainer is not None:
            self._trainer.stop()

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
        config, device = self._config, torch.device(self._config.device)
        require_memory(manifest, stage, recomputes=config.recompute != "off")
        execution = choose_execution(
            manifest, stage, device, free_memory(device), config.precision, config.recompute, config.compile
        )
        if state is not None:
            require_disk(manifest, stage, state.path)
        corpus = self._load_corpus() if stage == 0 else None
        self._compute = self.surroundings.compute()
        self.context = self._make_context(stage)
        self.replica = await self._compute.run(
            Priority.SERVE, self.surroundings.replica, manifest, stage, self._config.device
        )  # nothing else waits yet; it is no training
        self.replica.execute(execution)
        self._events.say(f"Stage {stage} {described(execution, manifest, stage)}.", "execution")
        await self._take_up_training(stage, checkpoint, corpus)

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

    async def _take_up_training(
        self, stage: int, checkpoint: Checkpoint | None, corpus: Corpus | None
    ) -> None:
        """Build the parts, get the stage's state, then answer peers and say so in the DHT."""
        context, replica, rng = self.context, self.replica, self.surroundings.rng
        work = StageWork(context.manifest, replica, copies_of(replica.device))
        self._pipeline = Pipeline(context, replica, work, random.Random(rng.getrandbits(64)))
        self._rounds = Rounds(context, replica, random.Random(rng.getrandbits(64)))
        self._trainer = Trainer(
            context, replica, self._pipeline, self._rounds, corpus, rng, self._config.max_minutes * 60
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
        await self._load_state(stage, checkpoint)
        self.public_state = "serving"
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

    def _load_corpus(self) -> Corpus:
        manifest = self.signed.manifest
        if self.surroundings.corpus is not None:
            return self.surroundings.corpus(manifest, self._config.data)
        if not self._config.data and manifest.data.source == "local":
            raise DataError(
                f"Stage 0 of run '{manifest.name}' trains on text of your own: name it with --data FILE "
                "(globs may be used, and --data may be given several times), or serve another --stage."
            )
        source: str | Sequence[str] = self._config.data or manifest.data.source
        corpus = load_corpus(source, manifest.data.held_out)
        corpus.require(manifest.data.sequence_tokens)
        return corpus

    async def _load_state(self, stage: int, checkpoint: Checkpoint | None) -> None:
        """From the own checkpoint when it is recent, else from live replicas, else from the seed."""
        holders = [p for p in self.view.holding(stage, self.transport.now()) if p != self.context.me]
        furthest = max(
            (
                m.announcement.round
                for m in self.view.members(stage, self.transport.now())
                if m.peer in holders
            ),
            default=0,
        )
        if checkpoint is not None and checkpoint.stage == stage:
            if furthest - checkpoint.state.round < OLD_ROUNDS:
                await self.checkpoints.restore(checkpoint)
                return
            self._events.say(
                "The saved state is far behind the other replicas; taking theirs.", "checkpoint-old"
            )
        if holders:
            assert self._trainer is not None
            await self._trainer.download()
        else:
            self._events.say(
                f"First replica of stage {stage}: starting from the run's seed.", "initialised", stage=stage
            )

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

    async def train(self) -> bool:
        """Whether the run was trained to its end, rather than stopped."""
        assert self._trainer is not None
        if self._leaving.is_set():
            return False
        training = asyncio.get_running_loop().create_task(self._trainer.run())
        leaving = asyncio.get_running_loop().create_task(self._leaving.wait())
        try:
            await asyncio.wait([training, leaving], return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                return training.result()
            logger.info("Leaving: finishing the microbatches in flight (again Ctrl-C leaves at once).")
            await asyncio.wait([training], timeout=LEAVE_SECONDS)
            return training.done() and training.result()
        finally:
            training.cancel()
            leaving.cancel()
            await asyncio.gather(training, leaving, return_exceptions=True)

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

    # --- leaving ------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Withdraw the record, save, close. Each step is tried whatever becomes of the others."""
        if self._discovery is None:  # joining failed half way: there is nothing to save or withdraw
            await self._close()
            return
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._try(self._rounds.close, "stopping the gossip")
        if self.public_state != "finished":
            await self._try(self.checkpoints.save, "saving the state")
        self.public_state = "leaving"
        await self._try(self._discovery.announce, "withdrawing the record")
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
            async with asyncio.timeout(LEAVE_SECONDS):
                await action()
        except Exception as error:  # noqa: BLE001  leaving goes on; the reason is told
            logger.warning("A problem while %s: %s", doing, error or type(error).__name__)

    # --- what others see ----------------------------------------------------------------------

    def _announcement(self) -> Announcement:
        return announcement(self.context, self.replica, self.public_state, self._since)

    async def _on_stats(self, request: Request) -> Answer:
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
