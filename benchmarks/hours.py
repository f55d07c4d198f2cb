"""Hours, not tokens: how long NoLoCo, DiLoCo and all-reduce take to one loss on the same volunteers' machines.

Four replicas whose speeds span a factor of four, uplinks of 20 to 300 Mbit/s, latencies drawn log-normal around
40 ms, and 5 % of them killed in each minute, each replaced by a newcomer of the same speed and link that gets its
state from a member. NoLoCo and DiLoCo are the daemon's own code in one process under virtual time. The model is the
preset tiny, which learns for real, and takes the time of one of 124 million parameters: an inner step lasts a second
at speed 1 (32,000 tokens on an RTX 3090), and weights on the way count 420 times. All-reduce is given the best of
everything: its steps are shared out by speed, its ring of bf16 gradients hides behind computing or the reverse, and
no departure costs it anything; so its time is a lower bound.

The aim is all-reduce's loss at its end plus 0.05 nats, by the replica that is furthest. Ratios are virtual hours
relative to the other two's, as means over seeds. Outcomes are kept in docs/data/hours.jsonl; those that are there are
not run again.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.simulation.learning import loss_along, text_of
from bootstrap.simulation.study import interval, one_setting
from bootstrap.simulation.swarm import WORK_SECONDS, SimulatedSwarm
from node.daemon import Node
from node.data.batches import TrainingData
from node.model.compute import Priority
from protocol.identity import Identity
from protocol.manifest import Manifest, load_preset
from protocol.transport.base import PeerId
from protocol.transport.memory_link import BULK_BYTES, Link
from protocol.transport.memory_stream import StreamLimits
from protocol.transport.virtual_time import run_virtual

RESULTS = Path(__file__).parents[1] / "docs" / "data" / "hours.jsonl"
REPLICAS = 4
STOOD_FOR = 124_000_000  # parameters of the model whose time is taken
STEP_SECONDS = 1.0  # of it, at speed 1
SPEEDS = (0.5, 2.0)
UPLINKS = (20.0, 300.0)  # Mbit/s
LATENCY, LATENCY_DEVIATION = 0.04, 0.5  # median in seconds, and the deviation of its logarithm
CHURN = 0.05  # of the peers, in a minute
DEADLINE = 300.0  # for a piece of weights, which here is nearly all of them
BEHIND = 0.05  # nats
LOOKS = 50  # at the loss, in the second half of a run
MICROBATCHES, SEQUENCES = 1, 2
PLAIN_MEAN = {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}


@dataclass(frozen=True)
class Order:
    """What to run: `steps` is the length of the schedule, by which the learning rate falls."""

    method: str
    seed: int
    steps: int
    k: int = 1
    codec: str = "fp32"
    churn: float = CHURN


@dataclass
class Course:
    """What came of it: `course` has (virtual seconds, step, loss) of the replica that was furthest."""

    order: dict[str, object]
    course: list[tuple[float, int, float]] = field(default_factory=list)
    killed: int = 0
    wall_seconds: float = 0.0

    def seconds_to(self, loss: float) -> float:
        """Virtual seconds until it was there; infinite if it never was."""
        return next((seconds for seconds, _, reached in self.course if reached <= loss), math.inf)


@dataclass(frozen=True)
class Machines:
    """The volunteers' machines of one seed; a newcomer has that of the one it replaces."""

    speeds: tuple[float, ...]
    uplinks: tuple[float, ...]  # bytes per second
    seed: int

    @classmethod
    def drawn(cls, seed: int) -> Machines:
        rng = Random(f"machines/{seed}")
        return cls(_over(SPEEDS, rng), tuple(mbit * 1e6 / 8 for mbit in _over(UPLINKS, rng)), seed)

    def latency(self, one: int, other: int) -> float:
        """Seconds one way between two of them, the same in both directions."""
        rng = Random(f"latency/{self.seed}/{min(one, other)}/{max(one, other)}")
        return rng.lognormvariate(math.log(LATENCY), LATENCY_DEVIATION)


def _over(bounds: tuple[float, float], rng: Random) -> tuple[float, ...]:
    """One value of each machine, evenly over the range of logarithms so that both ends are there, shuffled."""
    low, high = bounds
    values = [low * (high / low) ** (number / (REPLICAS - 1)) for number in range(REPLICAS)]
    rng.shuffle(values)
    return tuple(values)


