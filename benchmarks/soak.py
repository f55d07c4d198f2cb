"""Whether a node stays as it is over thousands of rounds: memory, descriptors, tasks, threads and temporary files.

Two replicas of one stage, or of each of several, as the daemon runs them, each with its own p2pd, all in one process:
the tiny preset made so small that a round of one inner step takes some milliseconds. Checkpoints, probes and records
come as often as in any run. Each quarter of a second the process is looked at; the first 500 rounds of each replica
are left out, in which buffers and caches grow to what is needed. Ratios are medians over a window at the end by those
right after round 500: `memory_vs_round_500`, `descriptors_vs_round_500`, `tasks_vs_round_500`, and the same of
`threads`, `files` (temporary ones) and `p2pd` (the children's memory). `--growth` tells which lines hold more memory.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import tempfile
import time
import tracemalloc
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import uvloop
from pipelines.published import tiny_as_published
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.creating.run import SeedPeer
from node.config import NodeConfig
from node.machine.limits import keep_freed_memory
from node.model.compute import ComputeThread
from node.process.daemon import Node
from node.service.node_resources import Surroundings
from node.storage.state_directory import StateDirectory
from node.watch.events import Events, JsonLines
from protocol.errors import UserError
from protocol.records.identity import Identity
from protocol.run.manifest import Manifest, manifest_from
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

REPLICAS = 2  # of each stage
WARM_UP = 500  # rounds
WINDOW = 20  # samples
SAMPLE_SECONDS = 0.25
GROWN_LINES = 25  # told with --growth
CHECKPOINT_MINUTES = 0.5
STANDSTILL_SECONDS = 60.0
START_SECONDS = 600.0  # until the first round, on a busy machine
HOST = "127.0.0.1"
SMALL: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 32},
    "data": {"sequence_tokens": 16},
    "inner": {"microbatches": 1, "sequences": 1, "total_steps": 100_000_000},
    "outer": {"inner_steps": 1},
}


def small_manifest(stages: int) -> Manifest:
    contents: dict[str, Any] = tiny_as_published().model_dump() | {"name": "soak", "stages": stages}
    for section, changes in SMALL.items():
        contents[section] |= changes
    return manifest_from(contents)


class Soak:
    """Mutable state: a seed peer and the nodes, until the end of the `async with` block."""

    def __init__(self, folder: Path, stages: int) -> None:
        self._folder = folder
        self._signed = SignedManifest.sign(small_manifest(stages), Identity.generate())
        self._nodes: list[Node] = []
        self._lives: list[asyncio.Task[None]] = []
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Soak:
        seed = SeedPeer(self._transport("seed"), self._signed)
        await seed.start()
        self._closing.push_async_callback(seed.close)
        address = seed.transport.addresses()[0]
        for number in range(REPLICAS * self._signed.manifest.stages):
            self._start_node(number, address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self._nodes:
            node.stop()
        await asyncio.wait(self._lives)
        await self._closing.aclose()

    def _transport(self, name: str) -> Libp2pTransport:
        key = self._folder / f"{name}.key"
        Identity.generate().save(key)
        return Libp2pTransport(key, Libp2pConfig(host=HOST, nat_port_map=False))

    def _start_node(self, number: int, address: str) -> None:
        state = StateDirectory(self._folder / f"node{number}")
        state.open()
        transport, lines = self._transport(f"node{number}"), JsonLines(state.path / "events.jsonl")
        self._closing.callback(state.close)
        self._closing.callback(lines.close)
        config = NodeConfig(
            join=(address,),
            stage=number % self._signed.manifest.stages,
            state_dir=state.path,
            device="cpu",
            threads=1,
            checkpoint_minutes=CHECKPOINT_MINUTES,
        )
        surroundings = Surroundings(
            transport=transport,
            compute=lambda stage: ComputeThread(1),
            events=Events(transport.now, lines),
            rng=random.Random(number),
            state=state,
        )
        node = Node(config, surroundings)
        self._nodes.append(node)
        self._lives.append(asyncio.get_running_loop().create_task(node.run()))

    def rounds(self) -> int:
        """Of the replica that ended fewest. Raises what ended a node."""
        for life in self._lives:
            if life.done():
                life.result()
        return min(node.replica.round if _has_replica(node) else 0 for node in self._nodes)


def _has_replica(node: Node) -> bool:
    with suppress(AttributeError, AssertionError):
        return node.replica is not None
    return False


class Look:
    """Looks at this process, which knows its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._process = psutil.Process()
        self._folder = folder

    def sample(self, rounds: int) -> dict[str, float]:
        children = self._process.children(recursive=True)
        return {
            "rounds": rounds,
            "memory": self._process.memory_info().rss / 1e6,
            "p2pd": sum(child.memory_info().rss for child in children) / 1e6,
            "descriptors": self._process.num_fds(),
            "tasks": len(asyncio.all_tasks()),
            "threads": self._process.num_threads(),
            "files": sum(1 for _ in self._folder.rglob("*")),
        }


async def watch(
    folder: Path, stages: int, rounds: int, warm_up: int, growth: bool, report: Report
) -> list[dict[str, float]]:
    """Samples from the end of the warm-up on, and as many more than `WINDOW` as it takes."""
    look, samples = Look(folder), list[dict[str, float]]()
    async with Soak(folder, stages) as soak:
        done, told, before = 0, 0.0, None
        moved = time.monotonic()
        while done < rounds or len(samples) < 2 * WINDOW:
            await asyncio.sleep(SAMPLE_SECONDS)
            done, last = soak.rounds(), done
            now = time.monotonic()
            moved = now if done > last else moved
            if now - moved > (STANDSTILL_SECONDS if done else START_SECONDS):
                raise UserError(f"No round ended for {now - moved:.0f} s after {done:,}.")
            if done >= warm_up:
                samples.append(look.sample(done) | {"seconds": now})
                if growth and before is None:
                    before = _snapshot()
            if now - told > 10:
                told = now
                report.tell_row({name: round(value, 1) for name, value in look.sample(done).items()})
        if before is not None:
            for difference in _snapshot().compare_to(before, "traceback")[:GROWN_LINES]:
                report.tell("\n".join([str(difference), *difference.traceback.format()]))
    return samples


def _snapshot() -> tracemalloc.Snapshot:
    gc.collect()
    return tracemalloc.take_snapshot()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20_000, help="of each replica")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="rounds that are left out")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--growth", action="store_true", help="also tell what grew; several times slower")
    arguments = arguments_of(parser, rounds=600, warm_up=100)
    report = Report("soak", arguments.json)
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    keep_freed_memory()
    if arguments.growth:
        tracemalloc.start(6)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        tempfile.tempdir = place  # all that is made from now on is found there
        samples = uvloop.run(
            watch(
                Path(place), arguments.stages, arguments.rounds, arguments.warm_up, arguments.growth, report
            )
        )
        tempfile.tempdir = None
    first, last = samples[:WINDOW], samples[-WINDOW:]
    ratios = {
        f"{name}_vs_round_{arguments.warm_up}": round(
            median(row[name] for row in last) / median(row[name] for row in first), 4
        )
        for name in ("memory", "descriptors", "tasks", "threads", "files", "p2pd")
    }
    ends = samples[0], samples[-1]
    speed = (ends[1]["rounds"] - ends[0]["rounds"]) / (ends[1]["seconds"] - ends[0]["seconds"])
    report.tell(f"{ends[1]['rounds']:,.0f} rounds of each replica, {speed:.1f} a second")
    report.conclude(ratios, samples)


if __name__ == "__main__":
    run(main, UserError)
