"""Two replicas over the in-memory network whose rounds are paired by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import torch

from bootstrap.lab.in_memory.memory import MemoryTransport, memory_address
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.context import Context
from node.model.compute import InlineCompute
from node.model.fragment import Fragment, PairPull
from node.model.outer import contribution, outer_step
from node.model.replica import Replica
from node.rounds.gossip import PairAverager
from node.rounds.meeting import Pair
from node.rounds.pace import Standing
from node.rounds.rounds import Rounds
from protocol.ground import PeerId
from protocol.messages.training import Contribute, Unread
from protocol.records.identity import Identity
from protocol.rpc.rpc import Rpc, Traffic
from tests.swarm.micro import membership_of, micro_manifest

PIECE = 1024
NEAR = Link(latency=0.01)
OVERLAPS = ("none", "phi-early")


class Agreed:
    """A matchmaker whose pair is a given one."""

    def __init__(
        self, pair: Pair | None, began: Callable[[Pair], None], next_fragment: int | None = None
    ) -> None:
        self.pair = pair
        self.next_fragment = next_fragment
        self._next: Pair | None = None
        self._began = began
        self.standing = Standing(1.0)
        self.search_seconds: float | None = None
        self.partner_by = 0.0

    def is_expected(self, name: str, peer: PeerId) -> bool:
        return Pair(peer, name) in (self.pair, self._next)

    def agree_next(self, pair: Pair | None) -> None:
        self._next = pair

    async def conclude(self) -> Pair | None:
        return self.pair

    def begin_round(self) -> None:
        self.pair, self._next = self._next, None
        if self.pair is not None:
            self._began(self.pair)

    async def let_go(self) -> None:
        pass

    async def close(self) -> None:
        pass


def whole_of(pull: PairPull, own: Fragment) -> torch.Tensor:
    return torch.cat([pull.piece(piece).clone() for piece in own.all_pieces.in_groups(1)])


class End:
    """One of two replicas; `agree` makes them partners of their current round."""

    def __init__(self, network: MemoryNetwork, name: str, kind: type[Replica], **settings: Any) -> None:
        self.transport = MemoryTransport(network, Identity.from_seed(name))
        self.me = self.transport.peer_id
        self.rpc = Rpc(self.transport, dict.fromkeys(Traffic, 1 << 24))
        self.events: list[dict[str, Any]] = []
        membership = membership_of(self.rpc, micro_manifest(stages=1, **settings), hear=self.events.append)
        self.context = Context(membership, 0, InlineCompute(lambda _: 0.001))
        self.replica = kind(self.context.manifest, 0)
        self.rounds = Rounds(self.context, self.replica, random.Random(0))
        self.pulls: list[torch.Tensor] = []
        self._finish = self.replica.finish_round_with
        self.replica.finish_round_with = self._remember  # type: ignore[method-assign]

    @property
    def averager(self) -> PairAverager:
        averager = self.rounds.averager
        assert isinstance(averager, PairAverager)
        return averager

    def _remember(self, own: Fragment, pull: PairPull) -> None:
        self.pulls.append(whole_of(pull, own))
        self._finish(own, pull)

    async def start(self) -> None:
        await self.transport.start()
        await self.rpc.start()
        self.rpc.handle(
            Contribute.answered_by(self.averager.on_contribute), Unread.answered_by(self.averager.on_unread)
        )

    def agree(self, partner: End, name: str) -> None:
        pair = Pair(partner.me, name)
        self.averager.matchmaker = Agreed(pair, self.averager.agreed)  # type: ignore[assignment]
        self.averager.agreed(pair)

    def train(self, seed: int, scale: float = 1e-2) -> torch.Tensor:
        """Pretended inner steps: θ moves; returns by how much."""
        noise = torch.randn(self.replica.parameters, generator=torch.Generator().manual_seed(seed)) * scale
        self.replica.flat.values.add_(noise)
        self.replica.steps_in_round += 1
        return noise

    async def close(self) -> None:
        await self.rounds.close()
        await self.rpc.close()
        await self.transport.close()


async def two_ends(
    link: Link = NEAR,
    kinds: tuple[type[Replica], type[Replica]] = (Replica, Replica),
    **settings: Any,
) -> tuple[End, End]:
    network = MemoryNetwork(1, link)
    a, b = (End(network, name, kind, **settings) for name, kind in zip("ab", kinds, strict=True))
    for number, end in enumerate((a, b)):
        await end.start()
        apart = (
            torch.randn(end.replica.parameters, generator=torch.Generator().manual_seed(90 + number)) * 1e-2
        )
        end.replica.phi.add_(apart)
        end.replica.flat.values.copy_(end.replica.phi)
    await b.transport.connect([memory_address(a.me)], 5.0)
    return a, b


def agree(a: End, b: End, name: str = "pair") -> None:
    a.agree(b, name)
    b.agree(a, name)


async def whole_round(a: End, b: End, number: int) -> list[torch.Tensor]:
    """Agree, train, exchange, step; returns both sides' progress."""
    agree(a, b, f"pair {number}")
    await asyncio.sleep(0.5)
    progress = [end.train(10 * number + side) for side, end in enumerate((a, b))]
    await asyncio.gather(a.rounds.finish(), b.rounds.finish())
    return progress


def mean_phi(*ends: End) -> torch.Tensor:
    return torch.stack([end.replica.phi for end in ends]).mean(0)


def mean_delta(*ends: End) -> torch.Tensor:
    return torch.stack([end.replica.delta for end in ends]).mean(0)


def alone(replica: Replica) -> tuple[torch.Tensor, torch.Tensor]:
    """What φ and δ become when the round ends now, without a partner."""
    phi, delta = replica.phi.clone(), replica.delta.clone()
    outer_step(
        phi, delta, contribution(replica.flat.values, phi, replica.whole.settings), replica.whole.settings
    )
    return phi, delta


def assert_alone(end: End, expected: tuple[torch.Tensor, torch.Tensor], atol: float = 1e-7) -> None:
    assert torch.allclose(end.replica.phi, expected[0], atol=atol)
    assert torch.allclose(end.replica.delta, expected[1], atol=atol)
    assert torch.equal(end.replica.flat.values, end.replica.phi)