def manifest_of(order: Order) -> Manifest:
    chosen = {
        "inner.muon_learning_rate": 8e-3,
        "outer.pace": "time",
        "wire.gossip": order.codec,
        "limits.gossip_deadline": DEADLINE,
    }
    microbatches = MICROBATCHES * (REPLICAS if order.method == "all-reduce" else 1)
    method = "local" if order.method == "all-reduce" else order.method
    return one_setting(
        load_preset("tiny"), order.steps, microbatches, SEQUENCES,
        method=method, stages=1, seed=order.seed, inner_steps=order.k, chosen=chosen, **PLAIN_MEAN,
    ).manifest  # fmt: skip


class Swarm:
    """The swarm of an order: who stands on which machine, and how often one was killed."""

    def __init__(self, order: Order, data: TrainingData) -> None:
        self.order, self.machines = order, Machines.drawn(order.seed)
        manifest = manifest_of(order)
        self.scale = STOOD_FOR / 295_488
        self._place: dict[PeerId, int] = {}  # the machine of each peer
        self._rng = Random(f"churn/{order.seed}")
        self._next = 0
        self.killed = 0
        unit = STEP_SECONDS / sum(
            WORK_SECONDS[p] for p in (Priority.FORWARD, Priority.BACKWARD, Priority.OPTIMIZER)
        )
        if order.method == "all-reduce":
            unit /= MICROBATCHES * REPLICAS
        self.swarm = SimulatedSwarm(
            manifest,
            data,
            order.seed,
            self._link,
            seconds=lambda stage, priority: unit * WORK_SECONDS[priority],
        )
        self.swarm.network.limits = StreamLimits(window=4 * BULK_BYTES, chunk=BULK_BYTES)

    def _link(self, sender: PeerId, receiver: PeerId) -> Link:
        here, there = self._place.get(sender), self._place.get(receiver)
        if here is None or there is None:  # the seed peer, which no weights go through
            return Link(latency=LATENCY)
        return Link(self.machines.latency(here, there), self.machines.uplinks[here], bulk=self.scale)

    def add(self, machine: int) -> None:
        number, self._next = self._next, self._next + 1
        self._place[Identity.from_seed("node", self.order.seed, number).peer_id] = machine
        self.swarm.add(number, stage=0, speed=self.machines.speeds[machine])

    async def churn(self) -> None:
        """Kill one at random now and then, as long as another one trains, and let a newcomer take its machine."""
        while True:
            await asyncio.sleep(self._rng.expovariate(self.order.churn * REPLICAS / 60))
            trains = [number for number, node in self.swarm.nodes.items() if node.public_state == "serving"]
            if len(trains) > 1:
                number = self._rng.choice(trains)
                machine = self._place[self.swarm.nodes[number].transport.peer_id]
                self.swarm.kill(number)
                self.killed += 1
                self.add(machine)

    def furthest(self) -> Node | None:
        trains = [node for node in self.swarm.nodes.values() if node.public_state in ("serving", "finished")]
        return max(trains, key=lambda node: node.replica.step, default=None)


