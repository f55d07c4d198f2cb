"""A message that names a peer that cannot exist: p2pd is not asked for it, and whoever sent it is struck."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.access.peer_limits import BAN_AFTER_STRIKES
from protocol.errors import PeerUnreachable, Refused
from protocol.ground import PeerId
from protocol.messages.training import Predict, Predicted
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc
from tests.real.test_libp2p_transport import OnLoopback
from tests.transport_network import DEADLINE

NOBODY = Identity.from_seed("nobody").peer_id
NONSENSE = ["nonsense", "", "\x1b[2J", NOBODY[:-1], NOBODY + "1", "0" + NOBODY[1:], "12D3Koo" + 45 * "z"]


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[OnLoopback]:
    network = OnLoopback(tmp_path)
    yield network
    await network.close()


async def victim_and_mallory(network: OnLoopback) -> tuple[Rpc, Rpc]:
    """The victim passes on what it is asked, as nodes do."""
    victim, mallory = Rpc(await network.peer("victim")), Rpc(await network.peer("mallory"))

    async def pass_on(request: Request[Predict]) -> Answer[Predicted]:
        onward = request.message.model_copy(update={"route": []})
        reply, _ = await victim.call(PeerId(request.message.route[0]), onward, deadline=DEADLINE)
        return Answer(reply)

    victim.handle(Predict.answered_by(pass_on))
    await victim.start()
    assert await mallory.transport.connect(victim.transport.addresses(), DEADLINE)
    return victim, mallory


def predict(peer: str) -> Predict:
    return Predict.model_construct(stage=0, route=[peer], answer="a", position=0, top=1)


@pytest.mark.parametrize("peer", NONSENSE)
async def test_a_route_over_nonsense_is_malformed_and_leaves_no_traceback(
    network: OnLoopback, caplog: pytest.LogCaptureFixture, peer: str
) -> None:
    """Before: 656 tracebacks in a few seconds, and nobody was ever struck."""
    victim, mallory = await victim_and_mallory(network)
    for _ in range(BAN_AFTER_STRIKES - 1):
        with pytest.raises(Refused, match=r"malformed predict: route\.0: .*not a peer id"):
            await mallory.call(victim.transport.peer_id, predict(peer), deadline=DEADLINE)
    with pytest.raises((Refused, PeerUnreachable)):  # the connection ends with it
        await mallory.call(victim.transport.peer_id, predict(peer), deadline=DEADLINE)
    assert victim.is_banned(mallory.transport.peer_id)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_route_over_a_peer_that_does_not_exist_is_nobodys_breach(network: OnLoopback) -> None:
    victim, mallory = await victim_and_mallory(network)
    for _ in range(BAN_AFTER_STRIKES + 1):
        with pytest.raises(Refused, match="failed"):
            await mallory.call(victim.transport.peer_id, predict(NOBODY), deadline=DEADLINE)
