"""The decision whether a node may run now, and how much, by the limits that its volunteer set. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from node.config import NodeConfig
from node.machine.hours import Hours
from node.machine.limits import parse_rate, parse_size

SLOWER, FASTER = 0.7, 1.1  # times the share, at each look, while it is too hot, or cool again
LEAST_SHARE = 0.1  # of the time; what is too hot even so, rests
VISITORS_SHARE = 0.1  # of the volunteer's line: those who export or look, not members that join or heal
MONTH_SECONDS = 31 * 86_400.0
MARGIN = 3.0  # °C below the limit: from there on it may compute more again
COOL = 8.0  # °C below the limit: from there on what rested may run again


@dataclass(frozen=True)
class VolunteerLimits:
    """The limits that the volunteer set; the defaults mean "no limit"."""

    hours: Hours | None = None
    network_hours: Hours | None = None
    monthly_cap: int = 0  # bytes, both ways together
    share: float = 1.0  # of the time in which the device may compute
    max_temperature: float = 0.0  # °C
    only_idle: bool = False
    upload: float = 0.0  # bytes per second
    download: float = 0.0

    @classmethod
    def of(cls, config: NodeConfig) -> VolunteerLimits:
        return cls(
            hours=Hours.parse(config.hours) if config.hours else None,
            network_hours=Hours.parse(config.network_hours) if config.network_hours else None,
            monthly_cap=parse_size(config.monthly_cap) if config.monthly_cap else 0,
            share=config.gpu_percent / 100,
            max_temperature=config.max_temperature,
            only_idle=config.only_idle,
            upload=parse_rate(config.max_upload) if config.max_upload else 0.0,
            download=parse_rate(config.max_download) if config.max_download else 0.0,
        )

    def visitors_bytes(self, once: float, rate: float) -> tuple[float, float]:
        """Bytes that visitors may take at once, and a second: a tenth of the month's cap and of the line at most.

        `once` and `rate` are what they may without any limit.
        """
        if self.upload:
            rate = min(rate, VISITORS_SHARE * self.upload)
        if self.monthly_cap:
            once = min(once, VISITORS_SHARE * self.monthly_cap / 2)
            rate = min(rate, VISITORS_SHARE * self.monthly_cap / 2 / MONTH_SECONDS)
        return once, rate

    @property
    def need_watching(self) -> bool:
        """True if what the limits allow changes with time."""
        return bool(
            self.hours or self.network_hours or self.monthly_cap or self.max_temperature or self.only_idle
        )


@dataclass(frozen=True)
class Conditions:
    """The conditions at the machine now."""

    now: datetime  # local time
    moved: int = 0  # bytes in this month
    temperature: float | None = None  # °C of the device; None is unknown
    others: str = ""  # a sentence about who else uses the machine; empty for nobody


@dataclass(frozen=True)
class DutyShare:
    """`share` of the time the device may compute; 0 is to rest. The `reason` is a sentence, empty for the usual.

    While it rests, the network may have to be left alone as well: `is_quiet`.
    """

    share: float
    reason: str = ""
    is_quiet: bool = False


class Policy:
    """Judges by the volunteer's limits whether the node may run now, and at what share of the device.

    Mutable state: the limits, the share that the temperature allows, and whether it is too hot to run at all.
    """

    def __init__(self, limits: VolunteerLimits) -> None:
        self._limits = limits
        self._share = limits.share
        self._too_hot = False

    def change(self, limits: VolunteerLimits) -> None:
        """Judge by other limits from now on. A device that was too hot is so until it has been seen cooler."""
        is_watched = bool(limits.max_temperature)
        throttled = self._share / self._limits.share if is_watched else 1.0
        self._limits, self._share = limits, limits.share * throttled
        self._too_hot &= is_watched

    def judge(self, conditions: Conditions) -> DutyShare:
        """Judge the conditions; called at each look, every few seconds."""
        share, limits = self._by_temperature(conditions.temperature), self._limits
        network = _outside("--network-hours", limits.network_hours, conditions.now)
        reasons = [_outside("--hours", limits.hours, conditions.now), network, self._cap(conditions)]
        reasons += [conditions.others, self._heat(conditions.temperature or 0.0)]
        if any(reasons):
            return DutyShare(0.0, " ".join(filter(None, reasons)), bool(network))
        if share < limits.share:
            degrees = conditions.temperature or 0.0
            return DutyShare(share, f"The device has {degrees:.0f} °C; it computes {share:.0%} of the time.")
        return DutyShare(share)

    def _heat(self, degrees: float) -> str:
        limit = self._limits.max_temperature
        if not self._too_hot:
            return ""
        return (
            f"The device has {degrees:.0f} °C, and may have {limit:.0f}; it goes on at {limit - COOL:.0f} °C."
        )

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


def _outside(flag: str, hours: Hours | None, now: datetime) -> str:
    """A sentence when it is not these hours, with their flag and when they begin; else empty."""
    if hours is None or hours.covers(now):
        return ""
    begins = hours.begins(now)
    again = f"; they begin on {begins:%a} at {begins:%H:%M}" if begins else ""
    return f"It is {now:%a %H:%M}, outside of {flag} {hours.text}{again}."
