"""Keeps a node within its volunteer's limits: looks every few seconds, and lets it rest or compute less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

import torch

from node.giving.policy import Conditions, DutyShare, Policy, VolunteerLimits
from node.giving.rest import Rest
from node.giving.sensors import others, thermometer
from node.machine.duty import Duty
from node.storage.state_directory import StateDirectory
from node.watch.events import Events
from protocol.supervision import Supervisor
from protocol.transport.base import Transport

LOOK_SECONDS = 5.0
SAVE_LOOKS = 12  # looks from one saving of the month's bytes to the next


class Senses:
    """Reads from the machine and the clock only what the limits need. Raises what `thermometer` raises."""

    def __init__(self, limits: VolunteerLimits, device: torch.device) -> None:
        self._temperature = thermometer(device) if limits.max_temperature else lambda: None
        self._others: Callable[[], str] = (lambda: others(device)) if limits.only_idle else str

    def read(self, moved: int, now: datetime) -> Conditions:
        """Read the conditions. Takes milliseconds, or seconds where commands are asked: not for the event loop."""
        return Conditions(now, moved, self._temperature(), self._others())


class Month:
    """Bytes sent and received in the present month, over all lives of the node.

    Mutable state: which month it is, those of earlier lives, and what the transport had moved when this one began.
    """

    def __init__(self, state: StateDirectory, transport: Transport, now: datetime) -> None:
        self._state = state
        self._transport = transport
        self._name, facts = f"{now:%Y-%m}", state.facts()
        saved = facts.get("month_bytes") if facts.get("month") == self._name else 0
        self._saved = saved if isinstance(saved, int) and saved >= 0 else 0
        self._began = 0

    def moved(self, now: datetime) -> int:
        total = sum(self._transport.moved())
        if self._name != (name := f"{now:%Y-%m}"):
            self._name, self._saved, self._began = name, 0, total
        return self._saved + total - self._began

    def save(self, now: datetime) -> None:
        self._state.remember(month=f"{now:%Y-%m}", month_bytes=self.moved(now))


class Keeper:
    """Applies the volunteer's limits to a running node: looks every few seconds and pauses or slows it.

    Mutable state: the policy's, and the last verdict.
    """

    def __init__(
        self, limits: VolunteerLimits, senses: Senses, month: Month, duty: Duty, rest: Rest, events: Events
    ) -> None:
        self._policy = Policy(limits)
        self._limits = limits
        self._senses = senses
        self._month = month
        self._duty = duty
        self._rest = rest
        self._events = events
        self.verdict = DutyShare(limits.share)

    async def begin(self, supervisor: Supervisor) -> None:
        """Look at once, and then again and again, where limits depend on the time or the machine."""
        if self._limits.need_watching:
            await self.look(datetime.now().astimezone())
            stops = "This node may use more of the machine than its volunteer allows."
            supervisor.keep("keeping the volunteer's limits", self.run, stops)

    def moved(self) -> int:
        """Bytes of this month."""
        return self._month.moved(datetime.now().astimezone())

    async def run(self) -> None:
        """Look every `LOOK_SECONDS`, for ever, and now and then save what counts towards a monthly cap."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(datetime.now().astimezone())
            looks += 1
            if looks % SAVE_LOOKS == 0 and self._limits.monthly_cap:
                await asyncio.to_thread(self._month.save, datetime.now().astimezone())

    async def look(self, now: datetime) -> None:
        """Look at the machine, and do what the policy says."""
        conditions = await asyncio.to_thread(self._senses.read, self._month.moved(now), now)
        before, self.verdict = self.verdict, self._policy.judge(conditions)
        if self.verdict.share:
            self._duty.share = self.verdict.share
            self._rest.lift("limits")
            if self.verdict.reason and not before.reason:
                self._events.say(self.verdict.reason, "throttled", share=self.verdict.share)
        else:
            self._rest.ask("limits", self.verdict.reason)

    def close(self) -> None:
        """Keep what was counted."""
        if self._limits.monthly_cap:
            self._month.save(datetime.now().astimezone())
