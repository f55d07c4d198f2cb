"""A whole swarm in one process: the daemon's own code over the in-memory network, under a virtual clock.

The same seed gives the same run, event for event. Weights and gradients are real; only time is not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap.creating.run import SeedPeer
from bootstrap.lab.in_memory.memory import MemoryTransport, memory_address
from bootstrap.lab.in_memory.memory_link import Link, LinkModel
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.config import NodeConfig
from node.data.batches import TrainingData
from node.model.compute import InlineCompute, Priority
from node.model.replica import Replica
from node.process.daemon import Node
from node.service.node_resources import Surroundings
from node.storage.state_directory import StateDirectory
from node.watch.events import Events
from node.watch.trace import NO_TRACE, Trace
from protocol.records.identity import Identity
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest
from protocol.run.piece_hashes import PieceHashes
from protocol.run.signed_manifest import SignedManifest

# virtual seconds that one piece of work takes on a peer of speed 1
WORK_SECONDS: Mapping[Priority, float] = {
    Priority.SNAPSHOT: 0.0,
    Priority.BACKWARD: 0.02,
    Priority.OPTIMIZER: 0.005,
    Priority.FORWARD: 0.01,
    Priority.SERVE: 0.002,
}


@dataclass
class SimulatedSwarm:
    """A whole swarm of real nodes in one process, over the in-memory network.

    Mutable state: the living nodes and their tasks, by peer number, and the event log of all of them.

    `seconds(stage, priority)` is what a piece of work takes on a peer of speed 1.
    With `directory` each node keeps its state in a folder of its own there and can come back after a kill.
    """

    manifest: Manifest
    corpus: TrainingData
    seed: int = 0
    link: Link | LinkModel = field(default_factory=Link)
    directory: Path | None = None
    tokenizer: bytes | None = None  # the seed peer's, where the manifest names one
    seconds: Callable[[int, Priority], float] = lambda stage, priority: WORK_SECONDS[priority]
    trace: Trace = NO_TRACE  # of all nodes
    events: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(self.seed, self.link)
        self.states: dict[int, StateDirectory] = {}
        self._lives: dict[int, int] = {}  # how often a number was started
        self._killed: set[asyncio.Task[None]] = set()  # that have not ended yet
        self._seed_identity = Identity.from_seed("seed peer", self.seed)
        owner = Identity.from_seed("run", self.seed)
        signed = SignedManifest.sign(self.manifest, owner)
        raw, transport = self.tokenizer, MemoryTransport(self.network, self._seed_identity)
        hashes = PieceHashes.sign(raw, self.manifest.data.tokenizer, owner) if raw is not None else b""
        self.seed_peer = SeedPeer(transport, signed, raw, hashes=hashes)

    async def start(self, replicas: int, **settings: Any) -> None:
        """Start the seed peer, then `replicas` nodes for each stage; they join as separate daemons would."""
        await self.seed_peer.start()
        for number in range(replicas * self.manifest.stages):
            self.add(number, stage=number % self.manifest.stages, **settings)

    def add(
        self,
        number: int,
        stage: int = -1,
        speed: float = 1.0,
        join: str | None = None,
        replica: Callable[[Manifest, int, str], Replica] = Replica,
        corpus: TrainingData | None = None,
        rpc: type[Rpc] = Rpc,
        transport: type[MemoryTransport] = MemoryTransport,
        **settings: object,
    ) -> Node:
        """Start a node, a new one or one that was killed; `join` is another member's address.

        `replica` makes what it trains and `corpus` is what it trains on, `rpc` and `transport` are its network side,
        as of an attacker. `settings` are further fields of `NodeConfig`.
        """
        life = self._lives[number] = self._lives.get(number, -1) + 1
        net = transport(self.network, Identity.from_seed("node", self.seed, number))
        state = None
        if self.directory is not None:
            state = self.states[number] = StateDirectory(self.directory / f"node-{number}")
            state.open()
        surroundings = Surroundings(
            transport=net,
            compute=lambda stage: InlineCompute(lambda priority: self.seconds(stage, priority) / speed),
            events=Events(net.now, lambda event: self._log(node, number, event)),
            rng=random.Random(f"{self.seed}/{number}/{life}"),
            state=state,
            corpus=lambda manifest, data: corpus or self.corpus,
            replica=replica,
            rpc=rpc,
            trace=self.trace,
        )
        address = join or memory_address(self._seed_identity.peer_id)
        config = {"join": (address,), "stage": stage, "device": "cpu", **settings}
        node = Node(NodeConfig.model_validate(config), surroundings)
        self.nodes[number] = node
        task = self.tasks[number] = asyncio.get_running_loop().create_task(node.run())
        if state is not None:
            task.add_done_callback(lambda _: state.close())
        return node

    def _log(self, node: Node, number: int, event: dict[str, object]) -> None:
        if self.nodes.get(number) is node:  # the dead are silent
            self.events.append({"node": number, **event})

    def kill(self, number: int) -> None:
        """Kill a node as kill -9 does: its tasks stop wherever they are, and its streams break.

        Nothing is saved and nobody is told.
        """
        node, task = self.nodes.pop(number), self.tasks.pop(number)
        self.network.kill(node.transport.peer_id)
        node.abandon()
        if number in self.states:
            self.states.pop(number).close()
        self._killed.add(task)
        task.add_done_callback(self._killed.discard)
        task.cancel()

    async def finish(self) -> None:
        """Wait until every node that has not left has completed the run, then let all leave.

        Raises what ended a node before its time.
        """
        while not all(
            task.done() or self.nodes[number].public_state == "finished"
            for number, task in self.tasks.items()
        ):
            for task in self.tasks.values():
                if task.done():
                    task.result()
            await asyncio.sleep(1.0)
        await self.leave()

    async def leave(self) -> None:
        """Let all living nodes leave gracefully, then the seed peer."""
        for node in self.nodes.values():
            node.stop()
        await asyncio.gather(*self._killed, return_exceptions=True)
        await asyncio.gather(*self.tasks.values())
        await self.seed_peer.close()
