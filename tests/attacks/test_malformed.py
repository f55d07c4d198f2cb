"""Malformed frames of every kind: who sends them is banned soon, whoever it is, and training goes on."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from flooding import counting_node
from flooding.attackers import Attacker
from flooding.grammar import KINDS

from protocol.records.identity import Identity
from protocol.supervision import Supervisor
from tests.patience import patience
from tests.real.daemons import PATIENCE, NodeDaemon, SeedDaemon, wait_until

MOST_FRAMES = 100  # until the ban
IDENTITIES = 5
BATCH = 8  # frames of a stream
MOST_LINES = 100  # in the log of a node, of this attack: it says so of the first ones alone
NODE = (sys.executable, str(Path(counting_node.__file__)))


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
