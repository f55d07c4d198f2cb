"""Keeps a node within its volunteer's limits: looks every few seconds, and lets it rest or compute less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

import torch

from node.giving.line import Line
from node.giving.policy import Conditions, DutyShare, Policy, VolunteerLimits
from node.giving.rest import Rest
from node.giving.sensors import others, thermometer
from node.machine.duty import Duty
from node.watch.events import Events
from protocol.supervision import Supervisor

LOOK_SECONDS = 5.0
SAVE_LOOKS = 12  # looks from one saving of the month's bytes to the next


class Senses:
    """Reads from the machine and the clock only what the limits need. Raises what `thermometer` raises."""

    def __init__(self, limits: VolunteerLimits, device: torch.device) -> None:
        self.device = device
        self._temperature = thermometer(device) if limits.max_temperature else lambda: None
        self._others: Callable[[], str] = (lambda: others(device)) if limits.only_idle else str

    def read(self, moved: int, now: datetime) -> Conditions:
        """Read the conditions. Takes milliseconds, or seconds where commands are asked: not for the event loop."""
        return Conditions(now, moved, self._temperature(), self._others())


def local_time() -> datetime:
    return datetime.now().astimezone()


class LimitWatch:
    """Applies the volunteer's limits to a running node: looks every few seconds and pauses or slows it.

    Mutable state: the limits and what is read for them, the policy's state, what was seen last, and the last verdict.
    """

    def __init__(
        self, limits: VolunteerLimits, senses: Senses, line: Line, duty: Duty, rest: Rest, events: Events
    ) -> None:
        self._policy = Policy(limits)
        self._limits = limits
        self._senses = senses
        self.line = line
        self._duty = duty
        self._rest = rest
        self._events = events
        self._woken = asyncio.Event()
        self.seen: Conditions | None = None
        self.verdict = DutyShare(limits.share)

    async def begin(self, supervisor: Supervisor) -> None:
        """Look at once, where limits depend on the time or the machine, and then again and again."""
        if self._limits.need_watching:
            await self.look(local_time())
        stops = "This node may use more of the machine than its volunteer allows."
        supervisor.keep("keeping the volunteer's limits", self.run, stops)

    async def run(self) -> None:
        """Look every `LOOK_SECONDS`, for ever, and now and then save what counts towards a monthly cap."""
        looks = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._woken.wait()
            self._woken.clear()
            self.line.look()
            if self._limits.need_watching:
                await self.look(local_time())
            looks += 1
            if looks % SAVE_LOOKS == 0:
                await asyncio.to_thread(self.line.save, local_time())

    async def look(self, now: datetime) -> None:
        """Look at the machine, and do what the policy says."""
        senses = self._senses
        conditions = await asyncio.to_thread(senses.read, self.line.moved(now), now)
        if senses is self._senses:  # else the limits have changed meanwhile, and it looks again at once
            self._apply(conditions)

    def change(self, limits: VolunteerLimits, now: datetime) -> None:
        """Go by other limits at once; what has to be read from the machine follows within seconds.

        Raises what `thermometer` raises; nothing has changed then.
        """
        self._senses = Senses(limits, self._senses.device)
        self._limits = limits
        self._policy.change(limits)
        seen = self.seen or Conditions(now)
        self._apply(
            replace(
                seen,
                now=now,
                moved=self.line.moved(now),
                temperature=seen.temperature if limits.max_temperature else None,
                others=seen.others if limits.only_idle else "",
            )
        )
        self._woken.set()

    def _apply(self, conditions: Conditions) -> None:
        self.seen = conditions
        before, self.verdict = self.verdict, self._policy.judge(conditions)
        limits, is_quiet = self._limits, self.verdict.is_quiet and self._rest.lasts
        self.line.limit(limits.upload, limits.download, is_quiet=is_quiet)
        if self.verdict.share:
            self._duty.share = self.verdict.share
            self._rest.lift("limits")
            if self.verdict.reason and not before.reason:
                self._events.say(self.verdict.reason, "throttled", share=self.verdict.share)
        else:
            self._rest.ask("limits", self.verdict.reason)

    def close(self) -> None:
        """Keep what was counted."""
        self.line.save(local_time())
