"""The cost of a run to its volunteers: seconds a step, hours, bytes, power and money; what limits, what would help.

An inner step of M microbatches is modelled as the trip of one microbatch through all stages, there and back, plus M −
1 times what the slowest part, a stage's device or its link, needs for one. On a full link the two directions partly
take turns, since the flow control of one waits behind the data of the other (docs/experiments/wan.md). What one
replica sends another receives, so that on equal links every byte goes at the slower direction's speed. With a
staleness of one the trips of the next step's microbatches overlap it. At the end of a round all replicas wait for
what is averaged then, which is spread over the round's steps. Replicas are equal, so each gets as many microbatches
as it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bootstrap.checking.report import AssumedLinks, averaging_bytes, fit_of, speed_of
from node.machine.devices import Device
from node.model.memory_model import backward_bytes, forward_bytes
from node.model.stage import parameter_count
from protocol.errors import ManifestError
from protocol.run.manifest import Manifest, manifest_from

FRAMING = 1.05  # of a byte: headers of TCP and IP in packets of 1,500 bytes, and of Noise and yamux
# of the quicker direction's time on a full link, what does not overlap the slower one's: two transports alone showed
# 0.13 to 0.22 at 2 to 10 Mbit/s (docs/experiments/wan.md)
TURNS = 0.2
HELPS = 1.05  # times the speed: less is not worth a change
SHORTER = {"fp32": "bf16", "fp16": "int8", "bf16": "int8", "int8": "eden4"}
MOST_ADVICE = 3


class Limit(StrEnum):
    """The part that takes most of a step."""

    COMPUTE = "computing"
    UPLINK = "the uplink"
    DOWNLINK = "the downlink"
    LATENCY = "the way of a microbatch at each step's start"
    AVERAGING = "waiting for what is averaged"

    @property
    def is_link(self) -> bool:
        return self in (Limit.UPLINK, Limit.DOWNLINK)


@dataclass(frozen=True)
class WireBytes:
    """Bytes of one replica of a stage per token: `up` and `down` in training, `blocking` at the end of a round."""

    up: float
    down: float
    blocking: float

    @property
    def sent(self) -> float:
        return self.up + self.blocking

    @property
    def received(self) -> float:
        return self.down + self.blocking


@dataclass(frozen=True)
class StepTime:
    """Seconds of an inner step: its whole, and the parts that do not overlap."""

    slowest_part: float
    way: float
    averaging: float
    stage: int  # whose part is the slowest
    of_stage: Limit

    @property
    def whole(self) -> float:
        return self.slowest_part + self.way + self.averaging

    @property
    def limit(self) -> Limit:
        parts = {self.of_stage: self.slowest_part, Limit.LATENCY: self.way, Limit.AVERAGING: self.averaging}
        return max(parts, key=lambda limit: parts[limit])


@dataclass(frozen=True)
class SettingChange:
    """A setting, its new value, and the tokens a second that a replica would then train."""

    setting: str
    tokens_per_second: float


@dataclass(frozen=True)
class Cost:
    """A run of so many replicas of each stage on such devices and links. Bytes are of one volunteer's whole part."""

    device: str
    tokens: int  # of all replicas
    tokens_per_second: float  # of one replica
    compute_tokens_per_second: float  # the same, were links nothing
    link_tokens_per_second: float  # and were computing nothing
    hours: float
    uploaded: tuple[float, ...]  # by stage
    downloaded: tuple[float, ...]
    kwh: float  # of all devices together at full load, an upper bound; 0 where their watts are not known
    rent: float  # of all volunteers together
    power: float  # money for the kilowatt hours
    limit: Limit
    stage: int  # which limits, where one does
    helps: tuple[SettingChange, ...]


@dataclass(frozen=True)
class Prices:
    """In any currency: one device for an hour, and a kilowatt hour. `watts` of one machine; 0: the device's own."""

    device_hour: float = 0.0
    kwh: float = 0.0
    watts: float = 0.0


def cost_of(
    manifest: Manifest, device: Device, links: AssumedLinks, replicas: int, prices: Prices = Prices()
) -> Cost | None:
    """Return the cost of a run, None when a stage does not fit the device."""
    if any(fit_of(manifest, stage, device) == "no" for stage in range(manifest.stages)):
        return None
    step = step_time(manifest, device, links, replicas)
    tokens = _tokens(manifest)
    rate = tokens / step.whole
    total = tokens * manifest.inner.total_steps
    traffic = [traffic_of(manifest, stage, replicas) for stage in range(manifest.stages)]
    hours = total / rate / 3600
    device_hours = hours * replicas * manifest.stages
    kwh = (prices.watts or device.watts) / 1000 * device_hours
    computing = [speed_of(manifest, stage, device).tokens_per_second for stage in range(manifest.stages)]
    return Cost(
        device=device.name,
        tokens=total * replicas,
        tokens_per_second=rate,
        compute_tokens_per_second=min(computing),
        link_tokens_per_second=min(link_speed(each, links) for each in traffic),
        hours=hours,
        uploaded=tuple(each.sent * FRAMING * total for each in traffic),
        downloaded=tuple(each.received * FRAMING * total for each in traffic),
        kwh=kwh,
        rent=prices.device_hour * device_hours,
        power=prices.kwh * kwh,
        limit=step.limit,
        stage=step.stage,
        helps=tuple(what_helps(manifest, device, links, replicas, rate)),
    )


def _tokens(manifest: Manifest) -> int:
    """Tokens of an inner step of one replica."""
    return manifest.inner.microbatches * manifest.tokens_per_microbatch


