"""How large a stage is says the manifest, not a peer: nobody makes a reader take memory for what it claims."""

from __future__ import annotations

import pytest

from node.model.replica import PIECE_PARAMETERS
from node.state.transfer import fetch_slow_weights
from protocol.errors import JoinError
from protocol.messages.peers import GetStateIndex, StateIndex
from protocol.rpc import Answer, Request
from tests.unit.two_peers import in_virtual_time, two_peers


async def claims_a_tebi(request: Request) -> Answer:
    return Answer(StateIndex(stage=0, step=1, round=0, parameters=2**40, piece_parameters=PIECE_PARAMETERS))


@in_virtual_time
async def test_an_index_of_another_size_than_the_manifests_is_none() -> None:
    async with two_peers() as two:
        two.server.handle(GetStateIndex.answered_by(claims_a_tebi))
        with pytest.raises(JoinError, match="does not serve stage 0"):
            await fetch_slow_weights(two.caller, 0, 1_000, two.address)
