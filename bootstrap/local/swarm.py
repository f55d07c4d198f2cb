"""A real swarm on this machine: a seed peer here, and stages × replicas node processes, watched to the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from bootstrap.creating.run import Founded, SeedPeer, found
from bootstrap.display import say
from bootstrap.inspect.observer import Observer, Sighting, sampled_spreads, spread_of_all
from bootstrap.inspect.table import Picture, display, save_svg
from bootstrap.local.measuring import Measuring
from bootstrap.local.nodes import LocalNodes, LocalPlan
from bootstrap.local.page import LocalPage
from bootstrap.local.progress import StatusLine, what_nodes_do
from bootstrap.local.summary import Run, Summary, TokenCount
from bootstrap.traces import FILE_NAME, merge_traces
from node.data.opening import token_name
from node.machine.processes import on_interrupt
from node.process.dashboard_process import own_addresses
from protocol.errors import StateError, UserError
from protocol.files.keeping import own
from protocol.ground import PeerId
from protocol.messages.peers import NodeStats
from protocol.records.identity import Identity
from protocol.supervision import Supervisor, all_of, until_event
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

LOOK_SECONDS = 1.0
START_SECONDS = 180.0  # for all nodes to join, on two busy cores
FINISH_SECONDS = 60.0  # beyond the training time, for the last rounds


async def run_swarm(plan: LocalPlan, console: Console, progress: StatusLine) -> tuple[Summary, bool]:
    """Train until the end, or Ctrl-C; with the summary whether it came to its end, or had all its time."""
    local = LocalSwarm(plan, console, progress)
    on_interrupt(lambda _: local.stop())
    return await local.run(), local.had_its_time


def have_finished(own: Sequence[NodeStats], guests: Sequence[NodeStats]) -> bool:
    """Return whether the swarm's own nodes have finished.

    Its later stages go on while a guest at the first does, maybe for ever.
    """
    goes_on = any(stats.stage == 0 and stats.state != "finished" for stats in guests)
    return all(stats.state == "finished" for stats in own if stats.stage == 0 or not goes_on)


class LocalSwarm:
    """A swarm on this machine, from its founding to its summary.

    Mutable state: the nodes, the last sightings, and the summary as it fills.
    """

    def __init__(
        self,
        plan: LocalPlan,
        console: Console,
        progress: StatusLine,
        prepare: Callable[[Path], None] | None = None,
    ) -> None:
        """`prepare` is called in each node's process before it begins, with its state directory."""
        self.plan = plan
        self.nodes = LocalNodes(prepare)
        self.away: set[str] = set()  # nodes that are held up on purpose
        self.beside: Callable[[], Coroutine[object, object, None]] | None = None  # runs while all train
        self.summary = Summary(
            preset=plan.manifest.name,
            unit=token_name(plan.manifest),
            total_steps=plan.manifest.inner.total_steps,
            began=round(time.time(), 3),
        )
        self.had_its_time = False  # it was complete, or stopped by time
        self.tokens = TokenCount()
        self.names: dict[PeerId, str] = {}
        self.sightings: list[Sighting] = []
        # while all train: seconds, tokens, share of nodes there
        self._samples: list[tuple[float, int, float]] = []
        self._supervisor = Supervisor()
        self._console = console
        self._progress = progress
        self._last_busy: Picture | None = None  # with every node training
        self._measuring = Measuring(plan, self.summary)
        self._began = time.monotonic()
        self._seen_all = False
        self._training_since = 0.0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the training on Ctrl-C, stop the nodes gracefully, write what was measured."""
        self._console.print("Stopping the nodes; they save their state first.")
        self._stopping.set()

    def _say(self, sentence: str) -> None:
        say(self._console, sentence)

    def _tell(self, sentence: str, event: str, **fields: object) -> None:
        self._say(sentence)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> Summary:
        """Train to the end or until stopped. Leaves no child process behind, whatever happens.

        A summary that lies there from before is only replaced once something was measured.
        """
        plan = self.plan
        with own(plan.directory, "--state-dir"):
            return await self._run(found(plan.directory, plan.manifest, plan.tokenizer))

    async def _run(self, founded: Founded) -> Summary:
        plan, summary = self.plan, self.summary
        summary.run_id = founded.signed.run_id
        config = Libp2pConfig(host="127.0.0.1", nat_port_map=False)
        transport = Libp2pTransport(founded.seed_key, config)
        seed = SeedPeer(transport, founded.signed, founded.tokenizer, hashes=founded.hashes)
        log = plan.directory / "dashboard.log"
        page = LocalPage(plan.listening, log, self._tell, plan.page_named, plan.summary)
        try:
            page.start(lambda: own_addresses(seed.transport))
            observer = Observer(seed.transport, seed.rpc, founded.signed)
            # each is made when its turn comes: an error before would leave a coroutine that nobody awaits
            parts = (
                partial(self._begin, seed),
                partial(self._watch, observer),
                partial(self._conclude, observer),
            )
            for part in parts:
                if not self._stopping.is_set():
                    await until_event(part(), self._stopping)
        finally:
            self._progress.doing("")
            try:
                if summary.validation_loss or not plan.summary.exists():
                    self._write_summary()
            finally:
                await all_of(self.nodes.stop(), page.close())
                await seed.close()
                await self._gather_traces()
        return summary

    # --- starting -----------------------------------------------------------------------------

    async def _begin(self, seed: SeedPeer) -> None:
        """Start the nodes, and meanwhile measure the loss of the weights that all start from."""
        self._progress.doing("reading the text to train on")
        await self._measuring.open()
        await seed.start()
        address = seed.transport.addresses()[0]
        self._say(f"A node of yours joins from another terminal: {self.plan.joining(address)}")
        self._progress.doing("importing torch and compiling kernels, once for all nodes")
        await all_of(self._start_nodes(address), self._measuring.start(self._console))
        self._show_measured()

    async def _start_nodes(self, address: str) -> None:
        plan = self.plan
        for name in plan.names():
            state = plan.directory / name
            state.mkdir(parents=True, exist_ok=True)
            self.names[Identity.load_or_create(state / "identity.key").peer_id] = name
            if plan.trace is not None:
                (state / FILE_NAME).unlink(missing_ok=True)  # of an earlier swarm in the same directory
            await self.nodes.start(name, plan.arguments(name, address), state)
        self._console.print(
            f"Started {len(self.nodes.all)} nodes: {plan.manifest.stages} stages × {plan.replicas} replicas, "
            f"each with its own libp2p daemon. Their logs: {plan.directory}/s*r*/output.log"
        )
        self._progress.doing(lambda: what_nodes_do((node.name, node.directory) for node in self.nodes.all))

    # --- watching -----------------------------------------------------------------------------

    async def _watch(self, observer: Observer) -> None:
        """Show the swarm until every live node has finished."""
        if self._console.is_terminal:  # the table shows what the nodes do
            self._progress.doing("")
        draw, close = display(self._console)
        deadline = self._elapsed + START_SECONDS + self.plan.minutes * 60 + FINISH_SECONDS
        try:
            while self._elapsed < deadline:
                await self._look(observer)
                if any(sighting.stats for sighting in self.sightings):
                    draw(self._picture())
                self._require_alive()
                if not self._seen_all and len(self._answering(own=True)) == len(self.nodes.all):
                    self._begin_training(observer)
                if self._seen_all and self._is_over():
                    self.had_its_time = True
                    self.summary.complete = self._has_done_all_steps()
                    return
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._supervisor.close()
            close()
        raise UserError(f"The swarm took over {deadline:.0f} s. The logs in {self.plan.directory} say why.")

    def _begin_training(self, observer: Observer) -> None:
        """Show the table from now on, as all nodes were seen, and start what runs beside it."""
        self._seen_all = True
        self._training_since = self._elapsed
        self._progress.doing("")
        self._supervisor.spawn(self._measure_now_and_then(observer), "measuring the loss on held-out text")
        if self.beside is not None:
            self._supervisor.spawn(self.beside(), "disturbing the nodes")

    def _is_over(self) -> bool:
        own, guests = self._answering(own=True), self._answering(own=False)
        if self.plan.ends_by_clock:
            is_late = self._elapsed - self._training_since >= self.plan.minutes * 60
            return is_late or any(stats.state == "finished" for stats in own)
        alive = sum(node.is_running for node in self.nodes.all)
        return len(own) >= alive and have_finished(own, guests)

    def _has_done_all_steps(self) -> bool:
        steps = [stats.step for stats in self._answering(own=True) if stats.stage == 0]
        return max(steps, default=0) >= self.plan.manifest.inner.total_steps

    def _answering(self, own: bool) -> list[NodeStats]:
        """The last answers of the swarm's own nodes, or of guests, which have joined it since."""
        return [
            s.stats for s in self.sightings if s.stats is not None and (s.member.peer in self.names) == own
        ]

    async def _look(self, observer: Observer) -> None:
        """Look at all nodes."""
        self.sightings = await observer.look()
        self.tokens.note(self.sightings)
        self._note_in_summary()
        states = [stats.state for stats in self._answering(own=True)]
        if states.count("serving") == len(self.nodes.all):
            self._last_busy = self._picture()
        if self._seen_all and "finished" not in states:
            present = 1 - len(self.away) / len(self.nodes.all)
            self._samples.append((self._elapsed, self.tokens.total, present))

    def _note_in_summary(self) -> None:
        """Note what was seen last: Ctrl-C may come at any time, and nobody is asked any more after it."""
        self.summary.tokens = self.tokens.total
        for sighting in self.sightings:
            if sighting.stats is not None:
                peer = sighting.member.peer
                self.summary.add_node(self.names.get(peer, peer), peer, sighting.stats, self.names)

    def run_seen(self) -> Run:
        """The run since all nodes trained, and its losses."""
        losses = [(tokens, nats) for tokens, _, nats in self.summary.validation_loss]
        if not self._samples:
            return Run(losses=losses)
        first, last = self._samples[0], self._samples[-1]
        present = sum(share for _, _, share in self._samples) / len(self._samples)
        return Run(last[1] - first[1], last[0] - first[0], present, losses)

    def _picture(self) -> Picture:
        manifest = self.plan.manifest
        return Picture(
            title=f"run '{manifest.name}'  {manifest.stages} stages × {self.plan.replicas} replicas",
            seconds=self._progress.elapsed,
            stages=manifest.stages,
            expected=len(self.nodes.all) + len(self._answering(own=False)),
            sightings=self.sightings,
            names=self.names,
            validation=self.summary.validation_loss,
            is_held_out=self.summary.is_held_out,
            bigram=self.summary.bigram_entropy,
        )

    def _require_alive(self) -> None:
        """Raise `UserError` if a node died before all joined, as the swarm cannot start, or later if all died."""
        dead = [node for node in self.nodes.all if not node.is_running and node.name not in self.away]
        if dead and (not self._seen_all or len(dead) == len(self.nodes.all)):
            raise UserError(f"Node {dead[0].name} ended early. The end of its log:\n{dead[0].last_words()}")

    async def _measure_now_and_then(self, observer: Observer) -> None:
        while True:
            await asyncio.sleep(self._measuring.pause())
            if not self._console.is_terminal:  # there the table goes on
                self._progress.doing("measuring the loss on held-out text", self._measuring.progress)
            await self._measuring.on_the_way(observer, self.tokens.total)
            self._show_measured()
            self._progress.doing("")

    def _show_measured(self) -> None:
        """Write the summary so far, for the page; where that fails, the page has the next one."""
        with suppress(StateError):
            self._write_summary()

    def _write_summary(self) -> None:
        """Write the summary. Raises `StateError`."""
        self.summary.wall_seconds = round(self._elapsed, 3)
        self.summary.write(self.plan.summary)

    # --- the end ------------------------------------------------------------------------------

    async def _conclude(self, observer: Observer) -> None:
        self._say(f"{self.summary.end_in_words()}. Measuring, then exporting one replica of each stage.")
        if self.plan.picture is not None and self._last_busy is not None:
            save_svg(self.plan.picture, self._last_busy)
        summary = self.summary
        await self._look(observer)
        spreads = await sampled_spreads(observer, random.SystemRandom())
        summary.replica_spread_estimate = spread_of_all(self.plan.manifest, spreads)
        self._progress.doing("measuring the losses, then exporting", self._measuring.progress)
        await self._measuring.at_the_end(observer, summary.tokens, self.names.keys())

    async def _gather_traces(self) -> None:
        """Make one file of the ended nodes' traces. A failure costs that file, not what was measured."""
        plan = self.plan
        if plan.trace is None:
            return
        processes = {node.name: node.pid for node in self.nodes.all}
        try:
            await asyncio.to_thread(merge_traces, processes, plan.directory, plan.trace)
        except StateError as error:
            say(self._console, f"{error}")
        else:
            told = f"Trace of all nodes: {plan.trace}. Open it in ui.perfetto.dev."
            say(self._console, told)
