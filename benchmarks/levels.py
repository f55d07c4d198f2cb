"""Do the two levels of a simulated swarm agree: peers as events (`noloco simulate swarm`) and whole daemons?

Equal peers in two stages, a second of work for a microbatch, 20 ms one way. The daemons run with real frames and
tensors under virtual time, the events decide by the same classes. Ratios, events by daemons, for so many peers:
`throughput_N` and `rounds_N` (of a peer and minute), `search_N`, the median time from the first proposal of a round
to the yes, `activations_N`, `gradients_N` and `exchanges_N`, bytes for them, `pairing_N` and `questions_N`, messages;
and differences: `alone_N`, of the share of rounds alone, and `blocked_N`, of the share of time blocked at their end.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from pipelines.purposes import PURPOSES, SentFrames, activation_bytes, contribution_bytes, modelled
from placements.trial import Trial, trial_manifest
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome
from bootstrap.lab.simulated_swarm.swarm_scenario import swarm_scenario
from bootstrap.lab.simulated_swarm.swarm_world import simulate_swarm
from bootstrap.lab.simulation.learning import text_of
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from protocol.run.manifest import Manifest, manifest_from

HOP = 1.0  # seconds of a microbatch at a stage
LATENCY = 0.02
BATCH, INNER_STEPS, LIFETIME = 4, 12, 45.0
WARM_UP = 120.0  # seconds; the whole daemons', which train all the while, as many after they have begun


@dataclass(frozen=True)
class Level:
    """What both say of a swarm."""

    throughput: float  # by the ideal
    rounds: float  # of a peer and minute
    alone: float  # share of the rounds
    blocked: float  # share of the time, at the end of rounds
    search: float  # seconds, median
    sent: dict[str, float]  # of a peer and minute, bytes by purpose; of small messages how many


def work_seconds(stage: int, priority: Priority) -> float:
    """The last stage does both passes in one piece."""
    if priority is Priority.FORWARD:
        return HOP if stage else HOP / 3
    return 2 * HOP / 3 if priority is Priority.BACKWARD else 0.0


def manifest() -> Manifest:
    contents = trial_manifest(2, Trial(microbatches=BATCH)).model_dump()
    contents["inner"] |= {"staleness": 1}
    contents["outer"] |= {"inner_steps": INNER_STEPS}
    contents["limits"] |= {
        "record_lifetime": LIFETIME, "microbatch_deadline": 30.0, "gossip_deadline": 30.0,
    }  # fmt: skip
    return manifest_from(contents)


async def _trained(replicas: int, minutes: float, seed: int) -> Level:
    link = Link(latency=LATENCY, jitter=LATENCY / 4)
    frames = SentFrames()
    swarm = SimulatedSwarm(manifest(), text_of(manifest()), seed, link, seconds=work_seconds, trace=frames)
    await swarm.start(replicas)
    await asyncio.sleep(WARM_UP)
    first = [node for number, node in swarm.nodes.items() if number % 2 == 0]
    before, known = [node.context.counters.received for node in first], len(swarm.events)
    frames.sums.clear()
    await asyncio.sleep(60 * minutes)
    sent = {purpose: total / minutes / (2 * replicas) for purpose, total in frames.sums.items()}
    done = sum(n.context.counters.received - was for n, was in zip(first, before, strict=True))
    ended: list[dict[str, Any]] = [event for event in swarm.events[known:] if event["event"] == "round"]
    for number in list(swarm.nodes):
        swarm.kill(number)
    await swarm.leave()
    seconds = 60 * minutes
    return Level(
        throughput=done * HOP / replicas / seconds,
        rounds=len(ended) / (2 * replicas) / minutes,
        alone=fmean(event["partner"] is None for event in ended),
        blocked=sum(event["blocked_seconds"] for event in ended) / seconds / (2 * replicas),
        search=median(event["search_seconds"] for event in ended if event["search_seconds"] is not None),
        sent=sent,
    )


def whole_daemons(replicas: int, minutes: float, seed: int = 1) -> Level:
    torch.set_num_threads(1)
    level: Level = run_virtual(_trained(replicas, minutes, seed))
    return level


def as_events(replicas: int, minutes: float, seed: int = 1) -> Level:
    founded = manifest()
    run_ = {
        "stages": 2, "inner_steps": INNER_STEPS, "microbatches": BATCH, "activation_bytes": activation_bytes(founded),
        "state_bytes": contribution_bytes(founded), "record_lifetime": LIFETIME, "seed": seed,
        "minutes": minutes + WARM_UP / 60, "warm_up": WARM_UP / 60,
    }  # fmt: skip
    region = {"name": "here", "share": 1, "latency": [1_000 * LATENCY]}
    kind = {"name": "equal", "count": 2 * replicas, "speed": 1 / HOP, "spread": 0, "uplink": 10_000}
    network = {"loss": 0, "regions": [region]}
    world = simulate_swarm(swarm_scenario({"run": run_, "peers": [kind], "network": network}, "both"))
    outcome = SwarmOutcome.of(world)
    return Level(
        throughput=outcome.throughput or 0.0,
        rounds=outcome.rounds / (2 * replicas) / minutes,
        alone=outcome.alone or 0.0,
        blocked=outcome.idle.get("round", 0.0),
        search=(outcome.pairing_median or 0.0) * world.network.round_trip,
        sent=modelled(outcome.bytes),
    )


def _name(purpose: str) -> str:
    """Rounds are counted, too."""
    return "exchanges" if purpose == "rounds" else purpose


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = arguments_of(parser, peers=[4], minutes=1.5)
    report = Report("levels", arguments.json)
    ratios, rows = {}, []
    for peers in arguments.peers:
        whole = whole_daemons(peers // 2, arguments.minutes, arguments.seed)
        events = as_events(peers // 2, arguments.minutes, arguments.seed)
        for name, level in (("daemons", whole), ("events", events)):
            facts = asdict(level)
            sent = facts.pop("sent")
            row = {"peers": peers, "as": name} | {what: round(value, 4) for what, value in facts.items()}
            row |= {_name(purpose): round(sent.get(purpose, 0.0)) for purpose in PURPOSES}
            rows.append(row)
            report.tell_row(row)
        ratios[f"throughput_{peers}"] = round(events.throughput / whole.throughput, 3)
        ratios[f"rounds_{peers}"] = round(events.rounds / whole.rounds, 3)
        ratios[f"search_{peers}"] = round(events.search / whole.search, 3)
        for purpose in PURPOSES:
            ratios[f"{_name(purpose)}_{peers}"] = round(events.sent[purpose] / whole.sent[purpose], 3)
        ratios[f"alone_{peers}"] = round(events.alone - whole.alone, 4)
        ratios[f"blocked_{peers}"] = round(events.blocked - whole.blocked, 4)
    report.conclude(ratios, rows)


if __name__ == "__main__":
    run(main)
