"""Trials of how well settings learn: the whole daemon for N replicas × S stages in one process, in virtual time.

Weights, gradients, pairing, routing and the wire formats are those of the real node; only the network and the
clock are modelled. A setting and its seed give the same outcome every time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bootstrap.inspect.observer import squared_deviation
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulation.crowd import Crowd
from bootstrap.lab.simulation.pulse import Pulse
from bootstrap.lab.simulation.swarm import WORK_SECONDS, SimulatedSwarm
from node.data.batches import TrainingData
from node.data.opening import DataPlan, default_cache, open_data
from node.data.sources import DEFAULT_FIELD
from node.model.passes import evaluate_through
from node.model.replica import Replica
from node.process.daemon import Node
from protocol.errors import DataError, NothingHeldOut
from protocol.run.manifest import Manifest

CURVE_POINTS = 20
CURVE_SEQUENCES = 64
EVALUATED_AT_ONCE = 32
DATA_ORDER = 3  # another one makes another loss: outcomes of before are not taken for those of now
OBSERVED_SECONDS = 0.1  # of virtual time, between looks at the progress

# what people compare settings by, of the manifest's [outer] and [wire] and of the setting itself
OUTER_FACTS = ("alpha", "beta", "gamma", "overlap", "pace", "clip")
WIRE_FACTS = ("activations", "gradients", "gossip", "progress")
# of settings that were removed and are in no manifest any more: kept outcomes are found by them
GONE_FACTS = {"weighting": "equal", "error_feedback": False}
OWN_FACTS = ("slow", "latency", "mbit", "validation_sequences", "seed")


@dataclass(frozen=True)
class LearningSetting:
    """One setting to try. `all_reduce` averages gradients in every step, the baseline of data parallel training.

    `slow` is how many times slower the compute of the last replica of the last stage is. `latency` in seconds
    one way and `mbit` per second describe every peer's link. On another `device` than a processor sums round
    differently, so its outcomes are others.
    """

    manifest: Manifest
    replicas: int
    seed: int = 0
    all_reduce: bool = False
    slow: float = 1.0
    latency: float = 0.0
    mbit: float = 0.0  # 0: no limit
    validation_sequences: int = 512
    named: tuple[
        str, ...
    ] = ()  # further settings of the manifest that tell this one from others, as outer.clip
    device: str = "cpu"  # torch's name of it, for all nodes
    texts: tuple[str, ...] = ()  # files, globs or a dataset, instead of the manifest's own
    attack: str = ""  # of `bootstrap.lab.simulation.liars.LIES`; empty: nobody does wrong
    attackers: float = 0.0  # of the replicas of each stage where that kind sits
    work: float = 1.0  # how many times the usual virtual time a piece of work takes

    @property
    def key(self) -> str:
        """Identifies the setting, so that a study can be resumed.

        Of the manifest only what differs from the defaults counts, so that a new option leaves old outcomes valid.
        """
        manifest = self.manifest.model_dump(exclude_defaults=True)
        text = json.dumps(self.facts() | {"manifest": manifest, "data": DATA_ORDER}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def method(self) -> str:
        return "all-reduce" if self.all_reduce else self.manifest.outer.method

    def facts(self) -> dict[str, object]:
        """The facts by which people compare settings."""
        manifest, inner, outer = self.manifest, self.manifest.inner, self.manifest.outer
        shape = {
            "method": self.method,
            "replicas": self.replicas,
            "stages": manifest.stages,
            "routing": manifest.routing if manifest.stages > 1 else "none",
            "k": 1 if self.all_reduce else outer.inner_steps,
        }
        return (
            shape
            | {name: getattr(outer, name) for name in OUTER_FACTS}
            | {name: getattr(manifest.wire, name) for name in WIRE_FACTS}
            | GONE_FACTS
            | {"steps": inner.total_steps}
            | {name: getattr(inner, name) for name in ("learning_rate", "microbatches", "sequences")}
            | {name: getattr(self, name) for name in OWN_FACTS}
            | {"staleness": inner.staleness}
            | {name: self._value_of(name) for name in self.named}
            | ({} if self.device == "cpu" else {"device": self.device})
            | ({"texts": list(self.texts)} if self.texts else {})
            | ({"work": self.work} if self.work != 1.0 else {})
            | ({"attack": self.attack, "attackers": self.attackers} if self.attack else {})
        )

    def _value_of(self, name: str) -> object:
        value: Any = self.manifest
        for part in name.split("."):
            value = getattr(value, part)
        return value


@dataclass
class LearningResult:
    """The outcome of a setting. Losses in nats per token on held-out text, bytes sent by one replica."""

    key: str
    setting: dict[str, Any]
    loss: float = 0.0  # mean over replicas, each by itself
    losses: list[float] = field(default_factory=list)
    loss_of_mean: float = 0.0  # of the replicas' mean weights
    spread: float = 0.0  # over all stages
    tokens: int = 0  # of all replicas together
    bytes_per_replica: float = 0.0  # gossip or all-reduce, mean over the nodes
    bytes_per_token: float = 0.0  # the above by the tokens that one replica trained on
    share: float = 0.0  # of the bytes of all-reduce in every step
    rounds: float = 0.0
    paired: float = 0.0  # fraction of the rounds that had a partner
    blocked: float = 0.0  # fraction of the time in which an exchange kept a replica from training
    seconds: float = 0.0  # virtual
    steps_per_second: list[float] = field(default_factory=list)  # of each node, in virtual time
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # tokens, loss, spread
    wall_seconds: float = 0.0
    # of attackers, those that half of the honest set aside; microbatches of each until then, median; and the number
    # of honest peers that an honest one set aside
    found: float | None = None
    found_after: float | None = None
    blamed: int = 0


def text_of(manifest: Manifest, texts: tuple[str, ...] = ()) -> TrainingData:
    """Open `texts`, or what the manifest names. Raises `DataError`, also where that is left to volunteers."""
    return open_data(
        manifest, DataPlan(texts, DEFAULT_FIELD, default_cache(), "", "XDG_CACHE_HOME", ""), None
    )


def simulate_aloud(setting: LearningSetting) -> LearningResult:
    """Train as `simulate` does, and tell on standard error each ten seconds how far it is."""
    return simulate(setting, Pulse(setting.facts(), setting.manifest.inner.total_steps))


def simulate(setting: LearningSetting, pulse: Pulse | None = None) -> LearningResult:
    """Train to the last step, on one thread: a minute for a million tokens of the tiny preset."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    outcome: LearningResult = run_virtual(_train(setting, text_of(setting.manifest, setting.texts), pulse))
    outcome.wall_seconds = round(time.perf_counter() - began, 2)
    return outcome


