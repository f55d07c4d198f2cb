"""One node's life: join, take a stage, train, perhaps move to another stage, leave."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any, Literal

from node.config import NodeConfig
from node.context import Context
from node.giving.ledger import ContributionLedger
from node.giving.rest import Rest
from node.links.links import Links
from node.membership.joining import find_run, payload_limits, serve_greeting
from node.membership.moving import Mover, OwnersPlan
from node.membership.newcomer import found_stage
from node.membership.view import View
from node.model.replica import Replica
from node.process.entering import enter_run, equip, save_past
from node.process.last_replica import what_leaving_costs
from node.process.resting import release_memory, set_aside, stand_down
from node.rounds.rounds import Rounds
from node.service.node_resources import NodeResources, Surroundings, attempt
from node.service.service import Service, taken_stage
from node.state.checkpoints import Checkpoints
from node.storage.checkpoint_files import Checkpoint
from node.watch.health import report_of
from protocol.errors import NodeFailed, NolocoError, ResourceError
from protocol.records.announcement import State
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor, cancelled, node_failed, until_event
from protocol.transport.base import Transport
from protocol.windows import short, window

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 40.0  # what a graceful end may take before it is cut short, where nobody says less
FINISH_SHARE = 0.5  # of that is for the microbatches in flight; the rest for saving and saying goodbye
MOVE_SECONDS = 120.0  # what they may take before a move: nobody waits for it

End = Literal["complete", "left", "moving", "resting"]  # of training at a stage


class Node:
    """One node from joining a run to leaving it, at one stage after another."""

    def __init__(self, config: NodeConfig, surroundings: Surroundings) -> None:
        self._failure: NodeFailed | None = None  # of a part that this node cannot go on without
        self._failed = asyncio.Event()
        supervisor = Supervisor(surroundings.events.warn, self._fail)
        surroundings.transport.supervise(supervisor.group())
        watch = surroundings.trace.frames()
        rpc = surroundings.rpc(surroundings.transport, watch=watch, supervisor=supervisor.group())
        self.member = NodeResources(config, surroundings, rpc, supervisor)
        if surroundings.state is not None:
            self.member.contributions = ContributionLedger.read(surroundings.state.ledger_path)
        self._service: Service | None = None
        self._stage = AsyncExitStack()  # gives up what was taken
        self._closing = ExitStack()  # what is open as long as the node lives
        self._leaving = asyncio.Event()
        self._patience = LEAVE_SECONDS
        self._mover: Mover | None = None
        self._has_asked = False  # whether to leave, as the last of its stage
        self._target = -1  # the stage that this node is about to move to
        self.rest = Rest()

    @window
    def __repr__(self) -> str:
        peer, tasks = short(self.transport.peer_id), self.supervisor.running()
        return f"Peer: {peer} | State: {self._phase} | Stage: {self.stage} | Tasks: {tasks}"

    async def run(self) -> None:
        """Live the whole life. Raises `UserError` with what to do when the node cannot join."""
        teller = self.surroundings.teller
        if teller is not None:
            self.member.supervisor.group().keep(
                "telling how it goes", lambda: teller.run(lambda: self._service), "People hear nothing of it."
            )
        try:
            await until_event(self._live(), self._failed)
            if self._failure is not None:
                raise self._failure
        except NolocoError:
            raise
        except Exception as bug:
            raise node_failed("training", bug, "") from bug
        finally:
            await self.leave()

    async def _live(self) -> None:
        if reason := self.rest.reason:
            sentence = "A limit of yours forbids to train now."
            self.member.events.say(sentence, "waiting-to-join", reason=reason)
            await self._rest("waiting before it joins")
        await until_event(self.join(), self._leaving)
        while (end := await self.train()) != "left":
            if end == "moving":
                await self.move()
                continue
            if end == "complete":
                await until_event(self.stay_available(), self.rest.asked)
                if self._leaving.is_set():
                    break
                await stand_down(self.member, self._serving)
            await self.pause()

    def _fail(self, failure: NodeFailed) -> None:
        self._failure = self._failure or failure
        self._failed.set()

    def stop(self, patience: float = LEAVE_SECONDS, *, asks: bool = False) -> bool:
        """Leave gracefully, within `patience` seconds: finish what is in flight, save, withdraw.

        The last that has its stage's state says what that costs; with `asks` it stays, and leaves when told again.
        Returns whether it leaves.
        """
        if not (self._leaving.is_set() or self._has_asked) and (cost := self.cost_of_leaving):
            self._has_asked = True
            again = " Ctrl-C again saves and leaves; a third one leaves at once." if asks else ""
            self.member.events.warn(cost + again, "last-replica", stage=self.stage)
            if asks:
                return False
        self._patience = patience
        self.member.leave_by = asyncio.get_running_loop().time() + patience
        self._leaving.set()
        if self._service is not None:
            self._service.trainer.stop()
        return True

    @property
    def cost_of_leaving(self) -> str:
        """What the run loses while this node is away; empty where others have its stage's state."""
        return "" if self._service is None else what_leaving_costs(self.member, self._service)

    def abandon(self) -> None:
        """Simulate kill -9: whatever still runs of this node saves nothing any more."""
        self.member.surroundings = replace(self.member.surroundings, state=None)
        if self._service is not None:
            self._service.checkpoints.stop()

    # --- joining ------------------------------------------------------------------------------

    async def join(self) -> None:
        """Get from the command line's address to a serving replica. Raises `UserError` with what to do."""
        member, transport, rpc = self.member, self.transport, self.rpc
        member.events.begin("starting the network")
        await transport.start()
        member.since = asyncio.get_running_loop().time()
        await rpc.start()
        state = member.surroundings.state
        known = state.manifest() if state is not None else None
        if known is not None:  # others that return at the same time may reach this node first
            serve_greeting(rpc, transport, known, is_seed=False)
        found = await find_run(member.config, transport, rpc, state, member.events)
        found.signed.require_trainable()
        await enter_run(member, found.signed, found.revoked, self._fail)
        rpc.limit(payload_limits(self.signed.manifest))
        checkpoint = state.checkpoint(self.signed.run_id) if state is not None else None
        member.plan = OwnersPlan(transport, self.signed, member.events)
        equip(member, checkpoint.position if checkpoint else None, self.rest.asked.is_set)
        self._closing.callback(member.data.close)
        await self._serve_where_needed(checkpoint)

    async def _serve_where_needed(self, checkpoint: Checkpoint | None = None) -> None:
        """Serve at the stage found. A claim to it is renewed until the service can announce itself."""
        member, previous = self.member, checkpoint.stage if checkpoint else None
        async with found_stage(
            member.config, member.membership, member.plan, member.abilities.serveable, previous
        ) as stage:
            await self._take(stage)
        await self._serving.start(checkpoint)

    async def _take(self, stage: int) -> None:
        taken = taken_stage(self.member, stage, self._seconds_left())
        self._service = await self._stage.enter_async_context(taken)

    def _seconds_left(self) -> float:
        return self.member.time_given(is_first_stage=self._mover is None)

    # --- training -----------------------------------------------------------------------------

    async def train(self) -> End:
        """Train at this stage until the run is complete, this node is told to leave, or another stage needs it."""
        if self._leaving.is_set():
            return "left"
        service = self._serving
        # the first stage ends the run here by itself, see `Trainer`, and the stages behind it follow
        seconds_left = self._seconds_left() or None if service.stage else None
        start = self.member.supervisor.start
        training = start(service.trainer.run(), "training")
        leaving = start(self._leaving.wait(), "waiting to leave")
        watching, called = self.member.supervisor.group(), asyncio.Event()
        watching.keep(
            "watching for stages in need", lambda: self._called_away(called), "This node does not move."
        )
        moving = start(called.wait(), "waiting to move")
        resting = start(self.rest.asked.wait(), "waiting to rest")
        try:
            parts: list[asyncio.Task[Any]] = [training, leaving, moving, resting]
            done, _ = await asyncio.wait(parts, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.member.events.say("The time given with --max-minutes is over.", "time-over")
                self.stop()
            if training.done():
                return "complete" if training.result() else "left"
            if resting.done() and not leaving.done():
                reason = self.rest.reason
                self.member.events.say(f"Pausing: {reason}", "pausing", reason=reason)
                if cost := self.cost_of_leaving:
                    self.member.events.warn(cost, "last-replica", stage=self.stage)
                await stand_down(self.member, service, training)
                return "resting"
            if moving.done():
                source, target = service.stage, self._target
                sentence = f"Moving from stage {source} to stage {target}, where this node is needed more."
                self.member.events.say(sentence, "moving", source=source, target=target)
                await service.withdraw()
                service.trainer.stop()
                await asyncio.wait(
                    [training, leaving], timeout=MOVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not self._leaving.is_set():
                    return "moving"
            logger.info("Leaving: finishing the microbatches in flight (again Ctrl-C leaves at once).")
            await asyncio.wait([training], timeout=self._patience * FINISH_SHARE)
            return "complete" if training.done() and training.result() else "left"
        finally:
            await watching.close()
            await cancelled([training, leaving, moving, resting])

    async def stay_available(self) -> None:
        """Save, say that the run is complete here, and serve the model until told to leave."""
        service = self._serving
        await service.checkpoints.try_to_save()
        await service.announce("finished")
        replica, total = service.replica, service.context.manifest.inner.total_steps
        why = "the stages before have ended" if service.stage else "time over"
        ended = f"Stopped at step {replica.run_step:,} of {total:,} ({why})"
        if replica.clock.has_ended(replica.step):
            ended = "The run is complete here"
        self.member.events.say(
            f"{ended}. This node stays to serve the model; Ctrl-C leaves.",
            "finished",
            step=service.replica.step,
            round=service.replica.round,
        )
        await self._leaving.wait()

    # --- resting ------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Do without a stage until nobody wants this node to rest any more; then serve the same stage again."""
        member = self.member
        checkpoint = await set_aside(member, self._serving, self._give_up_stage)
        if not self._leaving.is_set():
            member.leave_by = None
        member.events.say("Paused; the memory of the device is free.", "paused", reason=self.rest.reason)
        await self._rest("paused")
        member.events.phases.drop()
        if self._leaving.is_set():
            return
        member.events.say("Going on.", "resumed")
        if checkpoint is None and member.surroundings.state is not None:
            checkpoint = await asyncio.to_thread(member.surroundings.state.checkpoint, self.signed.run_id)
        await until_event(self._serve_where_needed(checkpoint), self._leaving)

    async def _rest(self, doing: str) -> None:
        """Rest as long as anybody asks for it, as a phase that shows why; or until told to leave."""
        self.member.events.begin(doing, lambda: self.rest.reason)
        await self.rest.last(self._leaving)

    # --- moving -------------------------------------------------------------------------------

    async def _called_away(self, called: asyncio.Event) -> None:
        """Set `called` and the stage to move to, once that is called for; never where a node stays."""
        abilities, source = self.member.abilities, self._serving.stage
        if not abilities.may_serve:
            return
        if self._mover is None:
            member = self.member
            self._mover = Mover(member.membership, member.plan, member.random())
        self._target = await self._mover.wait_for_call(
            source, abilities.may_serve, lambda target: abilities.check_move(source, target)
        )
        called.set()

    async def move(self) -> None:
        """Move from this stage to the one that needs replicas; to a third, or back, when that cannot be had.

        The state of the old stage is saved and stays on the disk. The move is called off where the stage has got
        replicas meanwhile, or the old one would have none.
        """
        assert self._mover is not None
        member, source = self.member, self._serving.stage
        checkpoint = await set_aside(member, self._serving, self._give_up_stage)
        if self._leaving.is_set():
            return
        member.leave_by = None
        if await self._mover.is_still_called(source, self._target):
            await until_event(self._arrive(source, self._target), self._leaving)
            await self._mover.let_go()
            return
        sentence = f"Stage {self._target} does not need this node any more: it stays at stage {source}."
        member.events.say(sentence, "move-called-off", source=source, target=self._target)
        await self._mover.call_off()
        await until_event(self._serve_again(source, checkpoint), self._leaving)

    async def _serve_again(self, stage: int, checkpoint: Checkpoint | None) -> None:
        await self._take(stage)
        await self._serving.start(checkpoint)

    async def _arrive(self, source: int, target: int) -> None:
        """Serve the stage; when that fails, choose one as a newcomer does. Raises `UserError` if that fails, too."""
        events = self.member.events
        try:
            await self._take(target)
            await self._serving.start(is_move=True)
        except NolocoError as failure:
            events.warn(f"{failure} This node chooses a stage again.", "move-failed", stage=target)
            if self._service is not None:
                await self._service.withdraw()
            await self._give_up_stage()
            if isinstance(failure, ResourceError):
                await self._serve_again(source, None)
            else:
                await self._serve_where_needed()
        arrived = self._serving.stage
        events.say(f"Moved from stage {source} to stage {arrived}.", "moved", source=source, target=arrived)
        await attempt(self.checkpoints.save, "saving the state")

    async def _give_up_stage(self) -> None:
        await self._stage.aclose()
        self._service = None
        self.member.copies.serve()  # also of this stage, while nobody else may have it
        self.member.events.phases.drop()  # of the stage's start: it would go on for ever
        release_memory(self.member.config.device)

    # --- leaving ------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Withdraw the record, save, close. Each step is tried whatever becomes of the others."""
        if self._mover is not None:
            await self._mover.let_go()
        if self._service is not None:
            await self._service.leave()
        member = self.member
        await attempt(self.rpc.close, "closing the streams", member.time_to_end())
        await attempt(self.transport.close, "closing the network", member.time_to_end())
        await self._stage.aclose()
        await attempt(lambda: save_past(member), "writing down who served what", member.time_to_end())
        self._closing.close()
        await attempt(member.supervisor.close, "ending what ran in the background", member.time_to_end())

    # --- for those who watch ------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """A report for whoever asks on this machine, see `node.watch.health`: a node that has its network is well."""
        report = report_of(self._phase, self.supervisor, self.transport) | {"name": self.member.config.name}
        if self._service is not None:
            report |= self._service.progress()
        if self.rest.reason:
            report["paused"] = self.rest.reason
        if cost := self.cost_of_leaving:
            report["last"] = cost
        return report

    @property
    def supervisor(self) -> Supervisor:
        return self.member.supervisor

    @property
    def transport(self) -> Transport:
        return self.member.transport

    @property
    def surroundings(self) -> Surroundings:
        return self.member.surroundings

    @property
    def rpc(self) -> Rpc:
        return self.member.rpc

    @property
    def view(self) -> View:
        return self.member.view

    @property
    def links(self) -> Links:
        return self.member.membership.links

    @property
    def signed(self) -> SignedManifest:
        return self.member.signed

    @property
    def _phase(self) -> str:
        if self.rest.lasts:
            return "paused"
        return "pausing" if self.rest.asked.is_set() else self.public_state

    @property
    def knows_run(self) -> bool:
        """True if this node has found its run, so that others can join through it."""
        return self.member.has_entered

    @property
    def public_state(self) -> State:
        return "joining" if self._service is None else self._service.public_state

    @property
    def service(self) -> Service | None:
        return self._service

    @property
    def stage(self) -> int | None:
        """The stage that this node has taken; None between two stages."""
        return None if self._service is None else self._service.stage

    @property
    def _serving(self) -> Service:
        if self._service is None:
            raise AttributeError("this node has taken no stage yet")
        return self._service

    @property
    def context(self) -> Context:
        return self._serving.context

    @property
    def replica(self) -> Replica:
        return self._serving.replica

    @property
    def checkpoints(self) -> Checkpoints:
        return self._serving.checkpoints

    @property
    def rounds(self) -> Rounds:
        return self._serving.rounds
