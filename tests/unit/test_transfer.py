"""How large a stage is says the manifest, not a peer, and what a sample holds says who asks for it."""

from __future__ import annotations

import random

import pytest
import torch

from node.model.compute import InlineCompute
from node.model.fragment import PIECE_PARAMETERS
from node.model.replica import Replica
from node.state.transfer import StateService, fetch_slow_weights
from node.state.witnesses import DonatedPiece, compared
from protocol.codecs.codec import encode
from protocol.errors import JoinError, Refused, WireError
from protocol.messages.state import MOST_POSITIONS, GetStateIndex, GetStateSample, StateIndex, StateSample
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import micro_manifest
from tests.unit.two_peers import in_virtual_time, two_peers


async def claims_a_tebi(request: Request) -> Answer:
    return Answer(StateIndex(stage=0, step=1, round=0, parameters=2**40, piece_parameters=PIECE_PARAMETERS))


@in_virtual_time
async def test_an_index_of_another_size_than_the_manifests_is_none() -> None:
    async with two_peers() as two:
        two.server.handle(GetStateIndex.answered_by(claims_a_tebi))
        with pytest.raises(JoinError, match="does not serve stage 0"):
            await fetch_slow_weights(two.caller, 0, 1_000, two.address)


@in_virtual_time
async def test_a_sample_is_of_the_weights_at_the_positions_asked_for_and_of_no_others() -> None:
    replica = Replica(micro_manifest(), 0)
    async with two_peers() as two:
        StateService(0, replica, InlineCompute(lambda _: 0.0)).serve(two.server)
        request = GetStateSample(stage=0, index=0, positions=[5, replica.parameters - 1])
        _, [phi] = await two.caller.call(two.address, request, deadline=5.0)
        assert torch.equal(phi, replica.phi[[5, -1]])
        for outside in ({"positions": [replica.parameters]}, {"index": 1}, {"stage": 1}):
            with pytest.raises(Refused, match=r"no-such-position|no-such-piece|other-stage"):
                await two.caller.call(two.address, request.model_copy(update=outside), deadline=5.0)


@pytest.mark.parametrize("positions", [[], [-1], [2**26], [0] * (MOST_POSITIONS + 1), ["0"]])
def test_a_sample_of_too_many_or_impossible_positions_is_malformed(positions: list[object]) -> None:
    with pytest.raises(WireError, match="positions"):
        GetStateSample.parsed({"stage": 0, "index": 0, "positions": positions})


@in_virtual_time
async def test_a_witness_that_talks_nonsense_is_none() -> None:
    nonsense = [torch.zeros(3), torch.tensor([1.0, torch.nan]), torch.zeros(1, 2)]

    async def says(request: Request) -> Answer:
        sample = StateSample(step=1, round=1, sizes=[0.0] * 3, largest=[0.0] * 2)
        return Answer(sample, [encode(nonsense.pop(), "fp32")])

    async with two_peers() as two:
        two.server.handle(GetStateSample.answered_by(says))
        claim = DonatedPiece(0, 2, 0, [torch.zeros(2)], step=1, round=1)
        while nonsense:
            found = await compared(two.caller, claim, [two.address], micro_manifest().inner, random.Random(1))
            assert found == {two.address: None}
