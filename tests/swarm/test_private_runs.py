"""A private run as its volunteers and strangers meet it: in, kept out, and out again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership.entry import enter
from node.process.daemon import Node
from protocol.access.revocations import Revocations, mark_of, revoked_key
from protocol.access.tokens import Token
from protocol.errors import NodeFailed, Refused, TokenError
from protocol.ground import PeerId
from protocol.messages.peers import GetStats
from protocol.messages.state import GetStateIndex
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from tests.swarm.micro import (
    FOREVER,
    SEED,
    everyone_goes_on,
    everyone_reaches,
    fails_to_join,
    guest_of,
    micro_swarm,
    observer_of,
    peer_of,
    run_swarm,
    stage_nodes,
    until,
)

OWNER = Identity.from_seed("run", SEED)
DAY = 86_400.0
PRIVATE: dict[str, Any] = {"access__private": True, "inner__total_steps": FOREVER}


def private_swarm(directory: Path | None = None, **changes: Any) -> SimulatedSwarm:
    swarm: SimulatedSwarm = micro_swarm(directory=directory, **{**PRIVATE, **changes})
    run = swarm.seed_peer.signed.run_id
    seed = Token.issue(run, OWNER, None, 1, swarm.network.now() + DAY)
    swarm.seconds = lambda stage, priority: 0.3  # few steps a minute
    swarm.seed_peer.credential = seed.credential(swarm.seed_peer.transport.peer_id)
    return swarm


def token(swarm: SimulatedSwarm, uses: int = 1, days: float = 1.0, issuer: Identity = OWNER) -> Token:
    run = swarm.seed_peer.signed.run_id
    return Token.issue(run, issuer, None, uses, swarm.network.now() + days * DAY)


async def everyone(swarm: SimulatedSwarm, step: int = 5, **settings: Any) -> None:
    await swarm.start(2, token=token(swarm, uses=4).to_text(), **settings)
    await everyone_reaches(swarm, step)


@pytest.mark.long
def test_with_one_token_for_four_a_swarm_trains_and_each_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = private_swarm(tmp_path)
        await everyone(swarm)
        swarm.kill(0)
        swarm.add(0, stage=0)  # the token is in its state directory
        await everyone_goes_on(swarm)
        kept = tmp_path / "node-0" / "token"
        assert kept.stat().st_mode & 0o777 == 0o600
        await swarm.leave()

    run_swarm(main())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda swarm: "", "give the token"),
        (lambda swarm: "noloco-nonsense", "Copy it again"),
        (lambda swarm: token(swarm, days=-1).to_text(), "expired"),
        (lambda swarm: token(swarm, issuer=Identity.from_seed("x")).to_text(), "did not sign"),
        (lambda swarm: Token.issue("another", OWNER, None, 1, 2e9).to_text(), "for run another"),
    ],
)
def test_others_are_told_what_is_wrong_with_theirs(given: Callable[[SimulatedSwarm], str], told: str) -> None:
    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm, 1)
        swarm.add(9, token=given(swarm))
        error = await fails_to_join(swarm, 9)
        assert isinstance(error, TokenError)
        assert told in str(error)
        await swarm.leave()

    run_swarm(main())


def test_a_stranger_reads_no_record_writes_none_and_is_routed_nothing() -> None:
    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm)
        run, stranger = swarm.seed_peer.signed.run_id, await guest_of(swarm)
        await stranger.transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
        for stage in range(2):
            assert not await stranger.transport.get(stage_key(run, stage), 5.0)
        bait = Announcement(stage=1, state="serving", since=0.0, tokens_per_second=1e9).to_bytes()
        assert not await stranger.transport.put(stage_key(run, 1), bait, 3_000.0, 5.0)
        first = stage_nodes(swarm, 0)[0]
        for request in (GetStats(), GetStateIndex()):
            with pytest.raises(Refused, match="stranger"):
                await stranger.call(peer_of(first), request, deadline=5.0)
        await everyone_goes_on(swarm)
        assert not first.view.knows(stranger.transport.peer_id)
        await swarm.leave()

    run_swarm(main())


def test_visitors_look_with_a_token() -> None:
    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm)
        observer = await observer_of(swarm)
        with pytest.raises(TokenError, match="private"):
            await enter(observer.rpc, swarm.seed_peer.signed, b"", "", takes_part=False)
        given = token(swarm).to_text()
        await enter(observer.rpc, swarm.seed_peer.signed, b"", given, takes_part=False)
        sightings = await observer.survey()
        assert len(sightings) == 4
        assert all(sighting.stats is not None for sighting in sightings)
        await swarm.leave()

    run_swarm(main())


def test_a_token_that_others_have_used_up_is_told_so() -> None:
    async def main() -> None:
        swarm = private_swarm()
        given = token(swarm, uses=4).to_text()
        await swarm.start(2, token=given)
        await everyone_reaches(swarm, 1)
        swarm.add(9, token=given)
        assert "have used it" in str(await fails_to_join(swarm, 9))
        await swarm.leave()

    run_swarm(main())


async def revoke(swarm: SimulatedSwarm, *entries: bytes) -> None:
    """As `noloco-bootstrap revoke --join` does."""
    signed = swarm.seed_peer.signed
    owner = await guest_of(swarm, "the owner's computer")
    await owner.transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    await enter(owner, signed, b"", token(swarm).to_text(), takes_part=False)
    sealed = Revocations(swarm.network.now(), frozenset(entries)).sign(signed.run_id, OWNER)
    assert await owner.transport.put(revoked_key(signed.run_id), sealed, 3_600.0, 5.0)
    await owner.transport.close()


def knowing(swarm: SimulatedSwarm, peer: PeerId) -> list[Node]:
    return [node for node in swarm.nodes.values() if node.view.knows(peer)]


@pytest.mark.long
@pytest.mark.parametrize("how", ["token", "peer"])
def test_who_is_revoked_is_out_within_a_minute_and_the_others_go_on(how: str) -> None:
    async def main() -> None:
        swarm = private_swarm(limits__record_lifetime=120.0)
        await everyone(swarm)
        given = token(swarm)
        bad = swarm.add(9, stage=1, token=given.to_text())
        await until(lambda: bad.public_state == "serving")
        peer = peer_of(bad)
        await until(lambda: len(knowing(swarm, peer)) >= 4, 300.0)
        serial = given.invitation.serial
        await revoke(
            swarm, serial if how == "token" else mark_of(Identity.from_seed("node", SEED, 9).public_key)
        )
        await asyncio.sleep(60.0)
        error = swarm.tasks.pop(9).exception()
        del swarm.nodes[9]
        assert isinstance(error, NodeFailed)
        assert "may not be in the run any more" in str(error)
        assert not knowing(swarm, peer)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_liar_that_stays_after_it_was_revoked_is_answered_nothing() -> None:
    async def main() -> None:
        swarm = private_swarm(limits__record_lifetime=120.0)
        await everyone(swarm)
        signed, given = swarm.seed_peer.signed, token(swarm)
        liar = await guest_of(swarm, "liar")
        await liar.transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
        await enter(liar, signed, b"", given.to_text(), takes_part=False)
        key = stage_key(signed.run_id, 1)
        record = Announcement(stage=1, state="joining", since=0.0).to_bytes()
        assert await liar.transport.put(key, record, 3_000.0, 5.0)
        for node in swarm.nodes.values():
            await liar.call(peer_of(node), GetStats(), deadline=5.0)
        await revoke(swarm, given.invitation.serial)
        await asyncio.sleep(60.0)
        for node in swarm.nodes.values():
            with pytest.raises(Refused, match="stranger"):
                await liar.call(peer_of(node), GetStats(), deadline=5.0)
        assert not knowing(swarm, liar.transport.peer_id)
        assert not await liar.transport.get(key, 5.0)
        assert not await liar.transport.put(key, record, 3_000.0, 5.0)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_revocations_reach_members_from_each_other_when_the_dht_has_none() -> None:
    async def main() -> None:
        swarm = private_swarm()
        await everyone(swarm)
        signed, entry = swarm.seed_peer.signed, frozenset({mark_of(b"somebody")})
        sealed = Revocations(swarm.network.now(), entry).sign(signed.run_id, OWNER)
        first = next(iter(swarm.nodes.values()))
        for transport in (*(node.transport for node in swarm.nodes.values()), swarm.seed_peer.transport):
            transport.get, transport.put = _finds_nothing(transport.get), _takes_nothing(transport.put)
        first.member.membership.admission.adopt(sealed)
        await until(
            lambda: all(n.member.membership.admission.sealed == sealed for n in swarm.nodes.values()), 60.0
        )
        assert all(n.member.membership.admission.revoked.entries == entry for n in swarm.nodes.values())
        await swarm.leave()

    def _finds_nothing(get: Any) -> Any:
        async def wrapped(key: str, deadline: float, **how: Any) -> Any:
            return [] if key.endswith("/revoked") else await get(key, deadline, **how)

        return wrapped

    def _takes_nothing(put: Any) -> Any:
        async def wrapped(key: str, *rest: Any) -> Any:
            return not key.endswith("/revoked") and await put(key, *rest)

        return wrapped

    run_swarm(main())
