"""Does `noloco simulate swarm` tell the truth: six real processes on shaped links, and the same as events.

Two stages of three `noloco-node` and a seed peer, each in a network namespace of its own, links of `--mbit` each way
and `--one-way` ms. Devices of a given speed: each piece of work takes its time, whatever else the cores do. Needs
root. Ratios, simulated by real, means over the seeds: `throughput`, by the ideal; `activations`, `gradients` and
`rounds`, bytes of a peer and minute; `pairing` and `questions`, messages of a peer and minute. Of the searches of all
seeds together, seconds from the first proposal of a round to the yes: `search`, the mean of the faster three quarters
(the others wait for a replica to come into step), and `median`. In a stage of three about half of the searches take
one round trip, so that a median of few rounds is one or two of them. The simulated links are as long as the real ones
were measured (`shaping/round_trips.py`). `worst` is the ratio furthest from 1.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pipelines.chain import Chain, ChainFailed
from pipelines.published import tiny_as_published
from pipelines.purposes import PURPOSES, SMALL, activation_bytes, contribution_bytes, modelled, purpose_of
from reporting.report import Report, arguments_of, parser_of, run
from shaping.links import LinksUnavailable, Shape, ShapedLinks, why_unavailable
from shaping.round_trips import RoundTrips

from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome
from bootstrap.lab.simulated_swarm.swarm_scenario import swarm_scenario
from bootstrap.lab.simulated_swarm.swarm_world import simulate_swarm
from bootstrap.lab.simulation.study import as_they_end
from node.watch.trace import Track
from protocol.run.manifest import Manifest, manifest_from

REPLICAS, STAGES = 3, 2
BATCH, INNER_STEPS, LIFETIME = 4, 12, 45.0
HIDDEN, TOKENS = 256, 256
FASTER = 0.75  # of the searches, that wait for nobody to come into step


@dataclass(frozen=True)
class Seen:
    """Of one swarm."""

    throughput: float  # by the ideal
    round_trip: float  # seconds, of a packet
    searches: list[float]  # seconds
    sent: dict[str, float]  # of a peer and minute, bytes by purpose; of small messages how many


@dataclass(frozen=True)
class Order:
    """One real swarm to run."""

    seed: int
    minutes: float
    warm_up: float  # minutes
    mbit: float
    one_way: float  # ms
    hop: float  # seconds of a microbatch at a stage


def manifest_of(seed: int) -> Manifest:
    contents = tiny_as_published().model_dump()
    contents["stages"] = STAGES
    contents["model"] |= {
        "hidden_size": HIDDEN, "layers": STAGES, "heads": 4, "intermediate_size": HIDDEN, "seed": seed,
    }  # fmt: skip
    contents["data"] |= {"sequence_tokens": TOKENS}
    contents["inner"] |= {
        "microbatches": BATCH, "sequences": 1, "total_steps": 100_000, "staleness": 1, "optimizer": "adamw",
        "muon_learning_rate": None,
    }  # fmt: skip
    contents["outer"] |= {"inner_steps": INNER_STEPS}
    contents["limits"] |= {
        "record_lifetime": LIFETIME, "microbatch_deadline": 30.0, "gossip_deadline": 30.0,
    }  # fmt: skip
    return manifest_from(contents)


class Swarm(Chain):
    """Replicas of each stage, on devices of a given speed."""

    program = (str(Path(__file__).parent / "pipelines" / "paced_node.py"),)

    def stages(self) -> list[int]:
        return [stage for stage in range(STAGES) for _ in range(REPLICAS)]


def really(order: Order) -> tuple[Order, Seen]:
    """As processes. Takes the minutes and the warm-up, and half a minute to start."""
    os.environ["PACED_SECONDS"] = str(order.hop)
    manifest = manifest_of(order.seed)
    peers = 1 + REPLICAS * STAGES
    with ShapedLinks(peers, Shape(order.mbit, order.one_way / 1e3)) as links:
        places = [(links.address(peer), links.prefix(peer)) for peer in range(peers)]
        with (
            Swarm(manifest, places, traced=True) as swarm,
            RoundTrips(links.prefix(0), [links.address(peer) for peer in range(1, peers)]) as trips,
        ):
            nodes = range(REPLICAS * STAGES)
            swarm.wait_for(lambda: all(swarm.events("step", node) for node in nodes))
            began = time.time() + 60 * order.warm_up
            ends = began + 60 * order.minutes
            while time.time() < ends:
                swarm.require_alive()
                time.sleep(1.0)
            round_trip = trips.median()
            swarm.stop()
            return order, Seen(
                throughput=fmean(_microbatches_a_second(swarm, node, began, ends) for node in range(REPLICAS))
                * order.hop,
                round_trip=round_trip,
                searches=_searches(swarm, nodes, began, ends),
                sent=_sent(swarm, nodes, began, ends),
            )


def _microbatches_a_second(swarm: Swarm, node: int, began: float, ends: float) -> float:
    times = [event["time"] for event in swarm.events("step", node) if began <= event["time"] <= ends]
    return (len(times) - 1) * BATCH / (times[-1] - times[0])


def _searches(swarm: Swarm, nodes: Sequence[int], began: float, ends: float) -> list[float]:
    rounds = [event for node in nodes for event in swarm.events("round", node)]
    found = [event["search_seconds"] for event in rounds if began <= event["time"] <= ends]
    return [seconds for seconds in found if seconds is not None]


def _sent(swarm: Swarm, nodes: Sequence[int], began: float, ends: float) -> dict[str, float]:
    """Bytes of a peer and minute, by purpose; of small messages how many there were."""
    offset = time.time() - time.monotonic()  # traces have the second clock
    sums = Counter[str]()
    for node in nodes:
        told: list[dict[str, Any]] = json.loads(swarm.traces[node].read_text())
        names = {event["tid"]: event["args"]["name"] for event in told if event["name"] == "thread_name"}
        for event in told:
            purpose = purpose_of(event["name"])
            is_sent = names.get(event.get("tid"), "").startswith(Track.SEND)
            if purpose and is_sent and began <= event["ts"] / 1e6 + offset <= ends:
                sums[purpose] += 1 if purpose in SMALL else event["args"]["bytes"]
    return {purpose: total * 60 / (ends - began) / len(nodes) for purpose, total in sums.items()}


def simulated(order: Order, round_trip: float) -> Seen:
    """As events, on links whose round trip takes so many seconds."""
    manifest = manifest_of(order.seed)
    sizes = {
        "activation_bytes": activation_bytes(manifest),
        "state_bytes": contribution_bytes(manifest),
    }
    run_ = sizes | {
        "stages": STAGES, "inner_steps": INNER_STEPS, "microbatches": BATCH, "record_lifetime": LIFETIME,
        "seed": order.seed, "minutes": order.minutes + order.warm_up, "warm_up": order.warm_up,
    }  # fmt: skip
    kind = {
        "name": "equal", "count": STAGES * REPLICAS, "speed": 1 / order.hop, "spread": 0, "uplink": order.mbit,
    }  # fmt: skip
    region = {"name": "here", "share": 1, "latency": [1e3 * round_trip / 2]}
    network = {"loss": 0, "jitter": 0, "regions": [region]}
    world = simulate_swarm(swarm_scenario({"run": run_, "peers": [kind], "network": network}, "this"))
    outcome = SwarmOutcome.of(world)
    return Seen(
        throughput=outcome.throughput or 0.0,
        round_trip=world.network.round_trip,
        searches=[trips * world.network.round_trip for trips in world.measures.pairing_trips],
        sent=modelled(outcome.bytes),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--warm-up", type=float, default=1.0, help="minutes")
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--one-way", type=float, default=20.0, help="ms")
    parser.add_argument("--hop", type=float, default=1.0, help="seconds of a microbatch at a stage")
    parser.add_argument("--jobs", type=int, default=3, help="real swarms at a time; each takes some 3 GB")
    arguments = arguments_of(parser, seeds=1, minutes=0.7, warm_up=0.3, hop=0.25)
    reason = why_unavailable()
    if reason:
        raise LinksUnavailable(reason)
    report = Report("reality", arguments.json)
    orders = [
        Order(seed, arguments.minutes, arguments.warm_up, arguments.mbit, arguments.one_way, arguments.hop)
        for seed in range(arguments.seeds)
    ]
    pairs = []
    for order, real in as_they_end(really, orders, arguments.jobs):
        pairs.append((real, simulated(order, real.round_trip)))
        for name, seen in zip(("real", "simulated"), pairs[-1], strict=True):
            told = {"seed": order.seed, "as": name, "round_trip": seen.round_trip}
            report.tell_row(told | numbers(seen) | times_of(seen.searches))
    both = [[numbers(seen) for seen in side] for side in zip(*pairs, strict=True)]
    measured, simulation = ({what: fmean(row[what] for row in side) for what in side[0]} for side in both)
    really_sought, sought = (
        [one for seen in side for one in seen.searches] for side in zip(*pairs, strict=True)
    )
    measured |= times_of(really_sought)
    simulation |= times_of(sought)
    # without a ratio: what real nodes never did, as asking where the question takes long beside the work
    ratios = {what: round(simulation[what] / measured[what], 3) for what in measured if measured[what]}
    ratios["worst"] = max(ratios.values(), key=lambda ratio: abs(math.log(ratio)))
    report.conclude(ratios, [asdict(seen) for pair in pairs for seen in pair], f"means of {len(pairs)}")


def numbers(seen: Seen) -> dict[str, float]:
    return {"throughput": seen.throughput} | {purpose: seen.sent.get(purpose, 0.0) for purpose in PURPOSES}


def times_of(searches: Sequence[float]) -> dict[str, float]:
    """Seconds of searches that found somebody: what is typical of them, in two ways."""
    if not searches:
        return {"search": 0.0, "median": 0.0}
    faster = sorted(searches)[: math.ceil(FASTER * len(searches))]
    return {"search": fmean(faster), "median": median(searches)}


if __name__ == "__main__":
    run(main, ChainFailed, LinksUnavailable)
