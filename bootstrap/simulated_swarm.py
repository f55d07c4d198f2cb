"""A whole swarm in one process: the daemon's own code over the in-memory network, under a virtual clock.

The same seed gives the same run, event for event. Weights and gradients are real; only time is not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bootstrap.seed_peer import SeedPeer
from node.compute import InlineCompute, Priority
from node.config import NodeConfig
from node.daemon import Node, Surroundings
from node.data import Corpus
from node.events import Events
from protocol.identity import Identity
from protocol.manifest import Manifest, SignedManifest
from protocol.transport.memory import MemoryTransport, memory_address
from protocol.transport.memory_link import Link
from protocol.transport.memory_network import MemoryNetwork

# virtual seconds that one piece of work takes on a peer of speed 1
WORK_SECONDS: Mapping[Priority, float] = {
    Priority.BACKWARD: 0.02,
    Priority.OPTIMIZER: 0.005,
    Priority.FORWARD: 0.01,
    Priority.SERVE: 0.002,
}


@dataclass
class SimulatedSwarm:
    """Mutable state: the nodes and their tasks, by peer number, and the event log of all of them."""

    manifest: Manifest
    corpus: Corpus
    seed: int = 0
    link: Link = field(default_factory=Link)
    events: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(self.seed, self.link)
        self._seed_identity = Identity.from_seed("seed peer", self.seed)
        signed = SignedManifest.sign(self.manifest, Identity.from_seed("run", self.seed))
        self.seed_peer = SeedPeer(MemoryTransport(self.network, self._seed_identity), signed)

    async def start(self, replicas: int) -> None:
        """The seed peer, then `replicas` nodes for each stage; they join as separate daemons would."""
        await self.seed_peer.start()
        for number in range(replicas * self.manifest.stages):
            self.add(number, stage=number % self.manifest.stages)

    def add(self, number: int, stage: int = -1, speed: float = 1.0, join: str | None = None) -> Node:
        """Start one more node; `join` is another member's address instead of the seed peer's."""
        identity = Identity.from_seed("node", self.seed, number)
        transport = MemoryTransport(self.network, identity)
        events = Events(transport.now, lambda event: self.events.append({"node": number, **event}))
        surroundings = Surroundings(
            transport=transport,
            compute=lambda: InlineCompute(lambda priority: WORK_SECONDS[priority] / speed),
            events=events,
            rng=random.Random(f"{self.seed}/{number}"),
            corpus=lambda manifest, data: self.corpus,
        )
        address = join or memory_address(self._seed_identity.peer_id)
        node = Node(NodeConfig(join=(address,), stage=stage, device="cpu"), surroundings)
        self.nodes[number] = node
        self.tasks[number] = asyncio.get_running_loop().create_task(node.run())
        return node

    def kill(self, number: int) -> None:
        """As kill -9: the node's tasks end in the middle of whatever they do, its streams break."""
        self.network.kill(self.nodes[number].transport.peer_id)
        self.tasks[number].cancel()

    async def finish(self) -> None:
        """Wait until every node has completed the run, then let all leave."""
        while not all(node.public_state == "finished" for node in self.nodes.values()):
            for task in self.tasks.values():
                if task.done():
                    task.result()
            await asyncio.sleep(1.0)
        await self.leave()

    async def leave(self) -> None:
        for node in self.nodes.values():
            node.stop()
        await asyncio.gather(*self.tasks.values())
        await self.seed_peer.close()
