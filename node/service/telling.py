"""Says what a node does while it lives: a line every half minute or a panel, and at the end what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from node.config import NodeConfig, arguments_of
from node.context import Context, Throughput, use_of_device
from node.model.replica import Replica
from node.service.kept_best import KeptBest
from node.storage.state_directory import StateDirectory
from node.watch.panel import panel_of
from node.watch.phases import Phases
from node.watch.pulse import Pulse, farewell, sentence
from node.watch.screen import Screen
from node.watch.time_use import TimeUse
from node.watch.trace import Track
from protocol.errors import StateError
from protocol.records.announcement import State
from protocol.windows import counted, short, window

logger = logging.getLogger("noloco")

LOOK_SECONDS = 1.0
LINE_SECONDS = 30.0
SAVE_SECONDS = 60.0  # between two times that the tokens given are written down


class Served(Protocol):
    """The part of a `node.service.service.Service` that is told of."""

    @property
    def context(self) -> Context: ...

    @property
    def replica(self) -> Replica: ...

    @property
    def public_state(self) -> State: ...


class Teller:
    """Tells people how the node does: a line every half minute or a panel, and a summary at the end."""

    def __init__(
        self, config: NodeConfig, state: StateDirectory, use: TimeUse, phases: Phases, screen: Screen | None
    ) -> None:
        self._config = config
        self._state = state
        self._use = use
        self._phases = phases
        self._screen = screen
        self._best = KeptBest(state)
        self._before = state.given()  # tokens of earlier lives
        self._tokens = self._rounds = 0
        self._of: tuple[Throughput | None, int, int] = (None, 0, 0)  # whose counts, and where they stood
        self._since = (
            0.0  # loop time at which a first stage was served; of the last line, and of the last saving
        )
        self._told = 0.0
        self._saved = 0.0

    @window
    def __repr__(self) -> str:
        given = f"{self._tokens:,} tokens, {counted(self._rounds, 'round')}"
        return f"Given: {given} in this life, {self._before:,} tokens before"

    async def run(self, service: Callable[[], Served | None]) -> None:
        """Look every second, for as long as the node lives."""
        now = asyncio.get_running_loop().time
        while True:
            self._phases.look()
            if self._looked(service()) and now() - self._saved >= SAVE_SECONDS:
                self._saved = now()
                self._save_best(service())
                await asyncio.to_thread(self.save)
            await asyncio.sleep(LOOK_SECONDS)  # without the service, whose memory may be wanted meanwhile

    def _looked(self, service: Served | None) -> bool:
        """Count and tell of the stage, if one is served now. Returns whether one is."""
        if service is None:
            return False
        self.count(service)
        if not self._phases.doing:
            self._tell(service)
        return True

    def count(self, service: Served) -> None:
        """Add what was done since the last look; a stage has counts of its own."""
        throughput, round_ = service.context.throughput, service.replica.round
        of, tokens, rounds = self._of
        if of is throughput:
            self._tokens += throughput.tokens - tokens
            self._rounds += max(0, round_ - rounds)
        self._of = throughput, throughput.tokens, round_
        self._best.recall(service.context)
        self._since = self._since or asyncio.get_running_loop().time()

    def _tell(self, service: Served) -> None:
        now = asyncio.get_running_loop().time()
        if service.public_state != "serving":
            return
        pulse = self._pulse(service, now)
        if self._screen is not None:
            context = service.context
            named = context.name or short(context.me)
            self._screen.show(panel_of(pulse, f"run '{context.manifest.name}' {named}"))
        elif not self._told:
            self._told = now  # the first line in half a minute
        elif now - self._told >= LINE_SECONDS:
            self._told = now
            logger.info(sentence(pulse))

    def _pulse(self, service: Served, now: float) -> Pulse:
        context, replica = service.context, service.replica
        counters, manifest = context.counters, context.manifest
        rate = context.throughput.tokens_per_second(now)
        use = use_of_device(context, replica, rate)
        return Pulse(
            stage=context.stage,
            step=replica.run_step,
            total_steps=manifest.inner.total_steps,
            loss=counters.losses.recent(),
            trend=counters.losses.trend(),
            best=counters.losses.best(context.view.elapsed(), context.transport.now()),
            time=context.transport.now(),
            tokens_per_second=rate,
            busy=context.compute.busy.recent_fraction(),
            idle=self._use.idle(),
            upload=self._use.bytes_per_second(Track.SEND),
            download=self._use.bytes_per_second(Track.RECEIVE),
            given=self._before + self._tokens,
            seconds_left=self._seconds_left(service, rate, now),
            no_peer_seconds=0.0 if counters.no_peer_since is None else now - counters.no_peer_since,
            next_stage=manifest.stage_after(context.stage),
            of_peak=use.share_of_peak,
            device=use.name,
            passed_on=context.transport.passed_on,
            met_directly=len(context.transport.met_directly),
            relayed=len(context.transport.relayed),
        )

    def _seconds_left(self, service: Served, rate: float, now: float) -> float | None:
        """Seconds until the run is complete at this rate or the volunteer's time over; None if neither is known."""
        inner, tokens = service.context.manifest.inner, service.context.manifest.tokens_per_microbatch
        replica = service.replica
        steps = (inner.total_steps - replica.run_step) * replica.clock.own_steps_each(replica.step)
        ends = [steps * inner.microbatches * tokens / rate] if rate else []
        if self._config.max_minutes:
            ends.append(max(0.0, self._since + 60 * self._config.max_minutes - now))
        return min(ends, default=None)

    def _save_best(self, service: Served | None) -> None:
        if service is not None:
            self._best.save(service.context)

    def save(self) -> None:
        """Write down what was given; a disk that is full has been told of by others."""
        with suppress(StateError):
            self._state.save_given(self._before + self._tokens)

    def end(self, service: Served | None, *, has_failed: bool = False) -> None:
        """Say the last words, if the node has served at all; why it failed, and what to do, is told after them."""
        if service is not None:
            self.count(service)
            self._best.save(service.context)
        if self._screen is not None:
            self._screen.close()
        if self._since:
            self.save()
            seconds = asyncio.get_running_loop().time() - self._since
            again = arguments_of(self._config.model_copy(update={"join": ()}), only_changed=True)
            logger.info(farewell(seconds, self._tokens, self._rounds, None if has_failed else again))