async def _train(setting: LearningSetting, data: TrainingData, pulse: Pulse | None = None) -> LearningResult:
    manifest, replicas = setting.manifest, setting.replicas
    if setting.all_reduce:  # the mean gradient of N replicas is that of one with N times the microbatches
        inner = manifest.inner.model_copy(update={"microbatches": manifest.inner.microbatches * replicas})
        outer = manifest.outer.model_copy(update={"method": "local"})
        # nothing is sent, and some codecs are for pairs alone
        wire = manifest.wire.model_copy(update={"gossip": "fp32"})
        manifest = manifest.model_copy(update={"inner": inner, "outer": outer, "wire": wire})
        replicas = 1
    bandwidth = {"bandwidth": setting.mbit * 1e6 / 8} if setting.mbit else {}
    swarm = SimulatedSwarm(manifest, data, setting.seed, Link(latency=setting.latency, **bandwidth))
    swarm.seconds = lambda _, priority: setting.work * WORK_SECONDS[priority]
    await swarm.seed_peer.start()
    count, crowd = replicas * manifest.stages, Crowd(swarm, setting.attack, setting.attackers)
    for number in range(count):
        slowed = setting.slow if number == count - 1 else 1.0
        crowd.add(number, replicas, speed=1 / slowed, device=setting.device, compile="off")
    outcome = LearningResult(setting.key, setting.facts())
    watching = asyncio.get_running_loop().create_task(_watch(swarm, crowd, data, outcome, pulse))
    began, ended = await _to_the_end(swarm, crowd.attackers)
    watching.cancel()
    await swarm.leave()
    _measure(swarm, crowd, setting, data, outcome)
    findings = crowd.findings()
    outcome.found, outcome.found_after = findings.found, findings.found_after
    outcome.blamed = findings.blamed
    outcome.seconds = max(ended.values()) - began
    outcome.steps_per_second = [_pace(swarm, number) for number in sorted(swarm.nodes)]
    blocked = sum(node.context.counters.blocked_seconds for node in swarm.nodes.values())
    outcome.blocked = blocked / sum(end - began for end in ended.values())
    return outcome


async def _to_the_end(swarm: SimulatedSwarm, without: Collection[int]) -> tuple[float, dict[int, float]]:
    """Return when the last node began to train and when each but those `without` finished, in virtual time.

    Attackers of whom nobody takes anything finish no step. Raises what ended a node before its time.
    """
    clock = asyncio.get_running_loop().time
    began, ended = clock(), dict[int, float]()
    while swarm.nodes.keys() - without - ended.keys():
        await asyncio.sleep(OBSERVED_SECONDS)
        for number, node in swarm.nodes.items():
            if swarm.tasks[number].done():
                swarm.tasks[number].result()
            if node.public_state == "joining":
                began = clock()
            elif node.public_state == "finished":
                ended.setdefault(number, clock())
    return began, ended


def _pace(swarm: SimulatedSwarm, number: int) -> float:
    """Inner steps per virtual second of a node, over all of its steps but the first."""
    times = [e["time"] for e in swarm.events if e["node"] == number and e["event"] == "step"]
    return round((len(times) - 1) / (times[-1] - times[0]), 4) if len(times) > 1 else 0.0


