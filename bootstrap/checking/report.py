"""A manifest in numbers: memory, bytes, seconds, stability, and how fast devices would train a stage.

Nothing here needs a network or a GPU. A token costs 6 operations for each multiplication of the forward pass: a
multiplication and an addition, three times. An inner step also reads and writes the stage's weights, gradients and
moments, eight float32 passes in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bootstrap.checking.front import citation
from bootstrap.creating.positions import longer_than_positions
from node.machine.devices import GB, Device
from node.model.memory_model import (
    LABEL_BYTES,
    BufferBytes,
    MicrobatchBytes,
    Precision,
    backward_bytes,
    estimated,
    forward_bytes,
    least_in_flight,
    memory_of_buffers,
    memory_of_state,
)
from node.model.outer import OuterSettings, stationary_variance
from node.model.resources import least_memory, memory_needed
from node.model.stage import parameter_count, work_of
from node.rounds.gain import LONGEST
from protocol.codecs.codec import nbytes_of
from protocol.codecs.near_codecs import kept_apart
from protocol.run.manifest import Manifest, gamma_bound

TOLERABLE = 0.05  # of the time: what an exchange may block before the report calls for longer inner steps

OPTIMIZER_PASSES = 8
# A GPU takes so long to start a kernel, and a layer forward and backward is about so many: small models wait for
# that. Assumptions, too.
LAUNCH_SECONDS = 5e-6
KERNELS_PER_LAYER = 100


@dataclass(frozen=True)
class AssumedLinks:
    """The link that every replica is assumed to have: `mbit` each way at once, one-way `latency` in seconds.

    `upload` and `download` in bytes per second, where they differ; `mbit` is then the slower one.
    """

    mbit: float
    latency: float
    upload: float = 0.0
    download: float = 0.0

    @classmethod
    def between(cls, upload: float, download: float, latency: float) -> AssumedLinks:
        """A link of so many bytes per second each way."""
        return cls(min(upload, download) * 8e-6, latency, upload, download)

    def up(self) -> float:
        return self.upload or self.mbit * 1.25e5

    def down(self) -> float:
        return self.download or self.mbit * 1.25e5

    def slower(self) -> float:
        return min(self.up(), self.down())

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        return messages * self.latency + nbytes * 8 / (self.mbit * 1e6)


@dataclass(frozen=True)
class Averaging:
    """The bytes that one replica sends for averaging, receiving as many; training waits for the `blocking` ones."""

    sent: float
    blocking: float
    per_token: float  # `sent` by the tokens that the replica trains on meanwhile
    seconds: float  # of waiting: latency and the blocking bytes


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of one replica of a stage, in float32: `whole` at its fastest, `least` with everything that saves memory.

    `microbatch` is what one takes; `in_flight` of them keep all stages busy.
    """

    state: int
    buffers: BufferBytes
    microbatch: MicrobatchBytes
    in_flight: int
    whole: int
    least: int


def memory_figures(manifest: Manifest, stage: int) -> MemoryFigures:
    return MemoryFigures(
        state=memory_of_state(manifest, stage),
        buffers=memory_of_buffers(manifest, stage),
        microbatch=estimated(manifest, stage, manifest.inner.sequences, recomputes=False),
        in_flight=least_in_flight(manifest, stage),
        whole=memory_needed(manifest, stage),
        least=least_memory(manifest, stage),
    )


@dataclass(frozen=True)
class StageFigures:
    """One replica of one stage. `round`: as the manifest says; `all_reduce`: in every inner step instead."""

    stage: int
    layers: int
    parameters: int
    memory: int
    memory_parts: MemoryFigures
    round: Averaging
    all_reduce: Averaging


@dataclass(frozen=True)
class Hop:
    """Bytes per token between two stages: activations with labels forward, gradients back."""

    forward: float
    back: float
    seconds: float  # for a microbatch's activations


@dataclass(frozen=True)
class Stability:
    """γ must stay below `bound`; `spread` is the replicas' standard deviation per parameter over s.

    s is the standard deviation of what a round adds to each replica by itself; see `covariance_recursion`.
    """

    gamma: float
    bound: float
    spread: float


@dataclass(frozen=True)
class Report:
    name: str
    replicas: int
    parameters: int
    tokens_per_step: int  # of one replica
    tokens_per_round: int
    stages: tuple[StageFigures, ...]
    hop: Hop | None  # None for a single stage
    stability: Stability | None  # None where nothing is averaged
    least_step_seconds: float  # so that averaging blocks no more than `TOLERABLE`
    notes: tuple[str, ...]
    study: str | None


