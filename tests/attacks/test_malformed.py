"""Malformed frames of every kind: who sends them is banned soon, whoever it is, and training goes on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest
from flooding import counting_node
from flooding.attackers import Attacker
from flooding.grammar import KINDS, batch_of

from protocol.errors import NolocoError
from protocol.identity import Identity
from protocol.rpc import Traffic
from protocol.supervision import Supervisor
from protocol.transport.memory import MemoryTransport
from tests.patience import patience
from tests.real.daemons import PATIENCE, NodeDaemon, SeedDaemon, wait_until
from tests.unit.test_door import a_door, requests
from tests.unit.two_peers import in_virtual_time, say_done

MOST_FRAMES = 100  # until the ban
PAUSE = 0.02  # seconds between two
IDENTITIES = 5
BATCH = 8  # frames of a stream
MOST_LINES = 100  # in the log of a node, of this attack: it says so of the first ones alone
NODE = (sys.executable, str(Path(counting_node.__file__)))
CLASSES = {
    "body nests": Traffic.CONTROL,
    "garbage body": Traffic.STATE,
    "garbage body of members": Traffic.PAIRING,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_that_sends_one_kind_again_and_again_is_banned(kind: str) -> None:
    """Before: never for kinds that there are not, halves of frames, what is cancelled unasked, and garbage that only
    members may send."""

    @in_virtual_time
    async def main() -> None:
        async with a_door() as two:
            two.server.handle(*(request.answered_by(say_done) for request in requests()))
            mallory = MemoryTransport(two.network, Identity.from_seed("mallory"))
            await mallory.start()
            traffic = CLASSES.get(kind, Traffic.PIPELINE)
            rng, sent = random.Random(kind), 0
            while not two.server.is_banned(mallory.peer_id):
                (frame,) = batch_of(rng, traffic.value, (kind,), 1)
                assert sent < MOST_FRAMES
                try:
                    stream = await mallory.open(two.address, traffic.protocol, 5.0)
                    await stream.write(frame)
                    sent += 1
                    await asyncio.sleep(PAUSE)
                    stream.close()
                except NolocoError:
                    await asyncio.sleep(PAUSE)
            await mallory.close()

    main()


def bans_in(state: Path) -> dict[str, int]:
    """Frames that the node began to read of each peer that it has banned."""
    file = state / counting_node.BANS_FILE
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["peer"]: row["frames"] for row in rows if row["banned"]}


async def flooded(victims: list[NodeDaemon], folder: Path) -> list[str]:
    """Each identity sends a fifth of the kinds to all victims until each has banned it, and a little longer."""
    supervisor, kinds = Supervisor(), list(KINDS)
    attackers = [Attacker(Identity.generate(), tuple(kinds[i::IDENTITIES])) for i in range(IDENTITIES)]
    peers = {str(attacker.peer_id) for attacker in attackers}
    for attacker in attackers:
        await attacker.start(folder, supervisor)
    addresses = [victim.address for victim in victims]
    floods = [supervisor.start(attacker.flood(addresses, BATCH)) for attacker in attackers]
    await asyncio.to_thread(
        wait_until,
        lambda: all(peers <= bans_in(victim.state).keys() for victim in victims),
        PATIENCE,
        lambda: all(victim.still_running() for victim in victims),
    )
    await asyncio.sleep(1.0)
    for task in floods:
        task.cancel()
    await asyncio.wait(floods)
    for attacker in attackers:
        await attacker.stop()
    await supervisor.close()
    return sorted(peers)


@pytest.mark.timeout(patience(300))
async def test_real_nodes_ban_all_of_them_and_train_on(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    join = ("--join", await asyncio.to_thread(seed.join_address), "--stage")
    victims = [NodeDaemon(tmp_path / f"node{stage}", *join, str(stage), program=NODE) for stage in (0, 1)]
    for victim in victims:
        await asyncio.to_thread(victim.wait_for_step, 2)
    lines = [victim.output.count("\n") for victim in victims]
    peers = await flooded(victims, tmp_path)
    for victim, before in zip(victims, lines, strict=True):
        bans = bans_in(victim.state)
        assert bans.keys() == set(peers), victim.output
        assert max(bans.values()) <= MOST_FRAMES
        assert victim.output.count("\n") - before <= MOST_LINES
        await asyncio.to_thread(victim.wait_for_step, victim.step + 5)
    for daemon in (*victims, seed):
        assert await asyncio.to_thread(daemon.leave) == 0, daemon.output
