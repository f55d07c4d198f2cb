"""What a second choice is worth: how much of what its devices could do a swarm does, by how a peer is chosen.

Whole daemons under virtual time, two stages of `--replicas`, 20 ms one way between any two, half a second of work for
a microbatch at either stage, no staleness. A sender takes one random peer of the next stage, or of two the one with
less to do (node/pipeline/two_choices.py). Inner steps of 4 and of 16 microbatches; all devices alike, or a quarter of
each stage three times slower. The ideal is the sum of the first stage's speeds. Ratios: `alike_4`, `alike_16`,
`slower_4`, `slower_16`, microbatches a second with two choices by those with one, means over the seeds.
"""

from __future__ import annotations

import asyncio
from statistics import fmean
from unittest.mock import patch

import torch
from placements.trial import Trial, trial_manifest
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulation.learning import text_of
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.pipeline.two_choices import TwoChoices

LINK = Link(latency=0.02, jitter=0.01)
SECONDS = 0.5  # of work for a microbatch, at a speed of 1
SLOWER = 1 / 3
BATCHES = (4, 16)
WORK = {Priority.FORWARD: SECONDS / 3, Priority.BACKWARD: 2 * SECONDS / 3}


def work_seconds(stage: int, priority: Priority) -> float:
    """The last stage does both passes of a microbatch in one."""
    return SECONDS if stage == 1 and priority is Priority.FORWARD else WORK.get(priority, 0.002)


async def trained(speeds: list[float], microbatches: int, seed: int, seconds: float) -> float:
    """Microbatches that the first stage has done by what it could; each stage has devices of these speeds."""
    manifest = trial_manifest(2, Trial(microbatches=microbatches))
    swarm = SimulatedSwarm(manifest, text_of(manifest), seed, LINK, seconds=work_seconds)
    await swarm.seed_peer.start()
    for number, speed in enumerate(speeds):
        for stage in (0, 1):
            swarm.add(2 * number + stage, stage=stage, speed=speed)
    first = [node for number, node in swarm.nodes.items() if number % 2 == 0]
    await asyncio.sleep(0.2 * seconds)
    before = sum(node.context.counters.tokens for node in first)
    await asyncio.sleep(seconds)
    done = sum(node.context.counters.tokens for node in first) - before
    for number in list(swarm.nodes):
        swarm.kill(number)
    await swarm.leave()
    return done / manifest.tokens_per_microbatch * SECONDS / seconds / sum(speeds)


def one_choice(self: TwoChoices, *peers: object, **how: object) -> list[object]:
    return _TWO(self, *peers, **how)[:1]  # type: ignore[arg-type]


_TWO = TwoChoices.candidates


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, default=8, help="of each stage")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual, that are measured")
    arguments = arguments_of(parser, replicas=4, seeds=1, seconds=8.0)
    torch.set_num_threads(1)
    report = Report("choices", arguments.json)
    slow = max(1, arguments.replicas // 4)
    kinds = {
        "alike": [1.0] * arguments.replicas,
        "slower": [1.0] * (arguments.replicas - slow) + [SLOWER] * slow,
    }
    ratios, rows = {}, []
    for kind, speeds in kinds.items():
        for batch in BATCHES:
            found = {}
            for choices in (1, 2):
                with patch.object(TwoChoices, "candidates", one_choice if choices == 1 else _TWO):
                    found[choices] = fmean(
                        run_virtual(trained(speeds, batch, seed, arguments.seconds))
                        for seed in range(arguments.seeds)
                    )
            row = {
                "devices": kind,
                "microbatches": batch,
                "one_by_ideal": round(found[1], 3),
                "two_by_ideal": round(found[2], 3),
            }
            rows.append(row)
            report.tell_row(row)
            ratios[f"{kind}_{batch}"] = round(found[2] / found[1], 3)
    report.conclude(ratios, rows)


if __name__ == "__main__":
    run(main)
