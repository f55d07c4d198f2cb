"""A seed peer that is started again, or on another machine, finds the members of the run that goes on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bootstrap.creating.run import SeedPeer
from bootstrap.creating.staying import LOOK_SECONDS
from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.storage.state_directory import StateDirectory
from protocol.errors import JoinError
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest
from tests.swarm.micro import FOREVER, events_of, everyone_goes_on, run_swarm, training, until


def seed_elsewhere(swarm: SimulatedSwarm, place: Path) -> SeedPeer:
    """A seed peer of the same run that knows none of its members."""
    place.mkdir(exist_ok=True)
    transport = MemoryTransport(swarm.network, Identity.from_seed("elsewhere"))
    return SeedPeer(transport, swarm.seed_peer.signed, directory=StateDirectory(place))


async def newcomer_through(swarm: SimulatedSwarm, seed: SeedPeer, number: int) -> None:
    """Have a newcomer of stage 0 join by that seed peer, and train with the others."""
    swarm.add(number, stage=0, join=seed.transport.addresses()[0])
    await until(lambda: swarm.nodes[number].public_state == "serving")
    await everyone_goes_on(swarm)
    assert not events_of(swarm, "initialised", number)
    assert events_of(swarm, "downloaded", number)


def test_a_seed_peer_on_another_machine_joins_by_a_member_and_knows_it_later(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        await swarm.seed_peer.close()
        seed = seed_elsewhere(swarm, tmp_path / "elsewhere")
        await seed.start()
        await seed.join(swarm.nodes[0].transport.addresses())
        seed.stay_with_members()
        await newcomer_through(swarm, seed, 7)
        await asyncio.sleep(2 * LOOK_SECONDS)
        await seed.close()

        again = seed_elsewhere(swarm, tmp_path / "elsewhere")
        await again.start()
        again.stay_with_members()
        await asyncio.sleep(1.0)
        await newcomer_through(swarm, again, 8)
        await again.close()
        await swarm.leave()

    run_swarm(main())


def test_a_seed_peer_that_finds_nobody_or_another_run_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        other = SeedPeer(
            MemoryTransport(swarm.network, Identity.from_seed("other")),
            SignedManifest.sign(load_preset("tiny"), Identity.from_seed("another run")),
        )
        await other.start()
        seed = seed_elsewhere(swarm, tmp_path / "elsewhere")
        await seed.start()
        address = swarm.nodes[0].transport.addresses()[0]
        with pytest.raises(JoinError, match="No member answered"):
            await seed.join([address[:-6] + "nobody"])
        with pytest.raises(JoinError):
            await seed.join(other.transport.addresses())
        await seed.close()
        await other.close()
        await swarm.leave()

    run_swarm(main())