def traffic_of(manifest: Manifest, stage: int, replicas: int) -> WireBytes:
    tokens, ring = manifest.tokens_per_microbatch, manifest.is_ring
    forward, back = forward_bytes(manifest) / tokens, backward_bytes(manifest) / tokens
    sends_on, gets_more = stage < manifest.stages - 1 or ring, stage > 0 or ring
    sent, blocking = averaging_bytes(manifest, parameter_count(manifest, stage), replicas)
    round_tokens = _tokens(manifest) * manifest.outer.inner_steps
    early = (sent - blocking) / round_tokens
    return WireBytes(
        up=forward * sends_on + back * gets_more + early,
        down=back * sends_on + forward * gets_more + early,
        blocking=blocking / round_tokens,
    )


def _link_seconds(traffic: WireBytes, links: AssumedLinks) -> tuple[float, float]:
    """Seconds per token, up and down: either way a byte crosses one replica's uplink and another's downlink."""
    return traffic.up * FRAMING / links.slower(), traffic.down * FRAMING / links.slower()


def _fuller(up: float, down: float, links: AssumedLinks, stage: int) -> tuple[float, int, Limit]:
    """Seconds in the direction of a stage's link that is the fuller one, less the stage, and which it is."""
    if (up / links.up(), up) >= (down / links.down(), down):
        return up, -stage, Limit.UPLINK
    return down, -stage, Limit.DOWNLINK


def _together(up: float, down: float) -> float:
    """Seconds of both directions together, which partly take turns."""
    return max(up, down) + TURNS * min(up, down)


def link_speed(traffic: WireBytes, links: AssumedLinks) -> float:
    """Tokens a second that the link carries; infinite where nothing travels."""
    seconds = _together(*_link_seconds(traffic, links))
    return 1 / seconds if seconds else float("inf")


def step_time(manifest: Manifest, device: Device, links: AssumedLinks, replicas: int) -> StepTime:
    """Seconds of a step with one replica of each stage."""
    tokens, microbatches = manifest.tokens_per_microbatch, manifest.inner.microbatches
    parts: list[
        tuple[float, float, int, Limit]
    ] = []  # seconds for a microbatch, and of them in the limit's direction
    blocked = 0.0
    for stage in range(manifest.stages):
        traffic = traffic_of(manifest, stage, replicas)
        up, down = _link_seconds(traffic, links)
        computing = tokens / speed_of(manifest, stage, device).tokens_per_second
        parts += [
            (computing, computing, -stage, Limit.COMPUTE),
            (tokens * _together(up, down), *_fuller(up, down, links, stage)),
        ]
        if traffic.blocking:
            nbytes = traffic.blocking * FRAMING * _tokens(manifest)
            each_round = links.latency / manifest.outer.inner_steps
            blocked = max(blocked, nbytes / links.slower() + each_round)
    slowest, _, behind, limit = max(parts)
    stage = -behind
    computing = sum(seconds for seconds, _, _, kind in parts if kind is Limit.COMPUTE)
    nbytes = (forward_bytes(manifest) + backward_bytes(manifest)) * FRAMING
    hop = 2 * links.latency + nbytes / links.slower()
    way = computing + (manifest.hops - 1) * hop
    if manifest.inner.staleness:  # the next step's are under way, too
        return StepTime(max(slowest * microbatches, way / 2), 0.0, blocked, stage, limit)
    return StepTime(slowest * microbatches, max(0.0, way - slowest), blocked, stage, limit)


# --- what would help ------------------------------------------------------------------------------


def what_helps(
    manifest: Manifest, device: Device, links: AssumedLinks, replicas: int, rate: float
) -> list[SettingChange]:
    """The changes that make a replica clearly faster, the best first."""
    changes = []
    for setting, other in _changed(manifest):
        if all(fit_of(other, stage, device) != "no" for stage in range(other.stages)):
            faster = _tokens(other) / step_time(other, device, links, replicas).whole
            # a device in more stages does less of each: what counts is the swarm's speed for each device
            faster *= manifest.stages / other.stages
            if faster >= HELPS * rate:
                changes.append(SettingChange(setting, faster))
    return sorted(changes, key=lambda change: -change.tokens_per_second)[:MOST_ADVICE]


def _changed(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """The manifest with one change each, of those that make sense for it."""
    wire, inner, outer = manifest.wire, manifest.inner, manifest.outer
    batch, rounds = 2 * inner.microbatches, 2 * outer.inner_steps
    changes: list[tuple[str, dict[str, object]]] = [
        (f"inner.microbatches {batch}", {"inner": {"microbatches": batch}}),
        (f"outer.inner_steps {rounds}", {"outer": {"inner_steps": rounds}}),
    ]
    if manifest.stages > 1 and (codec := SHORTER.get(wire.activations)):
        both = {"activations": codec, "gradients": codec}
        changes.append((f'wire.activations and gradients "{codec}"', {"wire": both}))
    if not inner.staleness and not manifest.is_ring:
        changes.append(("inner.staleness 1", {"inner": {"staleness": 1}}))
    if outer.sends_whole_weights and outer.fragments == 1:
        changes.append(('outer.overlap "phi-early"', {"outer": {"overlap": "phi-early"}}))
    for stages in (manifest.stages // 2, 2 * manifest.stages):
        if stages and stages <= manifest.model.layers and manifest.start is None:
            changes.append((f"stages {stages}", {"stages": stages}))
    for setting, change in changes:
        settings = manifest.model_dump()
        for section, value in change.items():
            settings[section] = {**settings[section], **value} if isinstance(value, dict) else value
        try:
            yield setting, manifest_from(settings)
        except ManifestError:  # these do not go together
            continue
