"""Does anybody honest get blamed? Ten thousand rounds in which nobody does wrong, on machines that differ.

Whole daemons in one process under virtual time, eight replicas of each of two stages, with the defence of the
volunteers' presets and every look at others' work. Half of the replicas compute in bf16, the others in float32; every
second one is a device whose passes are never the same twice (each output is off by up to a 256th of itself). The last
one is three times slower. One in twenty streams cannot be opened, one in twenty writes breaks its stream, and every
minute one node, chosen at random, is killed and comes back with its checkpoint two seconds later.

Counted: rounds, how often anybody was set aside, for how many seconds, and how many still are at the end. Ratios:
`set_aside`, that many; `harm`, the loss minus that of the same run with nothing looked at, in nats per token; and
`processor`, processor seconds a step by that run's.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulation.crowd import SET_ASIDE
from bootstrap.lab.simulation.learning import loss_along, routes_of, text_of
from bootstrap.lab.simulation.liars import replica_with
from bootstrap.lab.simulation.study import one_setting
from bootstrap.lab.simulation.swarm import WORK_SECONDS, SimulatedSwarm
from node.model.passes import Learned, Passes
from node.model.replica import Replica
from protocol.run.manifest import Manifest, load_preset

REPLICAS, STAGES, INNER_STEPS = 8, 2, 4
SLOWED, SLOWER = REPLICAS * STAGES - 1, 3.0
ROUNDING = 2.0**-8  # of a value, at most
LOSS = 0.05  # of openings, and of writes
LATENCY = 0.05
WORK = 10  # times as long as the default: a step takes a third of a second at speed 1
BETWEEN_KILLS, DEAD = 60.0, 2.0  # seconds
SMALL = {
    "model.hidden_size": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "data.sequence_tokens": 64,
    "outer.inner_steps": INNER_STEPS,
}
LOOKED_AT = {"outer.clip": 1.5, "checked": 0.01}
NOTHING = {"outer.clip": 0.0, "checked": 0.0}
WIRE = {"activations": "bf16", "gradients": "bf16"}
SEQUENCES = 512  # held out, for the loss: with 64 a run differs from the next by 0.02 by chance alone


class Unsteady(Passes):
    """Computes the same with other roundings each time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, outputs = super().forward(inputs)
        return leaf, outputs * self._rounding(outputs)

    def last_stage(self, inputs: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Learned:
        loss, by_inputs = super().last_stage(inputs, labels, *rest)
        return loss, None if by_inputs is None else by_inputs * self._rounding(by_inputs)

    def _rounding(self, values: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(values.shape, generator=self._generator)
        return (1 + ROUNDING * (2 * drawn - 1)).to(values.dtype)


@dataclass
class Course:
    """What came of a run. `set_aside` has who was, by whom, by which event and when, in virtual seconds."""

    looks: bool
    rounds: int = 0
    steps: int = 0
    kills: int = 0
    loss: float = 0.0
    seconds: float = 0.0  # virtual
    processor_seconds: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    set_aside: list[tuple[int, int, str, float]] = field(default_factory=list)
    offences: dict[str, int] = field(default_factory=dict)
    still_aside: int = 0


def manifest_of(steps: int, seed: int, defence: Mapping[str, object]) -> Manifest:
    return one_setting(
        load_preset("tiny"), steps, 1, 1,
        replicas=REPLICAS, stages=STAGES, seed=seed, wire=WIRE, chosen=SMALL | defence,
    ).manifest  # fmt: skip


async def train(course: Course, steps: int, seed: int, directory: Path) -> None:
    """Train to the last step, with kills; fill in `course`."""
    manifest = manifest_of(steps, seed, LOOKED_AT if course.looks else NOTHING)
    data = text_of(manifest)
    link = Link(latency=LATENCY, open_loss=LOSS, write_loss=LOSS)
    swarm = SimulatedSwarm(
        manifest, data, seed, link, directory, seconds=lambda _, piece: WORK * WORK_SECONDS[piece]
    )
    await swarm.seed_peer.start()
    for number in range(REPLICAS * STAGES):
        add(swarm, number)
    killing = asyncio.get_running_loop().create_task(kill_some(swarm, course, Random(f"kills/{seed}")))
    names: dict[str, int] = {}
    count = REPLICAS * STAGES  # fewer while one is dead
    while len(swarm.nodes) < count or not all(n.public_state == "finished" for n in swarm.nodes.values()):
        names |= {node.context.me: number for number, node in swarm.nodes.items() if hasattr(node, "context")}
        for task in swarm.tasks.values():
            if task.done():
                task.result()
        await asyncio.sleep(1.0)
    killing.cancel()
    course.seconds = asyncio.get_running_loop().time()
    course.still_aside = sum(
        node.context.view.ledger.is_quarantined(peer, node.context.view.elapsed())
        for node in swarm.nodes.values()
        for peer in names
    )
    await swarm.finish()
    losses = [loss_along(route, data, SEQUENCES) for route in routes_of(swarm)]
    course.loss = sum(losses) / len(losses)
    events = Counter(event["event"] for event in swarm.events)
    course.events = dict(events.most_common())
    course.rounds, course.steps = events["round"], events["step"]
    offences = Counter(event["offence"] for event in swarm.events if event.get("offence"))
    course.offences = dict(offences)
    course.set_aside = [
        (names[event[SET_ASIDE[event["event"]]]], event["node"], event["event"], round(event["time"], 1))
        for event in swarm.events
        if event["event"] in SET_ASIDE
    ]


def add(swarm: SimulatedSwarm, number: int) -> None:
    row = number // STAGES
    swarm.add(
        number,
        stage=number % STAGES,
        speed=1 / SLOWER if number == SLOWED else 1.0,
        precision="bf16" if row % 2 else "fp32",
        compile="off",
        replica=replica_with(Unsteady) if row // 2 % 2 else Replica,
    )


async def kill_some(swarm: SimulatedSwarm, course: Course, rng: Random) -> None:
    while True:
        await asyncio.sleep(BETWEEN_KILLS)
        training = sorted(n for n, node in swarm.nodes.items() if node.public_state == "serving")
        if not training:
            continue
        number = rng.choice(training)
        swarm.kill(number)
        course.kills += 1
        await asyncio.sleep(DEAD)
        add(swarm, number)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = arguments_of(parser, steps=12)
    torch.set_num_threads(1)
    report, courses = Report("false_alarms", arguments.json), []
    for looks in (True, False):
        course, began = Course(looks), time.process_time()
        with tempfile.TemporaryDirectory() as directory:
            run_virtual(train(course, arguments.steps, arguments.seed, Path(directory)))
        course.processor_seconds = round(time.process_time() - began, 1)
        report.tell_row(asdict(course))
        courses.append(course)
    looked, plain = courses
    ratios = {
        "set_aside": float(len(looked.set_aside)),
        "still_aside": float(looked.still_aside),
        "harm": looked.loss - plain.loss,
        "processor": looked.processor_seconds / looked.steps / (plain.processor_seconds / plain.steps),
    }
    report.conclude(ratios, [asdict(course) for course in courses])


if __name__ == "__main__":
    run(main)
