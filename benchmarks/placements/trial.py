"""What a placement is worth to the daemon itself: a scenario's devices as a simulated swarm that trains.

Every device is a node of the daemon's own code over the in-memory network, with the scenario's latencies. The model
is a few kilobytes, so bandwidths are scaled down until one microbatch of it takes as long as one of the scenario's;
the work of one microbatch takes as long as a device of the scenario needs. Weights train for real, time is virtual.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pipelines.published import tiny_as_published

from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.placement.scenario import Scenario
from bootstrap.lab.simulation.learning import text_of
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.process.daemon import Node
from protocol.ground import PeerId
from protocol.run.manifest import Manifest, manifest_from

HEADER_BYTES = 150  # of a forward frame beside its tensors, about
LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Trial:
    """How the swarm trains. `microbatch_bytes`: activations of the scenario's microbatch over one hop.

    `forward_seconds` of a device of throughput 1; backward takes twice that.
    """

    microbatch_bytes: float = 2048 * 2048 * 2.0  # GPT3-1.3B: 2,048 tokens, 2,048 values in half precision
    forward_seconds: float = 0.02
    microbatches: int = 32
    warm_up_steps: int = 4
    steps: int = 4
    seed: int = 0


def trial_manifest(stages: int, trial: Trial) -> Manifest:
    """A Llama of one small layer to a stage."""
    contents = tiny_as_published().model_dump()
    contents["stages"] = stages
    contents["model"].update(hidden_size=16, layers=stages, heads=2, intermediate_size=32)
    contents["data"].update(sequence_tokens=16)
    contents["inner"].update(
        microbatches=trial.microbatches, sequences=1, total_steps=100_000, warmup_steps=10
    )
    contents["outer"].update(inner_steps=50)
    contents["limits"].update(microbatch_deadline=600.0, record_lifetime=60.0)
    return manifest_from(contents)


def tokens_per_second(scenario: Scenario, stage_of: Sequence[int], trial: Trial) -> float:
    """Of the whole swarm, in virtual time: first-stage tokens over the `steps` after the warm-up.

    `stage_of` [N] is the stage of each device. Takes about half a minute for 64 devices.
    """
    torch.set_num_threads(1)
    result: float = run_virtual(_train(scenario, stage_of, trial))
    return result


async def _train(scenario: Scenario, stage_of: Sequence[int], trial: Trial) -> float:
    manifest = trial_manifest(max(stage_of) + 1, trial)
    swarm = SimulatedSwarm(manifest, text_of(manifest), trial.seed, seconds=work_seconds(trial))
    device_of: dict[PeerId, int] = {}
    nbytes = _frame_bytes(manifest)
    swarm.network.link = lambda sender, receiver: link_between(
        scenario, device_of.get(sender), device_of.get(receiver), nbytes / trial.microbatch_bytes
    )
    await swarm.seed_peer.start()
    for device, stage in enumerate(stage_of):
        speed = 1.0 if scenario.throughput is None else float(scenario.throughput[device])
        node = swarm.add(device, stage=int(stage), speed=speed)
        device_of[node.transport.peer_id] = device
    first = [swarm.nodes[device] for device, stage in enumerate(stage_of) if stage == 0]
    try:
        began, before = await _reached(first, trial.warm_up_steps)
        ended, after = await _reached(first, trial.warm_up_steps + trial.steps)
    finally:
        for device in list(swarm.nodes):
            swarm.kill(device)
        await swarm.leave()
    return (after - before) / (ended - began)


async def _reached(nodes: Sequence[Node], steps: int) -> tuple[float, int]:
    """When the mean of the nodes' inner steps is `steps`, and the tokens that they have trained on by then."""
    while sum(  # noqa: ASYNC110  nobody is told of each step
        node.replica.step if hasattr(node, "replica") else 0 for node in nodes
    ) < steps * len(nodes):
        await asyncio.sleep(LOOK_SECONDS)
    return asyncio.get_running_loop().time(), sum(node.context.counters.tokens for node in nodes)


def link_between(scenario: Scenario, sender: int | None, receiver: int | None, scale: float) -> Link:
    """Between two devices; the seed peer, which is none, costs nothing."""
    if sender is None or receiver is None or sender == receiver:
        return Link()
    bandwidth = float(scenario.bandwidth[sender, receiver]) / 8 * scale
    return Link(
        float(scenario.latency[sender, receiver]), bandwidth if math.isfinite(bandwidth) else math.inf
    )


def work_seconds(trial: Trial) -> Callable[[int, Priority], float]:
    """Of each kind of work on a device of throughput 1, whatever its stage."""
    seconds = {
        Priority.BACKWARD: 2 * trial.forward_seconds,
        Priority.FORWARD: trial.forward_seconds,
        Priority.OPTIMIZER: trial.forward_seconds,
        Priority.SERVE: 0.0,
        Priority.SNAPSHOT: 0.0,
    }
    return lambda stage, priority: seconds[priority]


def _frame_bytes(manifest: Manifest) -> int:
    """Of a microbatch with its labels on the way to the next stage."""
    tokens = manifest.tokens_per_microbatch
    width = {"fp32": 4, "bf16": 2}[manifest.wire.activations]
    return tokens * (manifest.model.hidden_size * width + 4) + HEADER_BYTES
