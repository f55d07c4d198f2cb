"""Hours, not tokens: how long NoLoCo, DiLoCo and all-reduce take to one loss on the same volunteers' machines.

Four replicas whose speeds span a factor of four, uplinks of 20 to 300 Mbit/s, latencies drawn log-normal around
40 ms, and 5 % of them killed in each minute, each replaced by a newcomer of the same speed and link that gets its
state from a member. NoLoCo and DiLoCo are the daemon's own code in one process under virtual time. The model is the
preset tiny, which learns for real, and takes the time of one of 31 million parameters: an inner step lasts a quarter
of a second at speed 1 (32,000 tokens on an RTX 3090), and weights on the way count 105 times. All-reduce is given the
best of everything: its steps are shared out by speed, its ring of bf16 gradients hides behind computing or the
reverse, and no departure costs it anything; so its time is a lower bound.

The four join before anything takes time: the clock, the killing and the weight of weights begin when all of them
serve, and none has trained by then. Newcomers pay for their download.

The aim is all-reduce's loss at its end plus 0.05 nats, by the replica that is furthest: its slow weights as they are
at each look, which is what it would export. Ratios are virtual hours relative to the other two's, as means over
seeds. Outcomes are kept in docs/data/hours.jsonl; those that are there, of the same machines, are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.in_memory.memory_link import BULK_BYTES, Link
from bootstrap.lab.in_memory.memory_stream import StreamLimits
from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulation.learning import loss_along, text_of
from bootstrap.lab.simulation.study import interval, one_setting
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.data.batches import TrainingData
from node.model.compute import Priority
from node.process.daemon import Node
from node.state import transfer
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.rpc import channel
from protocol.run.manifest import Manifest, load_preset

RESULTS = Path(__file__).parents[1] / "docs" / "data" / "hours.jsonl"
REPLICAS = 4
PARAMETERS = 295_488  # of the preset tiny
STOOD_FOR = 31_000_000  # parameters of the model whose time is taken
STEP_SECONDS = 0.25  # of it, at speed 1
# Parts of a step that a piece of work takes. In one stage both passes are one piece of work, a forward one.
WORK = {
    Priority.SNAPSHOT: 0.0,
    Priority.BACKWARD: 0.0,
    Priority.OPTIMIZER: 0.05,
    Priority.FORWARD: 0.95,
    Priority.SERVE: 0.05,
}
SPEEDS = (0.5, 2.0)
UPLINKS = (20.0, 300.0)  # Mbit/s
LATENCY, LATENCY_DEVIATION = 0.04, 0.5  # median in seconds, and the deviation of its logarithm
CHURN = 0.05  # of the peers, in a minute
# A byte here stands for so many, also to what gives up a frame that comes too slowly, and one that asks for a piece
# of a state: what comes in one piece here are a hundred of the large model's, and each has a minute.
SCALE = STOOD_FOR / PARAMETERS
channel.SLOWEST_RATE = round(channel.SLOWEST_RATE / SCALE)
transfer.PIECE_DEADLINE *= SCALE
BEHIND = 0.05  # nats
LOOKS = 25  # at the loss, in the second half of a run
MICROBATCHES, SEQUENCES = 1, 2
PLAIN_MEAN = {"outer.alpha": 0.0, "outer.beta": 1.0, "outer.gamma": 1.0}


@dataclass(frozen=True)
class Order:
    """What to run: `steps` is the length of the schedule, by which the learning rate falls."""

    method: str
    seed: int
    steps: int
    k: int = 1
    codec: str = "fp32"
    deadline: float = 120.0  # seconds for a piece of weights in a round, which here is nearly all of them
    churn: float = CHURN


@dataclass
class Course:
    """What came of it: `course` has (virtual seconds, step, loss) of the replica that was furthest.

    Under other `conditions` the same order is another one.
    """

    order: dict[str, object]
    conditions: dict[str, object]
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
    chosen = PLAIN_MEAN | {
        "inner.muon_learning_rate": 8e-3,
        "outer.pace": "time",
        "wire.gossip": order.codec,
        "limits.gossip_deadline": order.deadline,
    }
    microbatches = MICROBATCHES * (REPLICAS if order.method == "all-reduce" else 1)
    method = "local" if order.method == "all-reduce" else order.method
    return one_setting(
        load_preset("tiny"), order.steps, microbatches, SEQUENCES,
        method=method, stages=1, seed=order.seed, inner_steps=order.k, chosen=chosen,
    ).manifest  # fmt: skip


class Swarm:
    """The swarm of an order: who stands on which machine, whether it has begun, and how often one was killed."""

    def __init__(self, order: Order, data: TrainingData) -> None:
        self.order, self.machines = order, Machines.drawn(order.seed)
        self.has_begun = False
        self.killed = 0
        self._place: dict[PeerId, int] = {}  # the machine of each peer
        self._rng = Random(f"churn/{order.seed}")
        self._next = 0
        self.swarm = SimulatedSwarm(manifest_of(order), data, order.seed, self._link, seconds=self._seconds)
        self.swarm.network.limits = StreamLimits(chunk=BULK_BYTES)

    def _seconds(self, stage: int, priority: Priority) -> float:
        if priority is Priority.SERVE and not self.has_begun:
            return 0.0
        return STEP_SECONDS * WORK[priority]

    def _link(self, sender: PeerId, receiver: PeerId) -> Link:
        if not self.has_begun:
            return Link()
        here, there = self._place.get(sender), self._place.get(receiver)
        if here is None or there is None:  # the seed peer, which no weights go through
            return Link(latency=LATENCY)
        latency, uplink = self.machines.latency(here, there), self.machines.uplinks[here]
        return Link(latency, uplink, bulk=SCALE)

    async def begin(self) -> None:
        """Let all replicas join before that takes any time. Raises `RuntimeError` when one of them trained by then.

        All-reduce is one replica in the time of `all_reduce_step`.
        """
        await self.swarm.seed_peer.start()
        for machine in range(1 if self.order.method == "all-reduce" else REPLICAS):
            self.add(machine)
        nodes = self.swarm.nodes.values()
        while any(node.public_state == "joining" for node in nodes):
            await asyncio.sleep(STEP_SECONDS / 1000)
            self.check()
        if any(node.replica.step for node in nodes):
            raise RuntimeError("a replica trained before all of them served")
        self.has_begun = True

    def add(self, machine: int) -> None:
        number, self._next = self._next, self._next + 1
        self._place[Identity.from_seed("node", self.order.seed, number).peer_id] = machine
        self.swarm.add(number, stage=0, speed=self.machines.speeds[machine])

    async def churn(self) -> None:
        """Kill one at random now and then, as long as another one trains, and let a newcomer take its machine."""
        while self.order.churn:
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

    def check(self) -> None:
        """Raises what ended a node before its time."""
        for number, task in self.swarm.tasks.items():
            if task.done() and self.swarm.nodes[number].public_state != "finished":
                task.result()


async def trained(order: Order, data: TrainingData, sequences: int) -> Course:
    """Train until the furthest replica has finished."""
    outcome = Course(asdict(order), conditions_of(sequences))
    began = time.perf_counter()
    swarm = Swarm(order, data)
    await swarm.begin()
    churning = asyncio.ensure_future(swarm.churn())
    outcome.course = [look async for look in looks(swarm, data, sequences)]
    churning.cancel()
    await swarm.swarm.leave()
    outcome.killed = swarm.killed
    if order.method == "all-reduce":
        seconds = all_reduce_step(swarm.machines)
        outcome.course = [(round(step * seconds, 3), step, loss) for _, step, loss in outcome.course]
    outcome.wall_seconds = round(time.perf_counter() - began, 1)
    return outcome


async def looks(swarm: Swarm, data: TrainingData, sequences: int) -> AsyncIterator[tuple[float, int, float]]:
    """Virtual seconds since now, step and loss of the furthest replica, until it has finished.

    From the middle of its schedule on, `LOOKS` times in as long as it took to get there, whatever is killed. Slow
    weights change with the round alone.
    """
    clock, middle = asyncio.get_running_loop().time, swarm.order.steps // 2
    start, due, pause, is_over = clock(), math.inf, 0.0, False
    seen: tuple[PeerId, int] | None = None
    while not is_over:
        await asyncio.sleep(STEP_SECONDS / 4)
        swarm.check()
        if (furthest := swarm.furthest()) is None:
            continue
        step, is_over = furthest.replica.step, furthest.public_state == "finished"
        if not pause and step >= middle:
            due, pause = clock(), (clock() - start) / LOOKS
        at = furthest.transport.peer_id, furthest.replica.round
        if is_over or (clock() >= due and at != seen):
            due, seen = clock() + pause, at
            yield round(clock() - start, 3), step, round(loss_along([furthest.replica], data, sequences), 5)


def all_reduce_step(machines: Machines) -> float:
    """Seconds of a step at best: work shared out by speed, and the slower of it and a ring of bf16 gradients.

    A ring sends 2(N − 1)/N of the gradients through each uplink, in 2(N − 1) steps of its longest latency.
    """
    computing = STEP_SECONDS * REPLICAS / sum(machines.speeds)
    passed = 2 * (REPLICAS - 1) / REPLICAS * 2 * STOOD_FOR / min(machines.uplinks)
    hop = max(machines.latency(one, (one + 1) % REPLICAS) for one in range(REPLICAS))
    return max(computing, passed + 2 * (REPLICAS - 1) * hop)


def conditions_of(sequences: int) -> dict[str, object]:
    """What else an outcome depends on, as JSON has it."""
    return {
        "replicas": REPLICAS,
        "stood_for": STOOD_FOR,
        "step_seconds": STEP_SECONDS,
        "speeds": list(SPEEDS),
        "uplinks": list(UPLINKS),
        "latency": [LATENCY, LATENCY_DEVIATION],
        "batch": [MICROBATCHES, SEQUENCES],
        "work": {priority.name: share for priority, share in WORK.items()},
        "sequences": sequences,
    }


class Study:
    """Mutable state: the outcomes known, by order. New ones are kept in `file` at once."""

    def __init__(self, file: Path | None, sequences: int) -> None:
        self._file, self._sequences = file, sequences
        self._known = {_key(course.order): course for course in self._kept()}

    def _kept(self) -> Iterator[Course]:
        if self._file is None or not self._file.exists():
            return
        for line in self._file.read_text(encoding="utf-8").splitlines():
            contents = json.loads(line)
            contents["course"] = [tuple(look) for look in contents["course"]]
            course = Course(**contents)
            if course.conditions == conditions_of(self._sequences):
                yield course

    def course_of(self, order: Order) -> Course:
        key = _key(asdict(order))
        if key not in self._known:
            course: Course = run_virtual(trained(order, text_of(manifest_of(order)), self._sequences))
            self._known[key] = course
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(course)) + "\n")
        return self._known[key]


def _key(order: Mapping[str, object]) -> str:
    return json.dumps(order, sort_keys=True)


def row_of(course: Course, aim: float) -> dict[str, object]:
    return {
        "method": course.order["method"],
        "seed": course.order["seed"],
        "aim": round(aim, 4),
        "hours": round(course.seconds_to(aim) / 3600, 4),
        "end": course.course[-1][2],
        "hours_at_the_end": round(course.course[-1][0] / 3600, 4),
        "killed": course.killed,
    }


def ratios_of(hours: Mapping[str, Sequence[float]], report: Report) -> dict[str, float]:
    """NoLoCo's hours by the others', means over the seeds in which both were there; tells people each."""
    ratios = {}
    for other in ("all-reduce", "diloco"):
        pairs = list(zip(hours["noloco"], hours[other], strict=True))
        shares = [mine / its for mine, its in pairs if math.isfinite(mine) and math.isfinite(its)]
        if len(shares) < len(pairs):
            report.tell(f"NoLoCo or {other} never got there in {len(pairs) - len(shares)} seeds.")
        if shares:
            ratios[f"noloco_hours_of_{other.replace('-', '_')}"] = round(fmean(shares), 4)
            half, each = interval(shares), ", ".join(f"{share:.4f}" for share in shares)
            report.tell(f"NoLoCo's hours of {other}'s: {each}{'' if half is None else f' (± {half})'}")
    return ratios


def options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help="all-reduce's schedule")
    parser.add_argument("--noloco", nargs=3, default=["mod3", "25", "3500"], metavar=("CODEC", "K", "STEPS"))
    parser.add_argument("--diloco", nargs=3, default=["int8", "25", "2000"], metavar=("CODEC", "K", "STEPS"))
    parser.add_argument(
        "--deadlines", type=float, nargs=2, default=[120.0, 30.0], metavar=("NOLOCO", "DILOCO")
    )
    parser.add_argument("--churn", type=float, default=CHURN, help="share of the peers in a minute")
    parser.add_argument("--behind", type=float, default=BEHIND, help="nats above all-reduce's end")
    parser.add_argument("--sequences", type=int, default=256, help="held-out ones")
    return arguments_of(
        parser, results=None, seeds=[0], steps=8, noloco=["mod3", "2", "8"], diloco=["int8", "2", "8"], sequences=8,
        behind=5.0,
    )  # fmt: skip


def main() -> None:
    arguments = options()
    report = Report("hours", arguments.json)
    torch.set_num_threads(1)
    study = Study(arguments.results, arguments.sequences)
    hours: dict[str, list[float]] = {"all-reduce": [], "noloco": [], "diloco": []}
    results = []
    for seed in arguments.seeds:
        courses = [study.course_of(Order("all-reduce", seed, arguments.steps, churn=0.0))]
        aim = courses[0].course[-1][2] + arguments.behind
        for method, deadline in zip(("noloco", "diloco"), arguments.deadlines, strict=True):
            codec, k, steps = getattr(arguments, method)
            order = Order(method, seed, int(steps), int(k), codec, deadline, arguments.churn)
            courses.append(study.course_of(order))
        for method, course in zip(hours, courses, strict=True):
            hours[method].append(course.seconds_to(aim) / 3600)
            results.append(row_of(course, aim))
            report.tell_row(results[-1])
    report.conclude(ratios_of(hours, report), results)


if __name__ == "__main__":
    run(main)
