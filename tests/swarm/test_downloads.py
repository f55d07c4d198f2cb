"""A download takes its pieces from replicas that belong together, whoever lies, dies or started again."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from bootstrap.lab.in_memory.memory import MemoryTransport, memory_address
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.model.compute import InlineCompute
from node.model.replica import Replica
from node.state.download import State, WantedState, download_state
from node.state.transfer import DonorProgress, StateService
from protocol.errors import JoinError
from protocol.messages.state import GetStateIndex, GetStatePiece, StatePiece
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc
from tests.swarm.micro import micro_manifest, run_swarm

PIECE = 1_024
MANIFEST = micro_manifest(stages=1)


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model.fragment", "state.transfer"):
        monkeypatch.setattr(f"node.{module}.PIECE_PARAMETERS", PIECE)


class Donor:
    """A holder whose every number is `mark`, so that a piece shows where it came from."""

    def __init__(self, network: MemoryNetwork, name: str, round_: int, mark: float) -> None:
        self.transport = MemoryTransport(network, Identity.from_seed(name))
        self.peer, self.rpc = self.transport.peer_id, Rpc(self.transport)
        self.replica = Replica(MANIFEST, 0)
        self.replica.round, self.replica.step = round_, 5 * round_
        first, second = self.replica.optimizer.moments
        for tensor, value in (
            (self.replica.phi, mark),
            (self.replica.delta, mark),
            (first, 1e-4 * mark),
            (second, 1e-8 * mark**2),
        ):
            tensor.fill_(value)
        self.service = StateService(0, self.replica, InlineCompute(lambda _: 0.001))
        self.asked = 0

    async def start(self) -> None:
        await self.transport.start()
        await self.rpc.start()
        self.rpc.handle(GetStateIndex.answered_by(self.service.on_index))
        self.rpc.handle(GetStatePiece.answered_by(self.on_piece))

    async def on_piece(self, request: Request) -> Answer:
        self.asked += 1
        return await self.service.on_piece(request)


class Leaper(Donor):
    """Calls its pieces those of a round 10^6 later."""

    async def on_piece(self, request: Request) -> Answer:
        answer = await super().on_piece(request)
        fields = answer.message.model_dump() | {"round": 10**6, "step": 5 * 10**6}
        return Answer(StatePiece(**fields), answer.tensors)


class Beginner(Donor):
    """Begins anew from the seed after its first piece."""

    async def on_piece(self, request: Request) -> Answer:
        if self.asked:
            self.replica.round = self.replica.step = 0
        return await super().on_piece(request)


class Damaged(Donor):
    async def on_piece(self, request: Request) -> Answer:
        answer = await super().on_piece(request)
        fields = answer.message.model_dump() | {"digest": bytes(32)}
        return Answer(StatePiece(**fields), answer.tensors)


class Dying(Donor):
    async def on_piece(self, request: Request) -> Answer:
        if self.asked == 2:
            self.transport.network.kill(self.peer)  # type: ignore[attr-defined]
        return await super().on_piece(request)


def downloaded(
    *donors: tuple[type[Donor], int], bandwidth: float = 1e9
) -> tuple[State, DonorProgress, list[Donor]]:
    """What a newcomer gets from donors of these kinds, at these rounds; each marks its pieces with its place."""

    async def main() -> tuple[State, DonorProgress, list[Donor]]:
        network = MemoryNetwork(1, Link(latency=0.01, bandwidth=bandwidth))
        made = [kind(network, f"donor {n}", round_, float(n)) for n, (kind, round_) in enumerate(donors)]
        transport = MemoryTransport(network, Identity.from_seed("newcomer"))
        await transport.start()
        for donor in made:
            donor.transport.network = network  # type: ignore[attr-defined]
            await donor.start()
            await transport.connect([memory_address(donor.peer)], 5.0)
        wanted = WantedState.of(MANIFEST, 0, made[0].replica.parameters)
        pieces, progress = await download_state(
            Rpc(transport), wanted, lambda: [d.peer for d in made], random.Random(1)
        )
        return pieces, progress, made

    work: Coroutine[Any, Any, Any] = main()
    return run_swarm(work)  # type: ignore[no-any-return]


def marks(pieces: State) -> set[float]:
    """Whose they are; every one is there, and whole."""
    assert sorted(pieces) == list(range(len(pieces)))
    assert len(pieces) > 10
    assert all(
        torch.equal(tensor, torch.full_like(tensor, tensor[0].item()))
        for p in pieces.values()
        for tensor in p[:3]
    )
    return {float(tensors[0][0]) for tensors in pieces.values()}


def test_nothing_is_taken_from_one_that_began_anew() -> None:
    pieces, progress, _ = downloaded((Donor, 14), (Donor, 0), (Donor, 13), (Donor, 14))
    assert marks(pieces) == {0.0, 2.0, 3.0}
    assert progress == DonorProgress(step=30, round=14), "70 steps are more than this run has"


def test_nor_when_a_half_began_anew() -> None:
    pieces, progress, _ = downloaded((Donor, 5), (Donor, 0), (Donor, 1), (Donor, 4))
    assert marks(pieces) == {0.0, 3.0}
    assert progress == DonorProgress(20, 4)


def test_one_does_not_tell_a_stage_that_began_lately_how_far_it_is() -> None:
    pieces, progress, _ = downloaded((Donor, 10**6), (Donor, 2), (Donor, 1))
    assert marks(pieces) == {1.0, 2.0}
    assert progress == DonorProgress(5, 1)


@pytest.mark.parametrize("kind", [Leaper, Beginner, Damaged])
def test_one_that_serves_nonsense_is_left_out(kind: type[Donor]) -> None:
    pieces, progress, donors = downloaded((Donor, 5), (kind, 5), (Donor, 4))
    assert marks(pieces) >= {0.0, 2.0}
    assert progress.round <= 5
    assert donors[1].asked <= 5  # those in flight when it was found out


def test_one_that_claims_to_be_further_than_all_gives_nothing() -> None:
    pieces, progress, _ = downloaded((Donor, 5), (Donor, 2**37), (Donor, 5))
    assert marks(pieces) == {0.0, 2.0}
    assert progress == DonorProgress(25, 5)


def test_a_donor_that_dies_is_replaced_by_others_of_its_group() -> None:
    pieces, progress, _ = downloaded((Dying, 5), (Donor, 0), (Donor, 5), (Donor, 5), bandwidth=1e5)
    assert marks(pieces) >= {2.0, 3.0}
    assert 1.0 not in marks(pieces)
    assert progress == DonorProgress(25, 5)


def test_when_nobody_is_left_the_download_fails_with_what_to_do() -> None:
    with pytest.raises(JoinError, match="Check the connection"):
        downloaded((Dying, 5), bandwidth=1e5)
    with pytest.raises(JoinError, match="damaged"):
        downloaded((Damaged, 5))
