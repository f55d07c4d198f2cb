"""A DHT whose keys are in hands that hide records, or show only their own: members find each other anyway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from protocol.ground import Record
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from protocol.records.records import key_digest, open_record, seal_record
from tests.swarm.micro import FOREVER, events_of, run_swarm, stage_nodes, step_of, training

SYBILS = 40


def sybils_of(run_id: str, stage: int, now: float) -> list[Record]:
    """What those who sit on the key show instead: their own records, rightly signed."""
    key, records = stage_key(run_id, stage), list[Record]()
    for number in range(SYBILS):
        identity = Identity.from_seed(f"sybil {number} of {stage}")
        said = Announcement(
            stage=stage, state="serving", since=now, addresses=[f"/ip4/8.8.8.{number}/tcp/4000"]
        )
        sealed = seal_record(identity, key, said.to_bytes(), now + 60.0)
        records.append(open_record(key_digest(key), identity.peer_id, sealed, now + 60.0, now))
    return records


@pytest.mark.parametrize("shown", [0, SYBILS], ids=["nothing", "sybils"])
def test_members_keep_and_newcomers_find_each_other(monkeypatch: pytest.MonkeyPatch, shown: int) -> None:
    """Before: after a record's lifetime nobody knew anybody any more, and newcomers began alone."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        honest = {node.transport.peer_id for node in swarm.nodes.values()}
        keys = {key_digest(stage_key(swarm.seed_peer.signed.run_id, stage)): stage for stage in (0, 1)}
        lies = {
            stage: sybils_of(swarm.seed_peer.signed.run_id, stage, swarm.network.now()) for stage in (0, 1)
        }
        original = MemoryTransport.get

        async def hiding(self: MemoryTransport, key: str, deadline: float, **how: Any) -> list[Record]:
            if key_digest(key) in keys:
                return lies[keys[key_digest(key)]][:shown]
            return await original(self, key, deadline, **how)

        monkeypatch.setattr(MemoryTransport, "get", hiding)
        lifetime = swarm.manifest.limits.record_lifetime
        await asyncio.sleep(5 * lifetime)
        before = [step_of(node) for node in swarm.nodes.values()]
        for node in swarm.nodes.values():
            assert honest - {node.transport.peer_id} <= set(node.member.view.peers())
        swarm.add(9, stage=1)
        await asyncio.sleep(5 * lifetime)
        assert all(step_of(node) > step for node, step in zip(swarm.nodes.values(), before, strict=False))
        newcomer = swarm.nodes[9]
        assert honest <= set(newcomer.member.view.peers())
        assert events_of(swarm, "downloaded", 9)
        assert newcomer in stage_nodes(swarm, 1)
        assert step_of(newcomer) > before[-1]
        await swarm.leave()

    run_swarm(main())
