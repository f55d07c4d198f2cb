"""Peers of another protocol: who of the two is to upgrade."""

from __future__ import annotations

import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport, memory_address
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from protocol.errors import JoinError
from protocol.files.installation import upgrade_line
from protocol.records.identity import Identity
from protocol.rpc.compatibility import VERSION_PROTOCOL, Spoken, spoken_by, what_to_upgrade
from protocol.rpc.rpc import Rpc
from protocol.transport.base import Stream
from protocol.version import PROTOCOL
from tests.swarm.micro import micro_swarm, run_swarm


def test_the_one_that_is_behind_is_told_to_upgrade() -> None:
    assert what_to_upgrade(Spoken(PROTOCOL, "0.1.7")) == ""
    newer, older = (
        what_to_upgrade(Spoken(PROTOCOL + 1, "1.2")),
        what_to_upgrade(Spoken(PROTOCOL - 1, "0.0.9")),
    )
    assert f"Upgrade this one: {upgrade_line()}" in newer
    assert "noloco-node 1.2 with protocol 2" in newer
    assert "or install version 0.0.9 here" in older


def peer(network: MemoryNetwork, name: str) -> MemoryTransport:
    return MemoryTransport(network, Identity.from_seed(name))


def test_whoever_talks_at_all_tells_its_version_and_nonsense_is_none() -> None:
    async def main() -> None:
        swarm = micro_swarm()
        asker, honest, odd = (peer(swarm.network, name) for name in ("asker", "honest", "odd"))
        for transport in (asker, honest, odd):
            await transport.start()
        await Rpc(honest).start()

        async def nonsense(stream: Stream) -> None:
            await stream.write(b"\xff" * 64)

        await odd.serve(VERSION_PROTOCOL, nonsense)
        spoken = await spoken_by(asker, honest.peer_id, 5.0)
        assert spoken is not None
        assert spoken.protocol == PROTOCOL
        assert await spoken_by(asker, odd.peer_id, 5.0) is None
        assert await spoken_by(asker, Identity.from_seed("nobody").peer_id, 5.0) is None

    run_swarm(main())


def test_a_node_that_meets_a_later_protocol_says_what_to_do() -> None:
    async def main() -> None:
        swarm = micro_swarm()
        later = peer(swarm.network, "later")
        await later.start()

        async def tell(stream: Stream) -> None:
            await stream.write(b"2 9.9.9".ljust(64))

        await later.serve(VERSION_PROTOCOL, tell)
        swarm.add(0, join=memory_address(later.peer_id))
        told = "noloco-node 9.9.9 with protocol 2, .* Upgrade this one: "
        with pytest.raises(JoinError, match=told):
            await swarm.tasks[0]

    run_swarm(main())
