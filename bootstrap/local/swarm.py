"""A real swarm on this machine: a seed peer here, and stages × replicas node processes, watched to the end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bootstrap.evaluation.losses import Loss, checkpoint_loss, evaluate_route, starting_loss
from bootstrap.evaluation.measured_text import MeasuredText, held_out_text
from bootstrap.export.exporting import export
from bootstrap.export.order import Order
from bootstrap.export.tokenizer import transformers_tokenizer
from bootstrap.founding.run import found
from bootstrap.founding.seed_peer import SeedPeer
from bootstrap.local.summary import Summary
from bootstrap.looking.observer import Observer, Sighting
from bootstrap.looking.spread import measure_spread
from bootstrap.looking.table import Picture, display, save_svg, tokens_trained
from bootstrap.traces.merge import FILE_NAME, merge_traces, require_writable
from node.data.background import in_background
from node.data.batches import TrainingData
from node.data.corpus import Corpus
from node.data.opening import DataPlan, open_data, token_name
from node.data.paths import DEFAULT_FIELD
from node.machine.processes import Child, Children
from node.machine.signals import on_interrupt
from protocol.errors import NolocoError, StateError, UserError
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.transport.base import PeerId
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

LOOK_SECONDS = 1.0
EVALUATION_SECONDS = 30.0
START_SECONDS = 180.0  # for all nodes to import torch and join, on two busy cores
FINISH_SECONDS = 60.0  # beyond the training time, for the last rounds


@dataclass(frozen=True)
class Plan:
    """What `noloco swarm` was asked for."""

    manifest: Manifest
    replicas: int
    directory: Path
    minutes: float
    validation_sequences: int
    summary: Path
    picture: Path | None = None
    trace: Path | None = None  # of all nodes
    data: tuple[str, ...] = ()  # as --data; none is the run's own
    text_field: str = DEFAULT_FIELD
    tokenizer: bytes | None = None  # the run's tokenizer.json
    from_checkpoint: str | None = None  # the first replicas' weights; a directory or a name on the hub

    @property
    def data_plan(self) -> DataPlan:
        """All nodes and the evaluation share one store of documents."""
        return DataPlan(self.data, self.text_field, self.directory / "documents")


async def run_swarm(plan: Plan, console: Console) -> Summary:
    """Until it is trained, or Ctrl-C."""
    local = LocalSwarm(plan, console)
    on_interrupt(lambda _: local.stop())
    return await local.run()


class LocalSwarm:
    """Mutable state: the children, the last sightings, and the summary as it fills."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._children = Children()
        self._names: dict[PeerId, str] = {}
        self._sightings: list[Sighting] = []
        self._summary = Summary(preset=plan.manifest.name, unit=token_name(plan.manifest))
        self._last_busy: Picture | None = None  # with every node training
        self._data: TrainingData
        self._text: MeasuredText  # held out of it
        self._began = time.monotonic()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ctrl-C: end the training, stop the nodes gracefully, write what was measured."""
        self._console.print("Stopping the nodes; they save their state first.")
        self._stopping.set()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> Summary:
        """Train to the end or until stopped. Leaves no child process behind, whatever happens."""
        plan = self._plan
        if plan.trace is not None:
            require_writable(plan.trace)
        founded = found(plan.directory, plan.manifest, plan.tokenizer)
        self._summary.run_id = founded.signed.run_id
        seed = SeedPeer(
            Libp2pTransport(
                founded.seed_key, Libp2pConfig(host="127.0.0.1", relay=False, nat_port_map=False)
            ),
            founded.signed,
            founded.tokenizer,
        )
        try:
            observer = Observer(seed.transport, seed.rpc, founded.signed)
            await self._until(self._begin(seed))
            await self._until(self._watch(observer))
            await self._until(self._conclude(observer))
        finally:
            self._summary.wall_seconds = round(self._elapsed, 3)
            self._summary.write(plan.summary)
            await self._children.stop()
            await seed.close()
            await self._gather_traces()
        return self._summary

    async def _begin(self, seed: SeedPeer) -> None:
        self._data = await in_background("data", self._open_data)
        await seed.start()
        await self._start_nodes(seed.transport.addresses()[0])
        await self._prepare()

    def _open_data(self) -> TrainingData:
        """Before the nodes do, so that wrong data are told of at once."""
        plan = self._plan
        data = open_data(plan.manifest, plan.data_plan, plan.tokenizer)
        data.require(plan.manifest.data.sequence_tokens)
        tokenizer = transformers_tokenizer(plan.manifest, plan.tokenizer)
        self._text = held_out_text(plan.manifest, data, plan.validation_sequences, tokenizer)
        return data

    async def _gather_traces(self) -> None:
        """The nodes have ended: make one file of theirs. A failure costs that file, not what was measured."""
        plan = self._plan
        if plan.trace is None:
            return
        try:
            await asyncio.to_thread(merge_traces, self._children.all, plan.directory, plan.trace)
        except StateError as error:
            self._console.print(f"{error}", soft_wrap=True)
        else:
            self._console.print(
                f"Trace of all nodes: {plan.trace}. Open it in ui.perfetto.dev.", soft_wrap=True
            )

    async def _until(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work unless Ctrl-C comes first or has come."""
        if self._stopping.is_set():
            work.close()
            return
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for running in (task, stopping):
                running.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def _start_nodes(self, address: str) -> None:
        plan = self._plan
        for number in range(plan.manifest.stages * plan.replicas):
            stage, replica = number % plan.manifest.stages, number // plan.manifest.stages
            name = f"s{stage}r{replica}"
            state = plan.directory / name
            state.mkdir(parents=True, exist_ok=True)
            self._names[Identity.load_or_create(state / "identity.key").peer_id] = name
            command = [
                sys.executable, "-m", "node.cli", "--join", address, "--stage", str(stage),
                "--state-dir", str(state), "--host", "127.0.0.1", "--no-relay", "--threads", "1",
                "--device", "cpu",
            ]  # fmt: skip
            if stage == 0:  # the others end when it has
                command += ["--max-minutes", str(plan.minutes), *plan.data_plan.flags()]
            if plan.from_checkpoint is not None:
                command += ["--from-checkpoint", plan.from_checkpoint]
            if plan.trace is not None:
                (state / FILE_NAME).unlink(missing_ok=True)  # of an earlier swarm in the same directory
                command += ["--trace", str(state / FILE_NAME)]
            await self._children.start(name, command, state / "output.log")
        self._console.print(
            f"Started {len(self._children.all)} nodes: {plan.manifest.stages} stages × {plan.replicas} replicas, "
            f"each with its own libp2p daemon. Their logs: {plan.directory}/s*r*/output.log"
        )

    def _starting_loss(self) -> Loss:
        if self._plan.from_checkpoint is not None:
            return checkpoint_loss(self._plan.from_checkpoint, self._text)
        return starting_loss(self._plan.manifest, self._text)

    async def _prepare(self) -> None:
        """While the nodes start: the text, its entropies, and the loss of the weights that all start from."""
        summary, data = self._summary, self._data
        loss = await in_background("loss", self._starting_loss)
        summary.validation_loss.append((0, 0.0, round(loss.nats, 6)))
        self._console.print(f"The model starts at {loss.nats:.3f} nats per {summary.unit}.")
        if isinstance(data, Corpus):
            summary.unigram_entropy = await asyncio.to_thread(data.unigram_entropy)
            summary.bigram_entropy = await asyncio.to_thread(data.bigram_entropy)
            self._console.print(
                f"Held-out text: unigram entropy {summary.unigram_entropy:.3f}, "
                f"bigram {summary.bigram_entropy:.3f} nats per byte."
            )

    # --- watching -----------------------------------------------------------------------------

    async def _watch(self, observer: Observer) -> None:
        """Show the swarm until every live node has finished."""
        draw, close = display(self._console)
        next_evaluation = self._elapsed + EVALUATION_SECONDS
        deadline = self._elapsed + START_SECONDS + self._plan.minutes * 60 + FINISH_SECONDS
        everyone = len(self._children.all)
        seen_all = False
        try:
            while self._elapsed < deadline:
                self._sightings = await observer.look()
                picture = self._picture()
                draw(picture)
                states = [s.stats.state for s in self._sightings if s.stats is not None]
                if states.count("serving") == everyone:
                    self._last_busy = picture
                self._require_alive(seen_all)
                seen_all = seen_all or len(states) == everyone
                alive = sum(child.is_running for child in self._children.all)
                if seen_all and len(states) >= alive and all(state == "finished" for state in states):
                    self._summary.complete = True
                    return
                if seen_all and self._elapsed >= next_evaluation:
                    await self._evaluate(observer)
                    next_evaluation = self._elapsed + EVALUATION_SECONDS
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            close()
        raise UserError(
            f"The swarm did not finish in {deadline:.0f} s. The nodes' logs in {self._plan.directory} tell why."
        )

    def _picture(self) -> Picture:
        manifest = self._plan.manifest
        return Picture(
            title=f"run '{manifest.name}'  {manifest.stages} stages × {self._plan.replicas} replicas",
            seconds=self._elapsed,
            expected=len(self._children.all),
            sightings=self._sightings,
            names=self._names,
            validation=self._summary.validation_loss,
            bigram=self._summary.bigram_entropy,
        )

    def _require_alive(self, seen_all: bool) -> None:
        """A node that dies before all have joined means that the swarm cannot start; later it goes on."""
        dead = [child for child in self._children.all if not child.is_running]
        if dead and (not seen_all or len(dead) == len(self._children.all)):
            raise UserError(f"Node {dead[0].name} ended early. Its last words:\n{_last_words(dead[0])}")

    async def _evaluate(self, observer: Observer) -> None:
        """Add a point to the curve, measured along one route; a replica lost meanwhile costs the point."""
        tokens = tokens_trained(self._sightings)
        try:
            route = (await observer.routes())[0]
            loss = await evaluate_route(observer, self._text, route)
        except NolocoError:
            return
        self._summary.validation_loss.append((tokens, round(self._elapsed, 3), round(loss.nats, 6)))

    # --- the end ------------------------------------------------------------------------------

    async def _conclude(self, observer: Observer) -> None:
        """Validation loss as the mean over replicas, the true spread, the export and its loss."""
        summary = self._summary
        self._console.print("Training is complete. Measuring, then exporting one replica of each stage.")
        if self._plan.picture is not None and self._last_busy is not None:
            save_svg(self._plan.picture, self._last_busy)
        self._sightings = await observer.look()
        summary.tokens = tokens_trained(self._sightings)
        summary.replica_spread_estimate = self._picture().spread()
        for sighting in self._sightings:
            if sighting.stats is not None:
                peer = sighting.member.peer
                summary.add_node(self._names.get(peer, peer), peer, sighting.stats, self._names)
        routes = await observer.routes()
        losses = [(await evaluate_route(observer, self._text, route)).nats for route in routes]
        mean = sum(losses) / len(losses)
        summary.validation_loss.append((summary.tokens, round(self._elapsed, 3), round(mean, 6)))
        summary.replica_spread = await measure_spread(observer)
        await self._export(observer, routes[0], losses[0])

    async def _export(self, observer: Observer, route: list[PeerId], swarm_loss: float) -> None:
        directory = self._plan.directory / "export"
        order = Order(directory, route=route, validation_loss=swarm_loss)
        exported = await export(observer, order, self._plan.tokenizer)
        loss = await asyncio.to_thread(checkpoint_loss, directory, self._text)
        self._summary.export = {
            "directory": str(directory),
            "parameters": exported.parameters,
            "loss": round(loss.nats, 8),
            "swarm_loss": round(swarm_loss, 8),
            "difference": abs(loss.nats - swarm_loss),
        }


def _last_words(child: Child) -> str:
    assert child.log is not None
    lines = child.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join("  " + line for line in lines[-8:]) or "  (it said nothing)"
