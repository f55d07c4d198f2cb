"""The decision whether a node may run now, and how much, by the limits that its volunteer set. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from node.config import NodeConfig
from node.machine.hours import Hours
from node.machine.limits import parse_size

SLOWER, FASTER = 0.7, 1.1  # times the share, at each look, while it is too hot, or cool again
LEAST_SHARE = 0.1  # of the time; what is too hot even so, rests
MARGIN = 3.0  # °C below the limit: from there on it may compute more again
COOL = 8.0  # °C below the limit: from there on what rested may run again


@dataclass(frozen=True)
class VolunteerLimits:
    """The limits that the volunteer set; the defaults mean "no limit"."""

    hours: Hours | None = None
    monthly_cap: int = 0  # bytes, both ways together
    share: float = 1.0  # of the time in which the device may compute
    max_temperature: float = 0.0  # °C
    only_idle: bool = False

    @classmethod
    def of(cls, config: NodeConfig) -> VolunteerLimits:
        return cls(
            hours=Hours.parse(config.hours) if config.hours else None,
            monthly_cap=parse_size(config.monthly_cap) if config.monthly_cap else 0,
            share=config.gpu_percent / 100,
            max_temperature=config.max_temperature,
            only_idle=config.only_idle,
        )

    @property
    def need_watching(self) -> bool:
        """True if what the limits allow changes with time."""
        return bool(self.hours or self.monthly_cap or self.max_temperature or self.only_idle)


@dataclass(frozen=True)
class Conditions:
    """The conditions at the machine now."""

    now: datetime  # local time
    moved: int = 0  # bytes in this month
    temperature: float | None = None  # °C of the device; None is unknown
    others: str = ""  # a sentence about who else uses the machine; empty for nobody


@dataclass(frozen=True)
class DutyShare:
    """`share` of the time the device may compute; 0 is to rest. The `reason` is a sentence, empty for the usual."""

    share: float
    reason: str = ""


class Policy:
    """Judges by the volunteer's limits whether the node may run now, and at what share of the device.

    Mutable state: the share that the temperature allows, and whether it is too hot to run at all.
    """

    def __init__(self, limits: VolunteerLimits) -> None:
        self._limits = limits
        self._share = limits.share
        self._too_hot = False

    def judge(self, conditions: Conditions) -> DutyShare:
        """Judge the conditions; called at each look, every few seconds."""
        share = self._by_temperature(conditions.temperature)
        for reason in (self._hours(conditions.now), self._cap(conditions), conditions.others):
            if reason:
                return DutyShare(0.0, reason)
        limit, degrees = self._limits.max_temperature, conditions.temperature or 0.0
        if self._too_hot:
            return DutyShare(
                0.0,
                f"The device has {degrees:.0f} °C, and may have {limit:.0f}; it goes on at {limit - COOL:.0f} °C.",
            )
        if share < self._limits.share:
            return DutyShare(share, f"The device has {degrees:.0f} °C; it computes {share:.0%} of the time.")
        return DutyShare(share)

    def _hours(self, now: datetime) -> str:
        hours = self._limits.hours
        if hours is None or hours.covers(now):
            return ""
        return f"It is {now:%H:%M}; this node trains from {hours.start:%H:%M} to {hours.end:%H:%M}."

    def _cap(self, conditions: Conditions) -> str:
        if not self._limits.monthly_cap or conditions.moved < self._limits.monthly_cap:
            return ""
        moved, cap = conditions.moved / 1e9, self._limits.monthly_cap / 1e9
        return (
            f"{moved:.1f} of {cap:.1f} GB of this month are used up; it goes on when the next month begins."
        )

    def _by_temperature(self, degrees: float | None) -> float:
        """The share of the time; less and less while it is too hot, and more again once it is clearly cooler."""
        limit = self._limits.max_temperature
        if not limit or degrees is None:
            return self._share
        if self._too_hot:
            self._too_hot = degrees > limit - COOL
        elif degrees > limit:
            self._too_hot = self._share * SLOWER < LEAST_SHARE
            self._share = max(LEAST_SHARE, self._share * SLOWER)
        elif degrees < limit - MARGIN:
            self._share = min(self._limits.share, self._share * FASTER)
        return self._share
