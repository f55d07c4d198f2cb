"""Two donors of five lie: the newcomer still starts from a state like that of the honest ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bootstrap.export.exporting import export
from bootstrap.export.fetching import Donor
from bootstrap.export.order import ExportOrder
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.replica import Replica
from node.process.daemon import Node
from node.state.transfer import StateService
from protocol.ground import PeerId
from protocol.messages.state import GetStateIndex, GetStatePiece
from protocol.records.lineage import UNDATED, Lineage
from protocol.rpc.rpc import Answer, Request
from protocol.run.manifest import Manifest
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    observer_of,
    peer_of,
    run_swarm,
    until,
)

LIARS = (3, 4)
NEWCOMER = 9
Piece = list[torch.Tensor]
Lie = Callable[[int, Piece], Piece]


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model.fragment", "state.transfer", "rounds.exchanges"):
        monkeypatch.setattr(f"node.{module}.PIECE_PARAMETERS", 256)
    monkeypatch.setattr("bootstrap.export.fetching.PIECE_PARAMETERS", 256)
    monkeypatch.setattr("bootstrap.export.fetching.PIECE_BYTES", 4 * 256)


def noise(index: int, piece: Piece) -> Piece:
    """The same of both liars."""
    generator = torch.Generator().manual_seed(index)
    return [*(torch.randn(tensor.shape, generator=generator) for tensor in piece[:2]), *piece[2:]]


def scaled(index: int, piece: Piece) -> Piece:
    return [3 * piece[0], *piece[1:]]


def flipped(index: int, piece: Piece) -> Piece:
    return [-piece[0], *piece[1:]]


def heavy(index: int, piece: Piece) -> Piece:
    """Honest weights that momentum would carry away."""
    return [piece[0], 100 * piece[1], *piece[2:]]


def light(index: int, piece: Piece) -> Piece:
    """Honest weights, for which AdamW would take steps without measure."""
    return [*piece[:3], 1e-6 * piece[3]]


def in_a_tenth_of_the_positions(index: int, piece: Piece) -> Piece:
    spoilt = [tensor.clone() for tensor in piece]
    for tensor, lie in zip(spoilt, noise(index, piece), strict=True):
        tensor[7::10] = lie[7::10]
    return spoilt


def in_one_position(index: int, piece: Piece) -> Piece:
    spoilt = piece[0].clone()
    spoilt[7] = 1e4
    return [spoilt, *piece[1:]]


def in_a_tenth_of_the_pieces(index: int, piece: Piece) -> Piece:
    return noise(index, piece) if index % 10 == 3 else piece


class Liar(Replica):
    """Trains and averages as others do, and tells newcomers and those who compare something else."""

    def __init__(self, lie: Lie, manifest: Manifest, stage: int, device: str) -> None:
        super().__init__(manifest, stage, device)
        self.is_lying = False
        self._lie = lie

    def read_piece(self, index: int, moments: bool) -> Piece:
        piece = super().read_piece(index, moments)
        return self._lie(index, piece) if self.is_lying else piece


@dataclass
class Arrival:
    """What the newcomer took, and what the honest ones held then."""

    taken: dict[int, Piece] = field(default_factory=dict)
    honest: list[dict[int, Piece]] = field(default_factory=list)
    liars: list[PeerId] = field(default_factory=list)

    def replica(self, swarm: SimulatedSwarm) -> Callable[[Manifest, int, str], Replica]:
        arrival = self

        class Newcomer(Replica):
            def adopt(
                self, pieces: dict[int, Piece], step: int, round_: int, lineage: Lineage = UNDATED
            ) -> None:
                arrival.taken = pieces
                arrival.honest = [
                    {
                        index: swarm.nodes[n].replica.read_piece(index, moments=True)
                        for index in range(self.whole.pieces)
                    }
                    for n in swarm.nodes
                    if n not in LIARS and n != NEWCOMER
                ]
                super().adopt(pieces, step, round_, lineage)

        return Newcomer

    def furthest(self, place: int) -> float:
        """Entry of φ, δ or a moment from the nearest honest replica's."""
        assert self.taken
        return max(
            min(float((theirs[index][place] - tensors[place]).abs().max()) for theirs in self.honest)
            for index, tensors in self.taken.items()
        )

    @property
    def lightest(self) -> float:
        """The smallest √v/|m| of any weight; an honest one's is beyond 0.1 with these β."""
        return min(
            float(((tensors[3].sqrt() + 1e-8) / tensors[2].abs().clamp(min=1e-8)).min())
            for tensors in self.taken.values()
        )


async def swarm_with(lie: Lie | None, replicas: int, step: int, total_steps: int = FOREVER) -> SimulatedSwarm:
    swarm: SimulatedSwarm = micro_swarm(
        stages=1, inner__microbatches=1, inner__sequences=1, inner__total_steps=total_steps
    )
    await swarm.seed_peer.start()
    for number in range(replicas):
        settings: dict[str, Any] = {}
        if lie is not None and number in LIARS:
            settings["replica"] = lambda *args: Liar(lie, *args)
        swarm.add(number, stage=0, **settings)
    await everyone_reaches(swarm, step)
    return swarm