async def _watch(
    swarm: SimulatedSwarm, crowd: Crowd, data: TrainingData, outcome: LearningResult, pulse: Pulse | None
) -> None:
    """Records loss and spread at about `CURVE_POINTS` points of the run, and tells how far it is."""
    every = max(1, swarm.manifest.inner.total_steps // CURVE_POINTS)
    due = every
    while True:
        await asyncio.sleep(OBSERVED_SECONDS)
        routes = routes_of(swarm, crowd.attackers)
        if routes and pulse is not None:
            pulse.look(routes[0][0].step)
        if routes and routes[0][0].step >= due:
            due = routes[0][0].step + every
            loss = loss_along(routes[0], data, CURVE_SEQUENCES)
            outcome.curve.append((tokens_of(swarm), loss, spread_of(routes)))
            if pulse is not None:
                pulse.loss = loss


def routes_of(swarm: SimulatedSwarm, without: Collection[int] = ()) -> list[list[Replica]]:
    """A replica of each stage per row, in the order in which nodes were added; empty while nodes are joining.

    `without` those of attackers: as many rows as the stage with the fewest others has.
    """
    nodes = [node for number, node in sorted(swarm.nodes.items()) if number not in without]
    if not all(hasattr(node, "replica") for node in nodes):
        return []
    stages = range(swarm.manifest.stages)
    by_stage = [[node.replica for node in nodes if node.context.stage == stage] for stage in stages]
    return [list(row) for row in zip(*by_stage, strict=not without)]


def tokens_of(swarm: SimulatedSwarm) -> int:
    return sum(node.context.counters.tokens for node in swarm.nodes.values() if node.context.stage == 0)


def spread_of(routes: list[list[Replica]]) -> float:
    """Root mean squared deviation of φ from the replicas' mean, over all stages and parameters."""
    squares = sum(
        squared_deviation([replica.phi for replica in stage]) for stage in zip(*routes, strict=True)
    )
    return float((squares / sum(replica.parameters for route in routes for replica in route)) ** 0.5)


def _held_out(data: TrainingData, tokens: int, sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
    try:
        yield from data.validation_batches(tokens, EVALUATED_AT_ONCE, sequences)
    except NothingHeldOut as error:
        raise DataError(
            f"{error} Try a larger --set data.held_out or a smaller --set data.sequence_tokens."
        ) from None


@torch.no_grad()
def loss_along(route: list[Replica], data: TrainingData, sequences: int) -> float:
    """Mean nats per token of the slow weights on held-out text, through one replica of each stage."""
    tokens = route[0].manifest.data.sequence_tokens
    passes = [replica.passes for replica in route]
    total, count = 0.0, 0
    for inputs, labels in _held_out(data, tokens, sequences):
        logits = evaluate_through(passes, inputs)
        targets = labels.flatten().to(logits.device)
        total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
        count += labels.numel()
    return total / count


def _measure(
    swarm: SimulatedSwarm,
    crowd: Crowd,
    setting: LearningSetting,
    data: TrainingData,
    outcome: LearningResult,
) -> None:
    routes, sequences, nodes = (
        routes_of(swarm, crowd.attackers),
        setting.validation_sequences,
        list(swarm.nodes.values()),
    )
    outcome.losses = [loss_along(route, data, sequences) for route in routes]
    outcome.loss = sum(outcome.losses) / len(outcome.losses)
    outcome.spread = spread_of(routes)
    outcome.tokens = tokens_of(swarm)
    rounds = [event for event in swarm.events if event["event"] == "round"]
    outcome.rounds = len(rounds) / len(nodes)
    outcome.paired = sum(event["partner"] is not None for event in rounds) / max(1, len(rounds))
    outcome.bytes_per_replica = _bytes_sent(setting, nodes)
    outcome.bytes_per_token = outcome.bytes_per_replica / (outcome.tokens / setting.replicas)
    all_reduce = _bytes_of_all_reduce(setting, nodes)
    outcome.share = outcome.bytes_per_replica / all_reduce if all_reduce else 0.0
    for stage in zip(*routes, strict=True):  # the first replica of each gets the mean
        stage[0].phi.copy_(torch.stack([replica.phi for replica in stage]).mean(0))
    outcome.loss_of_mean = loss_along(routes[0], data, sequences)


def _bytes_sent(setting: LearningSetting, nodes: list[Node]) -> float:
    """The bytes that the average replica sends for averaging."""
    if setting.all_reduce:
        return _bytes_of_all_reduce(setting, nodes)
    return sum(node.context.counters.gossip_bytes for node in nodes) / len(nodes)


def _bytes_of_all_reduce(setting: LearningSetting, nodes: list[Node]) -> float:
    """The bytes that a ring all-reduce of bf16 gradients in every step sends, per replica."""
    size = sum(2 * node.replica.parameters * node.replica.step for node in nodes) / len(nodes)
    return 2 * (setting.replicas - 1) / setting.replicas * size