def report_on(manifest: Manifest, replicas: int, links: AssumedLinks) -> Report:
    """The figures for `replicas` of each stage on `links`."""
    stages = tuple(_stage(manifest, stage, replicas, links) for stage in range(manifest.stages))
    tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch
    inner_steps = manifest.outer.inner_steps
    waiting = max(stage.round.seconds for stage in stages)
    hop = _hop(manifest, links) if manifest.stages > 1 else None
    return Report(
        name=manifest.name,
        replicas=replicas,
        parameters=sum(stage.parameters for stage in stages),
        tokens_per_step=tokens,
        tokens_per_round=tokens * inner_steps,
        stages=stages,
        hop=hop,
        stability=stability_of(manifest, replicas),
        least_step_seconds=waiting * (1 - TOLERABLE) / TOLERABLE / inner_steps,
        notes=(*_notes(manifest), *_much_averaging(stages, hop), *_too_slow(manifest, stages, links)),
        study=citation(manifest),
    )


def averaging_bytes(manifest: Manifest, parameters: int, replicas: int) -> tuple[float, float]:
    """Return the bytes (sent, blocking) of a replica in one round, by the outer method, its overlap and codecs."""
    outer, wire = manifest.outer, manifest.wire
    state = nbytes_of(wire.gossip, [-(-parameters // outer.fragments)])
    if outer.method == "local" or replicas < 2:
        return 0.0, 0.0
    if outer.method == "diloco":
        around = 2 * (replicas - 1) / replicas * state
        return around, around
    if outer.overlap == "phi-early":
        progress = nbytes_of(wire.progress, [parameters])
        return state + progress, progress
    return state, state


def stability_of(manifest: Manifest, replicas: int) -> Stability | None:
    """γ's bound and the spread at which random pairs settle (κ = 0); one group of all has none."""
    outer = manifest.outer
    alpha, beta, gamma = outer.coefficients
    if outer.method == "local":
        return None
    if outer.method == "diloco":
        return Stability(gamma, 2 * (1 + alpha), 0.0)
    rounding = kept_apart(manifest.wire.gossip)
    factor = min(LONGEST, replicas ** (outer.gain / 2))  # where replicas share no progress at all
    spread = math.sqrt(stationary_variance(OuterSettings(alpha, beta * factor, gamma, rounding), replicas))
    return Stability(gamma, gamma_bound(alpha, kept_apart=rounding), spread)


def _stage(manifest: Manifest, stage: int, replicas: int, links: AssumedLinks) -> StageFigures:
    parameters, memory = parameter_count(manifest, stage), memory_figures(manifest, stage)
    step_tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch
    sent, blocking = averaging_bytes(manifest, parameters, replicas)
    # one group of all: a request with a part of z, and its reply with the mean
    messages = 2 if manifest.outer.method == "diloco" else 1
    around = 2 * (replicas - 1) / replicas * nbytes_of("fp32", [parameters])
    return StageFigures(
        stage=stage,
        layers=len(manifest.layers_of(stage)),
        parameters=parameters,
        memory=memory.whole,
        memory_parts=memory,
        round=Averaging(
            sent=sent,
            blocking=blocking,
            per_token=sent / (step_tokens * manifest.outer.inner_steps),
            seconds=links.seconds(blocking, messages) if blocking else 0.0,
        ),
        all_reduce=Averaging(
            sent=around,
            blocking=around,
            per_token=around / step_tokens,
            seconds=links.seconds(around, 2) if around else 0.0,
        ),
    )


def _hop(manifest: Manifest, links: AssumedLinks) -> Hop:
    tokens = manifest.tokens_per_microbatch
    shape = (manifest.inner.sequences, manifest.data.sequence_tokens, manifest.model.hidden_size)
    forward = nbytes_of(manifest.wire.activations, shape) + LABEL_BYTES * tokens
    return Hop(
        forward=forward / tokens,
        back=nbytes_of(manifest.wire.gradients, shape) / tokens,
        seconds=links.seconds(forward),
    )


def _too_slow(manifest: Manifest, stages: Sequence[StageFigures], links: AssumedLinks) -> list[str]:
    """Deadlines that such links miss from the first message on."""
    limits, notes = manifest.limits, []
    there_and_back = links.seconds(forward_bytes(manifest)) + links.seconds(backward_bytes(manifest))
    if manifest.stages > 1 and there_and_back > limits.microbatch_deadline:
        notes.append(
            f"a microbatch is {there_and_back:.0f} s on these links, limits.microbatch_deadline "
            f"{limits.microbatch_deadline:g} s: a link that keeps what it was given for longer "
            "than that looks silent. Fewer inner.sequences, or a shorter codec in wire."
        )
    # φ sent earlier has the whole round; at the end of a run all fragments go at once
    exchange = max(links.seconds(s.round.blocking * manifest.outer.fragments) for s in stages)
    if exchange > limits.gossip_deadline:
        notes.append(
            f"an exchange is {exchange:.0f} s on these links, limits.gossip_deadline "
            f"{limits.gossip_deadline:g} s: the first ones fail, until deadlines have adapted. More stages, a longer "
            "deadline or a shorter codec helps."
        )
    return notes


def _much_averaging(stages: Sequence[StageFigures], hop: Hop | None) -> list[str]:
    """Averaging that sends more than what goes between stages, which nobody can do without."""
    most = max(stage.round.per_token for stage in stages)
    if hop is None or most <= hop.forward + hop.back:
        return []
    return [
        f"averaging sends {most:,.0f} bytes a token, more than the {hop.forward + hop.back:,.0f} of activations and "
        'gradients at a hop: a larger outer.inner_steps, or wire.gossip "mod3" with outer.alpha 0, sends less.'
    ]


def _notes(manifest: Manifest) -> list[str]:
    """Settings that are allowed but probably not intended."""
    outer, wire = manifest.outer, manifest.wire
    notes = [told] if (told := longer_than_positions(manifest)) else []
    if manifest.is_ring:
        notes.append(
            f"model.tied_embeddings in {manifest.stages} stages sends activations back to the first one: "
            f"{manifest.hops - 1} hops a microbatch instead of {manifest.stages - 1}."
        )
    if outer.method == "local":
        notes.append('outer.method "local" never averages: replicas drift apart without bound.')
    if outer.method == "noloco" and outer.gamma > 0.9 * gamma_bound(
        outer.alpha, kept_apart=kept_apart(wire.gossip)
    ):
        notes.append("outer.gamma is close to its bound, where the spread of the replicas grows steeply.")
    if not outer.averages_pairs and outer.overlap != "none":
        notes.append(f'outer.overlap "{outer.overlap}" has no effect with outer.method "{outer.method}".')
    if outer.overlap != "phi-early" and wire.progress != "fp32":
        notes.append('wire.progress has no effect without outer.overlap "phi-early".')
    return notes


@dataclass(frozen=True)
class Speed:
    """One stage on one device: how it fits, and tokens a second of one replica that never waits for another."""

    stage: int
    fits: str  # "whole", "smaller" or "no"
    tokens_per_second: float


@dataclass(frozen=True)
class DeviceReport:
    device: Device
    stages: tuple[Speed, ...]

    @property
    def slowest(self) -> float:
        """The speed of a pipeline with such a device at each stage; 0 when a stage does not fit."""
        return min(0.0 if stage.fits == "no" else stage.tokens_per_second for stage in self.stages)


def report_of(manifest: Manifest, device: Device) -> DeviceReport:
    return DeviceReport(device, tuple(speed_of(manifest, stage, device) for stage in range(manifest.stages)))


def speed_of(manifest: Manifest, stage: int, device: Device) -> Speed:
    work = _work_seconds(manifest, stage, device)
    tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch
    weights = 4 * parameter_count(manifest, stage)
    stepping = weights * OPTIMIZER_PASSES / (device.bandwidth * GB) / tokens
    is_assumed = device.is_gpu and device.timed is None
    launches = KERNELS_PER_LAYER * len(manifest.layers_of(stage)) if is_assumed else 0
    starting = launches * LAUNCH_SECONDS / manifest.tokens_per_microbatch
    return Speed(stage, fit_of(manifest, stage, device), 1 / (max(work, starting) + stepping))


def _work_seconds(manifest: Manifest, stage: int, device: Device) -> float:
    """Seconds a token of a stage's passes: measured ones, or its operations by those that the device does."""
    if device.timed is None:
        return 6 * work_of(manifest, stage) / (device.tflops * 1e12 * device.efficiency)
    timed, ring = device.timed, manifest.is_ring
    sends = (stage < manifest.stages - 1 or ring) + (
        stage > 0 or ring
    )  # tensors of a microbatch, to either side
    layers = len(manifest.layers_of(stage)) * timed.layer
    return layers + timed.head * (stage == manifest.head_stage) + timed.encoding * sends


def fit_of(manifest: Manifest, stage: int, device: Device) -> str:
    """Say by formula how a stage fits: "whole" microbatches with nothing computed twice, "smaller" ones, or "no"."""
    memory = device.memory * GB
    if least_memory(manifest, stage, on_host=not device.is_gpu) > memory:
        return "no"
    precision: Precision = "bf16" if device.is_gpu else "fp32"
    cost = estimated(manifest, stage, manifest.inner.sequences, False, precision)
    whole = memory_of_state(manifest, stage, precision) + cost.of(least_in_flight(manifest, stage)) / 0.8
    if not device.is_gpu:
        whole += memory_of_buffers(manifest, stage).total
    return "whole" if whole <= memory else "smaller"