async def lying(lie: Lie, total_steps: int = FOREVER) -> SimulatedSwarm:
    """Five have trained together, and two of them begin to lie."""
    swarm = await swarm_with(lie, 5, step=30, total_steps=total_steps)
    for number in LIARS:
        replica = swarm.nodes[number].replica
        assert isinstance(replica, Liar)
        replica.is_lying = True
    return swarm


async def arrived(swarm: SimulatedSwarm) -> Arrival:
    arrival = Arrival(liars=[peer_of(swarm.nodes[number]) for number in LIARS if number in swarm.nodes])
    swarm.add(NEWCOMER, stage=0, replica=arrival.replica(swarm))
    await until(lambda: bool(events_of(swarm, "downloaded", NEWCOMER)))
    await swarm.leave()
    return arrival


LIES = [
    noise, scaled, flipped, heavy, light, in_one_position, in_a_tenth_of_the_positions, in_a_tenth_of_the_pieces
]  # fmt: skip


@pytest.mark.long_but("scaled")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lie", LIES)
def test_two_lying_donors_of_five_give_nothing(lie: Lie, caplog: pytest.LogCaptureFixture) -> None:
    """They agree with each other on their lies, as donors and as witnesses."""

    async def main() -> Arrival:
        return await arrived(await lying(lie))

    arrival: Arrival = run_swarm(main())
    assert arrival.furthest(0) < 0.2, "half of that are honest ones from each other, this early"
    assert arrival.furthest(1) < 0.2
    assert arrival.lightest > 1e-3
    told = [message.split()[1] for message in caplog.messages if "gives another state" in message]
    assert len(told) == len(set(told)), "each is told of once"
    assert {*told} <= {f"…{peer[-8:]}" for peer in arrival.liars}, "and nobody honest"


def boast(node: Node) -> None:
    """It gives honest weights, and says that they are of step 1,000,000."""
    service = StateService(0, node.replica, node.context.compute)
    far = {"step": 10**6, "round": 2 * 10**5}

    async def on_index(request: Request[GetStateIndex]) -> Answer[Any]:
        answer = await service.on_index(request)
        return Answer(answer.message.model_copy(update=far), answer.tensors)

    async def on_piece(request: Request[GetStatePiece]) -> Answer[Any]:
        answer = await service.on_piece(request)
        return Answer(answer.message.model_copy(update=far), answer.tensors)

    node.rpc.handle(GetStateIndex.answered_by(on_index), GetStatePiece.answered_by(on_piece))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_donor_says_alone_how_far_a_stage_is_that_began_lately() -> None:
    """Where all others are in their first rounds it would be the only one whose state is worth having."""

    async def main() -> SimulatedSwarm:
        swarm = await swarm_with(None, 5, step=2)
        boast(swarm.nodes[4])
        await arrived(swarm)
        return swarm

    [downloaded] = events_of(run_swarm(main()), "downloaded", NEWCOMER)
    assert downloaded["step"] < 50
    assert downloaded["round"] < 10


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_export_takes_no_liars_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although theirs come first."""
    told: list[str] = []

    def liars_first(donors: Sequence[Donor], *_: object) -> list[Donor]:
        return sorted(donors, key=lambda donor: donor.peer not in liars)[:1]

    async def main() -> SimulatedSwarm:
        swarm = await lying(scaled, total_steps=30)
        liars.update(peer_of(swarm.nodes[number]) for number in LIARS)
        monkeypatch.setattr("bootstrap.export.exporting.choose", liars_first)
        await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()))
        await export(await observer_of(swarm), ExportOrder(tmp_path / "model"), tell=told.append)
        await swarm.leave()
        return swarm

    liars = set[PeerId]()
    run_swarm(main())
    assert len([sentence for sentence in told if "gives other weights" in sentence]) == 2
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert max(float(tensor.abs().max()) for tensor in weights.values()) < 2.0, "norms are around 1"


def test_who_adopted_a_bad_state_finds_out_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: its partners clipped what it sent, and it them, and it stayed as far away as it was."""
    monkeypatch.undo()  # in many pieces it is left alone more often than not, and gets well by training on
    monkeypatch.setattr("node.rounds.pace.ODD_SECONDS", 3.0)  # a minute is 1,500 steps of so small a model

    async def main() -> None:
        swarm = micro_swarm(stages=1, model__layers=1, outer__clip=1.5, inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        for number in range(5):
            swarm.add(number, stage=0)
        await everyone_reaches(swarm, 40)
        spoilt = swarm.nodes[4].replica
        # a third of that gets well by training in two of five streams of random numbers, before it is told of
        noise = 3 * torch.randn(spoilt.parameters, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            spoilt.phi.add_(noise)
            spoilt.flat.values.copy_(spoilt.phi)
        await until(lambda: bool(events_of(swarm, "downloaded")), 60, 1.0)
        (behind,) = events_of(swarm, "behind")
        assert behind["node"] == 4
        assert "its loss of" in behind["reason"]
        await everyone_goes_on(swarm, 60)
        losses = [node.context.counters.losses.recent() for node in swarm.nodes.values()]
        assert max(losses) < min(losses) + 0.3
        await swarm.leave()

    run_swarm(main())