async def trained(order: Order, data: TrainingData, sequences: int) -> Course:
    """Train until the furthest replica has finished. All-reduce is one replica in the time of `all_reduce_step`."""
    outcome = Course(asdict(order))
    began = time.perf_counter()
    swarm = Swarm(order, data)
    await swarm.swarm.seed_peer.start()
    for machine in range(1 if order.method == "all-reduce" else REPLICAS):
        swarm.add(machine)
    churning = asyncio.ensure_future(swarm.churn() if order.churn else asyncio.sleep(math.inf))
    due, clock = order.steps // 2, asyncio.get_running_loop().time
    start = None
    while True:
        await asyncio.sleep(STEP_SECONDS / 4)
        furthest = swarm.furthest()
        for number, task in swarm.swarm.tasks.items():
            if task.done() and swarm.swarm.nodes[number].public_state != "finished":
                task.result()
        if furthest is None:
            continue
        if start is None:
            start = clock()
        step = furthest.replica.step
        if step >= due or furthest.public_state == "finished":
            due = step + max(1, order.steps // (2 * LOOKS))
            loss = loss_along([furthest.replica], data, sequences)
            outcome.course.append((round(clock() - start, 3), step, round(loss, 5)))
        if furthest.public_state == "finished":
            break
    churning.cancel()
    await swarm.swarm.leave()
    outcome.killed = swarm.killed
    if order.method == "all-reduce":
        seconds = all_reduce_step(swarm.machines)
        outcome.course = [(step * seconds, step, loss) for _, step, loss in outcome.course]
    outcome.wall_seconds = round(time.perf_counter() - began, 1)
    return outcome


def all_reduce_step(machines: Machines) -> float:
    """Seconds of a step at best: work shared out by speed, and the slower of it and a ring of bf16 gradients.

    A ring sends 2(N − 1)/N of the gradients through each uplink, in 2(N − 1) steps of its longest latency.
    """
    computing = STEP_SECONDS * REPLICAS / sum(machines.speeds)
    passed = 2 * (REPLICAS - 1) / REPLICAS * 2 * STOOD_FOR / min(machines.uplinks)
    hop = max(machines.latency(one, (one + 1) % REPLICAS) for one in range(REPLICAS))
    return max(computing, passed + 2 * (REPLICAS - 1) * hop)


def kept(file: Path | None) -> Iterator[Course]:
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            contents = json.loads(line)
            contents["course"] = [tuple(look) for look in contents["course"]]
            yield Course(**contents)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help="all-reduce's schedule")
    parser.add_argument("--noloco", nargs=3, default=["mod3", "8", "1500"], metavar=("CODEC", "K", "STEPS"))
    parser.add_argument("--diloco", nargs=3, default=["int8", "34", "2000"], metavar=("CODEC", "K", "STEPS"))
    parser.add_argument("--churn", type=float, default=CHURN, help="share of the peers in a minute")
    parser.add_argument("--behind", type=float, default=BEHIND, help="nats above all-reduce's end")
    parser.add_argument("--sequences", type=int, default=256, help="held-out ones")
    arguments = arguments_of(
        parser, results=None, seeds=[0], steps=8, noloco=["mod3", "2", "8"], diloco=["int8", "2", "8"], sequences=8,
        behind=5.0,
    )  # fmt: skip
    report = Report("hours", arguments.json)
    torch.set_num_threads(1)
    known = {json.dumps(course.order, sort_keys=True): course for course in kept(arguments.results)}

    def course_of(order: Order) -> Course:
        key = json.dumps(asdict(order), sort_keys=True)
        if key not in known:
            data = text_of(manifest_of(order))
            course: Course = run_virtual(trained(order, data, arguments.sequences))
            known[key] = course
            if arguments.results is not None:
                with arguments.results.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(course)) + "\n")
        return known[key]

    hours: dict[str, list[float]] = {"all-reduce": [], "noloco": [], "diloco": []}
    results = []
    for seed in arguments.seeds:
        baseline = course_of(Order("all-reduce", seed, arguments.steps, churn=0.0))
        aim = baseline.course[-1][2] + arguments.behind
        for method, found in hours.items():
            course = baseline
            if method != "all-reduce":
                codec, k, steps = getattr(arguments, method)
                course = course_of(Order(method, seed, int(steps), int(k), codec, arguments.churn))
            found.append(course.seconds_to(aim) / 3600)
            row = {
                "method": method,
                "seed": seed,
                "aim": round(aim, 4),
                "hours": round(found[-1], 4),
                "end": course.course[-1][2],
                "hours_at_the_end": round(course.course[-1][0] / 3600, 4),
                "killed": course.killed,
            }
            results.append(row)
            report.tell_row(row)
    ratios = {}
    for other in ("all-reduce", "diloco"):
        pairs = zip(hours["noloco"], hours[other], strict=True)
        shares = [mine / its for mine, its in pairs if math.isfinite(mine) and math.isfinite(its)]
        if len(shares) < len(arguments.seeds):
            report.tell(f"NoLoCo or {other} never got there in {len(arguments.seeds) - len(shares)} seeds.")
        if shares:
            ratios[f"noloco_hours_of_{other.replace('-', '_')}"] = round(fmean(shares), 4)
            half, each = interval(shares), ", ".join(f"{share:.3f}" for share in shares)
            report.tell(f"NoLoCo's hours of {other}'s: {each}{'' if half is None else f' (± {half})'}")
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
