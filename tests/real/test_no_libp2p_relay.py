"""p2pd relays nothing by libp2p's own protocol: what a node passes on is counted, bounded and for members alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import PeerUnreachable
from protocol.records.identity import Identity
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from tests.patience import patience

HOP = "/libp2p/circuit/relay/0.2.0/hop"  # https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md


async def test_a_stranger_that_asks_for_a_relay_finds_none(tmp_path: Path) -> None:
    made = []
    for name, is_public in (("asked", True), ("stranger", False)):
        Identity.from_seed("relay", name).save(tmp_path / name)
        made.append(Libp2pTransport(tmp_path / name, Libp2pConfig(client_only=not is_public)))
    asked, stranger = made
    try:
        for transport in made:
            await transport.start()
        await stranger.connect(asked.addresses(), patience(60.0))
        with pytest.raises(PeerUnreachable, match=HOP):
            await stranger._up().p2pd.control.open_stream(asked.peer_id, HOP, patience(20.0))
    finally:
        for transport in made:
            await transport.close()
