"""A run so small that a whole swarm of it trains in a second, and what tests of it share."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bootstrap.inspect.observer import Observer
from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link, LinkModel
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.data.batches import Batch, TrainingData
from node.data.documents import DocumentOrder, Split, content_hash
from node.data.tokenizer import ByteTokenizer
from node.links.links import Links
from node.membership.membership import Membership
from node.membership.past import Past
from node.membership.view import View
from node.process.daemon import Node
from node.watch.events import Events
from protocol.ground import PeerId
from protocol.messages.peers import Introduce
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from protocol.records.records import seal_record
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest, load_preset, manifest_from
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor

MICRO: dict[str, Any] = {
    "inner__optimizer": "adamw",
    "inner__muon_learning_rate": None,
    "name": "micro",
    "model__hidden_size": 16,
    "model__layers": 2,
    "model__heads": 2,
    "model__intermediate_size": 32,
    "data__sequence_tokens": 32,
    "inner__learning_rate": 5e-3,
    "inner__min_learning_rate": 1e-3,
    "inner__total_steps": 30,
    "inner__warmup_steps": 3,
    "outer__alpha": 0.5,  # as published
    "outer__beta": 0.7,
    "outer__gamma": 0.7,
    "outer__inner_steps": 5,
    "wire__gossip": "fp32",
    "limits__microbatch_deadline": 10.0,
    "limits__gossip_deadline": 5.0,
    "limits__record_lifetime": 6.0,
}
# of swarms in memory whose test names none: what holds for one stream of random numbers alone is chance
SEED = int(os.environ.get("SWARM_SEED", "1"))
WIDE = Link(latency=0.01, jitter=0.005)  # a continent


def micro_manifest(**changes: Any) -> Manifest:
    """Two stages of one layer each. `changes` as section__field=value, or field=value at the top."""
    settings: dict[str, Any] = load_preset("tiny").model_dump()
    for place, value in {**MICRO, **changes}.items():
        *sections, name = place.split("__")
        section = settings[sections[0]] if sections else settings
        section[name] = value
    return manifest_from(settings)


def membership_of(
    rpc: Rpc,
    manifest: Manifest,
    view: View | None = None,
    hear: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Membership:
    """The membership of a peer in a run of this manifest; `hear` gets its events."""
    transport = rpc.transport
    signed = SignedManifest.sign(manifest, Identity.from_seed("run"))
    past = Past(signed.run_id, manifest.most_steps, manifest.limits.record_lifetime, transport.now)
    return Membership(rpc, signed, view or View(), Links(), Events(transport.now, hear), Supervisor(), past)


class MadeUpDocuments:
    """Documents in memory."""

    identity = "made up"

    def __init__(self, texts: Sequence[str], split: Split) -> None:
        texts = sorted(texts, key=lambda text: content_hash(text.encode()))
        self._held_out = [text for text in texts if split.holds_out(text.encode())]
        self._training = texts[len(self._held_out) :]

    def training(self, seed: tuple[object, ...], epoch: int, first: int) -> Iterator[str]:
        order = DocumentOrder(len(self._training), (*seed, epoch))
        return (self._training[order[place]] for place in range(first, len(self._training)))

    def held_out(self) -> Iterator[str]:
        return iter(self._held_out)


@cache
def micro_text() -> str:
    """100 kB of made-up words: a model that learns how common letters are has learned something."""
    rng = np.random.default_rng(7)
    words = ["".join(rng.choice(list("etaoinshrdlu"), size=rng.integers(2, 9))) for _ in range(200)]
    return " ".join(rng.choice(words, size=20_000, p=_zipf(len(words))))[:100_000]


@cache
def micro_corpus() -> TrainingData:
    """That text in documents of 500 letters."""
    text = micro_text()
    texts = [text[start : start + 500] for start in range(0, len(text), 500)]
    return TrainingData(MadeUpDocuments(texts, Split(0.05)), ByteTokenizer())


def micro_batch(seed: int | Sequence[int], sequences: int, tokens: int) -> Batch:
    """Windows of that text at random, inputs and labels int64 [sequences, tokens] each."""
    text = np.frombuffer(micro_text().encode(), np.uint8)
    starts = np.random.default_rng(seed).integers(len(text) - tokens, size=sequences)
    windows = torch.from_numpy(text[starts[:, None] + np.arange(tokens + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _zipf(count: int) -> Any:
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def micro_swarm(
    seed: int = SEED, directory: Path | None = None, link: Link | LinkModel = WIDE, **changes: Any
) -> Any:
    """Make it inside a running loop. `changes` are the manifest's."""
    return SimulatedSwarm(micro_manifest(**changes), micro_corpus(), seed, link, directory=directory)


def run_swarm(main: Coroutine[Any, Any, Any]) -> Any:
    """Run under virtual time; fail on errors that only a log or a lost task would have shown."""
    problems: list[str] = []
    handler = _Collector(problems)

    async def watched() -> Any:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(str(context)))
        return await main

    logging.getLogger().addHandler(handler)
    try:
        result = run_virtual(watched())
        gc.collect()  # tasks whose exception nobody saw complain when they are collected
    finally:
        logging.getLogger().removeHandler(handler)
    assert not problems, "\n".join(problems)
    return result


