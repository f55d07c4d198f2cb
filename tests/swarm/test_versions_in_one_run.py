"""Members of other versions, as their records say, beside real nodes under the virtual clock."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from bootstrap.inspect.seen import Seen
from bootstrap.inspect.verdict import verdict
from bootstrap.lab.in_memory.memory import MemoryTransport
from node.context import announcement
from node.service import service
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from protocol.rpc.compatibility import FEATURES
from protocol.version import MINOR, PROTOCOL
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_reaches,
    micro_swarm,
    observer_of,
    run_swarm,
    step_of,
)


async def record_of_another(swarm: Any, **says: Any) -> None:
    """Keep a record of a peer that answers nothing, at stage 0."""
    transport = MemoryTransport(swarm.network, Identity.from_seed("another version"))
    await transport.start()
    await transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    record = Announcement(stage=0, state="serving", since=transport.now(), **says).to_bytes()
    await transport.put(stage_key(swarm.seed_peer.signed.run_id, 0), record, 3_000.0, 5.0)


def test_a_member_of_another_protocol_is_named_and_gets_nothing() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        swarm.seconds = lambda stage, priority: 0.5
        await swarm.start(2)
        await record_of_another(swarm, protocol=PROTOCOL + 1, program="2.0.0")
        await everyone_reaches(swarm, 2)
        await asyncio.sleep(2 * swarm.manifest.limits.record_lifetime)
        assert any(events_of(swarm, "other-protocol", number) for number in swarm.nodes)
        for number in swarm.nodes:
            assert len(events_of(swarm, "other-protocol", number)) <= 1
            assert not events_of(swarm, "peer-suspected", number)
        visitor = await observer_of(swarm)
        sightings = await visitor.look()
        assert len(sightings) == 4
        seen = Seen(2, sightings, foreign=visitor.view.of_other_protocols(visitor.transport.now()))
        (found,) = [finding for finding in verdict(seen) if finding.kind == "other-protocol"]
        assert found.sentence == (
            f"1 node speaks protocol {PROTOCOL + 1} (version 2.0.0), and this program protocol {PROTOCOL}: neither "
            "works with the other; upgrade this one"
        )
        await swarm.leave()

    run_swarm(main())


def test_nodes_of_a_later_minor_train_and_average_with_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the records are of a version that knows more."""
    told, later_ones = announcement, set[str]()

    def of_a_later_one(context: Any, *more: Any, **named: Any) -> Announcement:
        said = told(context, *more, **named)
        if hashlib.sha256(context.me.encode()).digest()[0] % 2:
            return said
        later_ones.add(context.me)
        later = {"minor": MINOR + 1, "features": ["exchange-9", *FEATURES], "program": "0.9.0"}
        return said.model_copy(update=later)

    monkeypatch.setattr(service, "announcement", of_a_later_one)

    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        swarm.seconds = lambda stage, priority: 0.1  # 30 steps in a quarter of what is waited for
        await swarm.start(2)
        await everyone_reaches(swarm, 30)
        assert all(step_of(one) >= 30 for one in swarm.nodes.values())
        for number in swarm.nodes:
            assert any(event.get("partner") for event in events_of(swarm, "round", number))
            assert not events_of(swarm, "version-apart", number)
        assert 0 < len(later_ones) < len(swarm.nodes)
        await swarm.leave()

    run_swarm(main())
