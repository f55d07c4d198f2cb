"""What a peer pays for a larger swarm: the same peers and network, ten of them, a hundred, a thousand, ten thousand.

Peers as events (`noloco simulate swarm`): two stages, one region, rounds of twelve inner steps of two seconds (of
eight with `--speed 0.5`, which makes an hour of many peers four times as cheap), records of 45 seconds, and one in a
hundred peers a minute that vanishes while another one arrives. Of each size: bytes of the DHT and of questions a peer
and minute, the median and the 95th percentile of the search for a partner in round trips, rounds alone, the most over
the mean of microbatches in a stage, and how long a newcomer takes to its first gradient. Ratios are those of the
largest size to the smallest, and `…_from_N` to the second smallest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.simulated_swarm.swarm_outcome import SwarmOutcome
from bootstrap.lab.simulated_swarm.swarm_scenario import swarm_scenario
from bootstrap.lab.simulated_swarm.swarm_world import simulate_swarm

LATENCY = 30.0  # ms one way
CHURN = 0.01
COMPARED = ("discovery", "questions", "pairing_median", "pairing_p95", "imbalance", "useful_after")


@dataclass(frozen=True)
class Size:
    """What a swarm of so many peers gave."""

    peers: int
    discovery: float  # bytes of a peer and minute
    questions: float
    pairing_median: float  # round trips
    pairing_p95: float
    alone: float  # share of the rounds
    imbalance: float
    useful_after: float  # seconds, median
    throughput: float  # by the ideal
    rounds: int
    processor_seconds: float


def size(peers: int, speed: float, spread: float, minutes: float, warm_up: float, seed: int) -> Size:
    began = time.process_time()
    run_ = {
        "stages": 2,
        "microbatches": 4,
        "inner_steps": 12,
        "minutes": minutes,
        "warm_up": warm_up,
        "seed": seed,
    }
    kind = {"name": "equal", "count": peers, "speed": speed, "spread": spread, "preempted": CHURN}
    region = {"name": "here", "share": 1, "latency": [LATENCY]}
    scenario = swarm_scenario({"run": run_, "peers": [kind], "network": {"regions": [region]}}, "this")
    outcome = SwarmOutcome.of(simulate_swarm(scenario))
    return Size(
        peers=peers,
        discovery=outcome.bytes.get("discovery", 0.0),
        questions=outcome.bytes.get("questions", 0.0),
        pairing_median=outcome.pairing_median or 0.0,
        pairing_p95=outcome.pairing_p95 or 0.0,
        alone=outcome.alone or 0.0,
        imbalance=outcome.imbalance or 0.0,
        useful_after=outcome.useful_after or 0.0,
        throughput=outcome.throughput or 0.0,
        rounds=outcome.rounds,
        processor_seconds=round(time.process_time() - began, 1),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument(
        "--peer-minutes", type=float, default=30_000.0, help="of each size, where --minutes allows"
    )
    parser.add_argument(
        "--minutes", type=float, nargs=2, default=[5.0, 600.0], help="least and most, virtual"
    )
    parser.add_argument("--speed", type=float, default=2.0, help="microbatches a second that a peer computes")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="standard deviation of their speeds, relative"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = arguments_of(parser, sizes=[10, 20], peer_minutes=100.0)
    report, (least, most) = Report("growth", arguments.json), arguments.minutes
    rows = []
    for peers in arguments.sizes:
        minutes = min(max(least, arguments.peer_minutes / peers), most)
        warm_up = min(2.0, minutes / 2)
        rows.append(size(peers, arguments.speed, arguments.spread, minutes, warm_up, arguments.seed))
        report.tell_row(vars(rows[-1]))
    ratios = {}
    for name in COMPARED:
        first, second, last = (getattr(row, name) for row in (rows[0], rows[1], rows[-1]))
        ratios[name] = last / first if first else 0.0
        ratios[f"{name}_from_{rows[1].peers}"] = last / second if second else 0.0
    report.conclude(ratios, [vars(row) for row in rows])


if __name__ == "__main__":
    run(main)