class _Collector(logging.Handler):
    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        self._problems.append(self.format(record))


async def until(condition: Callable[[], bool], seconds: float = 120.0, step: float = 0.05) -> None:
    """Wait in virtual time; fails when the condition is not met within `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "this did not happen in time"
        await asyncio.sleep(step)


def events_of(swarm: SimulatedSwarm, event: str, node: int | None = None) -> list[dict[str, Any]]:
    return [
        entry for entry in swarm.events if entry["event"] == event and (node is None or entry["node"] == node)
    ]


def stage_nodes(swarm: SimulatedSwarm, stage: int) -> list[Node]:
    return [node for node in swarm.nodes.values() if node.context.stage == stage]


def step_of(node: Node) -> int:
    return node.replica.step if hasattr(node, "replica") else 0


def all_reached(nodes: Iterable[Node], step: int) -> bool:
    return all(step_of(node) >= step for node in nodes)


def true_spread(nodes: Iterable[Node]) -> float:
    """Root mean squared deviation of the nodes' φ from their mean."""
    phi = torch.stack([node.replica.phi for node in nodes])
    return float((phi - phi.mean(0)).square().mean().sqrt())


def mean_losses(swarm: SimulatedSwarm, first: int, last: int) -> tuple[float, float]:
    """Mean training loss over the `first` and the `last` steps that told one."""
    losses = [event["loss"] for event in events_of(swarm, "step") if event["loss"] is not None]
    return sum(losses[:first]) / first, sum(losses[-last:]) / last


FOREVER = 10_000  # inner steps: more than any test waits for


async def trained(replicas: int, **settings: Any) -> SimulatedSwarm:
    """A swarm that was trained to its end."""
    swarm: SimulatedSwarm = micro_swarm(**settings)
    await swarm.start(replicas)
    await swarm.finish()
    return swarm


async def training(replicas: int, step: int = 5, **settings: Any) -> SimulatedSwarm:
    """A swarm in which every node has done `step` inner steps."""
    swarm: SimulatedSwarm = micro_swarm(**settings)
    await swarm.start(replicas)
    await everyone_reaches(swarm, step)
    return swarm


async def everyone_reaches(swarm: SimulatedSwarm, step: int) -> None:
    await until(lambda: all_reached(swarm.nodes.values(), step))


async def everyone_goes_on(swarm: SimulatedSwarm, steps: int = 10) -> None:
    """Each living node does that many more inner steps."""
    goals = {number: step_of(node) + steps for number, node in swarm.nodes.items()}
    await until(lambda: all(step_of(swarm.nodes[number]) >= goal for number, goal in goals.items()))


async def guest_of(swarm: SimulatedSwarm, name: str = "guest", stage: int | None = None) -> Rpc:
    """A peer that is no node, with a record of a `stage`, if any: it talks to the members as it pleases."""
    identity = Identity.from_seed(name)
    transport = MemoryTransport(swarm.network, identity)
    await transport.start()
    rpc = Rpc(transport)
    if stage is not None:
        rpc.introduction = introduction(swarm, identity, stage)
    return rpc


def introduction(swarm: SimulatedSwarm, identity: Identity, stage: int) -> Introduce:
    expires = swarm.network.now() + 3_000
    record = Announcement(stage=stage, state="serving", since=0.0).to_bytes()
    key = stage_key(swarm.seed_peer.signed.run_id, stage)
    return Introduce(stage=stage, record=seal_record(identity, key, record, expires), expires=expires)


async def observer_of(swarm: SimulatedSwarm, name: str = "visitor") -> Observer:
    """A visitor that has reached the seed peer, as `noloco status` and its sisters are."""
    rpc = await guest_of(swarm, name)
    await rpc.transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    return Observer(rpc.transport, rpc, swarm.seed_peer.signed)


def peer_of(node: Node) -> PeerId:
    return node.transport.peer_id


def numbers_of_stage(swarm: SimulatedSwarm, stage: int) -> list[int]:
    return [number for number, node in swarm.nodes.items() if node.context.stage == stage]


def assert_exact_admission(swarm: SimulatedSwarm, nodes: Container[Node] | None = None) -> None:
    """Each step that a node did itself took its batch; steps that it fell behind and downloaded are others'."""
    for number, node in swarm.nodes.items():
        if nodes is not None and node not in nodes:
            continue
        batch = node.context.manifest.inner.microbatches
        steps = len(events_of(swarm, "step", node=number))
        assert 0 <= node.context.counters.received - steps * batch <= batch


async def fails_to_join(swarm: SimulatedSwarm, number: int) -> Exception:
    task = swarm.tasks.pop(number)
    await asyncio.wait([task])
    del swarm.nodes[number]
    error = task.exception()
    assert isinstance(error, Exception)
    return error
