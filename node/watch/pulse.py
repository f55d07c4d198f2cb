"""A node's training, as a line for people, and what came of it at the end. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from node.watch.loss_history import has_jumped
from node.watch.time_use import Idle
from node.watch.words import count, duration, jump_sentence
from protocol.messages.peers import LossBest, LossTrend
from protocol.windows import amount, counted

BUSY = 0.97  # above it, what is waited for is not worth a word


@dataclass(frozen=True)
class Pulse:
    """A node at one moment; rates and shares are of about the last minute."""

    stage: int
    step: int
    total_steps: int
    loss: float | None
    trend: LossTrend | None
    tokens_per_second: float
    busy: float
    idle: dict[Idle, float]
    upload: float  # bytes per second, and so is `download`
    download: float
    given: int  # tokens in all lives of this node
    seconds_left: float | None
    no_peer_seconds: float = 0.0  # for which nobody serves the next stage
    next_stage: int = 0
    of_peak: float | None = None  # of what the device can do; None where that is not known
    device: str = ""  # as its driver calls it
    best: LossBest | None = None  # loss so far
    time: float = 0.0  # wall clock
    passed_on: int = 0  # bytes, between others that cannot dial each other
    met_directly: int = 0  # peers behind other routers, where this node is behind one, too
    relayed: int = 0  # peers that third ones pass streams on to and from


def sentence(pulse: Pulse) -> str:
    """The whole pulse in one line."""
    said = [step_in_words(pulse), loss_in_words(pulse), speed_in_words(pulse), busy_in_words(pulse)]
    said += [*peak_in_words(pulse), network_in_words(pulse), f"{count(pulse.given)} tokens given in all"]
    return ", ".join(filter(None, said)) + "."


def step_in_words(pulse: Pulse) -> str:
    left = f", about {duration(pulse.seconds_left)} left" if pulse.seconds_left is not None else ""
    return f"Step {pulse.step:,} of {pulse.total_steps:,}{left}"


def loss_in_words(pulse: Pulse) -> str:
    if pulse.loss is None:
        return "no loss yet"
    if pulse.best is not None and has_jumped(pulse.loss, pulse.best):
        return jump_sentence(pulse.loss, pulse.best, pulse.time)
    if pulse.trend is None:
        return f"loss {pulse.loss:.3f}"
    trend = pulse.trend
    return f"loss {trend.now:.3f} ({trend.before:.3f} {duration(trend.seconds)} ago)"


def speed_in_words(pulse: Pulse) -> str:
    if pulse.no_peer_seconds:
        return f"nobody serves stage {pulse.next_stage} for {duration(pulse.no_peer_seconds)}"
    return f"{pulse.tokens_per_second:,.0f} tokens/s"


def busy_in_words(pulse: Pulse) -> str:
    """The share of the time in which it computes, and what takes most of the rest."""
    cause = max(pulse.idle, key=lambda cause: pulse.idle[cause], default=None)
    if cause is None or pulse.busy > BUSY:
        return f"busy {pulse.busy:.0%}"
    share = min(pulse.idle[cause], 1 - pulse.busy)  # a piece of work counts there once it is over
    return f"busy {pulse.busy:.0%} (else most: {cause} {share:.0%})"


def peak_in_words(pulse: Pulse) -> list[str]:
    return [] if pulse.of_peak is None else [f"{pulse.of_peak:.0%} of the device's peak"]


def device_in_words(pulse: Pulse) -> str:
    name = "the CPU" if pulse.device == "cpu" else pulse.device
    return ", ".join([name or "unknown", *peak_in_words(pulse)])


def network_in_words(pulse: Pulse) -> str:
    up, down = (8e-6 * rate for rate in (pulse.upload, pulse.download))
    passed = f", {amount(pulse.passed_on)} passed on for others" if pulse.passed_on else ""
    met = f", {counted(pulse.met_directly, 'peer')} behind routers met directly" if pulse.met_directly else ""
    through = f", {counted(pulse.relayed, 'peer')} reached through others" if pulse.relayed else ""
    return f"{up:.3g} Mbit/s up, {down:.3g} down{passed}{met}{through}"


def farewell(seconds: float, tokens: int, rounds: int, arguments: Sequence[str] | None) -> str:
    """A summary of a life and the command that begins the next one, left out where `arguments` is None."""
    gave = f"This node was here for {duration(seconds)} and gave {count(tokens)} tokens in {rounds:,} rounds."
    return (
        gave if arguments is None else f"{gave} Start it again: {shlex.join(['noloco', 'join', *arguments])}"
    )
