"""Two replicas exchange contributions over the in-memory network and take the outer step: every overlap and codec."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.compute import InlineCompute, Priority
from node.context import Context, Counters
from node.events import Events
from node.membership import View
from node.outer import contribution, outer_step
from node.pairing import Pair
from node.replica import Pieces, Replica
from node.rounds import Rounds
from protocol.codec import Encoded, encode
from protocol.errors import CodecError, PeerUnreachable, Refused
from protocol.identity import Identity
from protocol.messages import Contribute, Done
from protocol.rpc import Request, Rpc, Traffic
from protocol.transport.base import PeerId
from protocol.transport.memory import MemoryTransport, memory_address
from protocol.transport.memory_link import Link
from protocol.transport.memory_network import MemoryNetwork
from tests.swarm.micro import micro_manifest, run_swarm

PIECE = 1024
NEAR = Link(latency=0.01)
OVERLAPS = ("none", "phi-early", "late")


class Agreed:
    """A matchmaker whose pair is a given one."""

    def __init__(self, pair: Pair, began: Callable[[Pair], None]) -> None:
        self.pair: Pair | None = pair
        self._next: Pair | None = None
        self._began = began

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

    async def close(self) -> None:
        pass


def whole_of(pieces: Pieces, replica: Replica) -> torch.Tensor:
    return torch.cat([pieces(index, replica.piece_bounds(index)).clone() for index in range(replica.pieces)])


class End:
    """One of two replicas; `agree` makes them partners of their current round."""

    def __init__(self, network: MemoryNetwork, name: str, kind: type[Replica], **settings: Any) -> None:
        self.transport = MemoryTransport(network, Identity.from_seed(name))
        self.me = self.transport.peer_id
        self.rpc = Rpc(self.transport, dict.fromkeys(Traffic, 1 << 24))
        self.events: list[dict[str, Any]] = []
        self.context = Context(
            me=self.me,
            run_id="test",
            manifest=micro_manifest(stages=1, **settings),
            stage=0,
            transport=self.transport,
            rpc=self.rpc,
            view=View(),
            compute=InlineCompute(lambda _: 0.001),
            events=Events(self.transport.now, self.events.append),
            counters=Counters(),
        )
        self.replica = kind(self.context.manifest, 0)
        self.rounds = Rounds(self.context, self.replica, random.Random(0))
        self.pulls: list[torch.Tensor] = []
        self._finish = self.replica.finish_round_with
        self.replica.finish_round_with = self._remember  # type: ignore[method-assign]

    def _remember(self, pull: Pieces) -> None:
        self.pulls.append(whole_of(pull, self.replica))
        self._finish(pull)

    async def start(self) -> None:
        await self.transport.start()
        await self.rpc.start()
        self.rpc.handle(Traffic.GOSSIP, Contribute, self.rounds.on_contribute)

    def agree(self, partner: End, name: str) -> None:
        pair = Pair(partner.me, name)
        self.rounds.matchmaker = Agreed(pair, self.rounds._begin)  # type: ignore[assignment]
        self.rounds._begin(pair)

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


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("replica", "exchange"):
        monkeypatch.setattr(f"node.{module}.PIECE_PARAMETERS", PIECE)


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
    await asyncio.gather(a.rounds.settle(), b.rounds.settle())
    return progress


def mean_phi(*ends: End) -> torch.Tensor:
    return torch.stack([end.replica.phi for end in ends]).mean(0)


def mean_delta(*ends: End) -> torch.Tensor:
    return torch.stack([end.replica.delta for end in ends]).mean(0)


def alone(replica: Replica) -> tuple[torch.Tensor, torch.Tensor]:
    """What φ and δ become when the round ends now, without a partner."""
    phi, delta = replica.phi.clone(), replica.delta.clone()
    outer_step(phi, delta, contribution(replica.flat.values, phi, replica.settings), replica.settings)
    return phi, delta


def assert_alone(end: End, expected: tuple[torch.Tensor, torch.Tensor], atol: float = 1e-7) -> None:
    assert torch.allclose(end.replica.phi, expected[0], atol=atol)
    assert torch.allclose(end.replica.delta, expected[1], atol=atol)
    assert torch.equal(end.replica.flat.values, end.replica.phi)


# --- the pair's mean ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("gossip", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("progress", ["fp32", "int8"])
def test_the_pairs_mean_of_phi_moves_as_the_formula_says(overlap: str, gossip: str, progress: str) -> None:
    """mean(φ) ← mean(φ) + α·mean(δ) + β·mean(Δ), whatever the codecs lose."""

    async def main() -> None:
        a, b = await two_ends(outer__overlap=overlap, wire__gossip=gossip, wire__progress=progress)
        settings, apart = a.replica.settings, (a.replica.phi - b.replica.phi).norm()
        for number in range(4):
            phi, delta = mean_phi(a, b), mean_delta(a, b)
            moved = await whole_round(a, b, number)
            expected = phi + settings.alpha * delta + settings.beta * (moved[0] + moved[1]) / 2
            assert torch.allclose(mean_phi(a, b), expected, atol=1e-6)
            assert torch.allclose(a.pulls[-1], -b.pulls[-1], atol=1e-7)
        assert (a.replica.phi - b.replica.phi).norm() < 0.5 * apart
        assert a.replica.round == b.replica.round == 4
        assert [event["partner"] for event in a.events if event["event"] == "round"] == [b.me] * 4
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_phi_sent_early_in_float32_gives_the_same_step_as_z() -> None:
    results = {}

    async def main(overlap: str) -> None:
        a, b = await two_ends(outer__overlap=overlap)
        for number in range(3):
            await whole_round(a, b, number)
        results[overlap] = [(end.replica.phi.clone(), end.replica.delta.clone()) for end in (a, b)]
        await asyncio.gather(a.close(), b.close())

    for overlap in OVERLAPS:
        run_swarm(main(overlap))
    for overlap in ("phi-early", "late"):
        for mine, plain in zip(results[overlap], results["none"], strict=True):
            assert torch.allclose(mine[0], plain[0], atol=1e-6)
            assert torch.allclose(mine[1], plain[1], atol=1e-6)


def test_with_error_feedback_what_was_sent_adds_up_to_the_progress_made() -> None:
    async def main() -> None:
        wire = {"wire__progress": "int8", "wire__error_feedback": True}
        a, b = await two_ends(outer__overlap="phi-early", **wire)
        made, sent = torch.zeros(a.replica.parameters), torch.zeros(a.replica.parameters)
        owed = []
        settings = a.replica.settings
        for number in range(12):
            apart = b.replica.phi - a.replica.phi
            mine, theirs = await whole_round(a, b, number)
            made.add_(theirs - mine)
            sent.add_((2 * a.pulls[-1] - settings.gamma * apart) / settings.beta)
            owed.append(a.replica.residual.norm())
        rests = [end.replica.residual._owed for end in (a, b)]
        rest_a, rest_b = (rest for rest in rests if rest is not None)
        assert torch.allclose(sent, made - (rest_b - rest_a), atol=1e-5)
        assert max(owed) < 2 * owed[0]  # it does not pile up
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_without_error_feedback_nothing_is_owed() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early", wire__progress="int8")
        await whole_round(a, b, 0)
        assert a.replica.residual.norm() == 0.0
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_the_partners_phi_is_sampled_for_the_distance_whichever_way_it_came() -> None:
    async def main(overlap: str) -> float:
        a, b = await two_ends(outer__overlap=overlap)
        apart = float((a.replica.phi - b.replica.phi).square().mean().sqrt())
        await whole_round(a, b, 0)
        assert a.context.counters.spread == b.context.counters.spread
        assert a.context.counters.spread == pytest.approx(apart / 2, rel=0.1)  # a thousand entries or more
        await asyncio.gather(a.close(), b.close())
        return apart

    assert len({run_swarm(main(overlap)) for overlap in OVERLAPS}) == 1


# --- φ early ------------------------------------------------------------------------------------


def test_only_the_progress_is_left_for_the_end() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early", wire__progress="int8")
        agree(a, b)
        await asyncio.sleep(5)
        early = a.context.counters.gossip_bytes
        assert early == 4 * a.replica.parameters
        a.train(1), b.train(2)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        late = a.context.counters.gossip_bytes - early
        assert late < 0.27 * early
        [event] = [event for event in a.events if event["event"] == "round"]
        assert event["gossip_bytes"] == early + late
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_phi_makes_way_for_other_traffic_until_the_round_ends() -> None:
    async def main() -> None:
        a, b = await two_ends(Link(latency=0.01, bandwidth=40_000.0), outer__overlap="phi-early")
        in_flight, most = 0, 0
        real = a.rpc.call

        async def call(*args: Any, **named: Any) -> Any:
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            try:
                return await real(*args, **named)
            finally:
                in_flight -= 1

        a.rpc.call = call  # type: ignore[method-assign]
        agree(a, b)
        whole = 4 * a.replica.parameters / 40_000  # seconds that φ takes when the link is its own
        await asyncio.sleep(whole)
        assert most == 1
        assert 0.3 < a.context.counters.gossip_bytes / (4 * a.replica.parameters) < 0.7
        began = asyncio.get_running_loop().time()
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert most > 1
        assert asyncio.get_running_loop().time() - began < 2 * whole
        assert a.context.counters.partners == {b.me: 1}
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


@pytest.mark.parametrize("progress", ["fp32", "int8"])
def test_parts_may_come_in_any_order_and_more_than_once(progress: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early", wire__progress=progress)
        agree(a, b)
        await asyncio.sleep(5)
        b.train(1)
        pieces = messages_of(b, progress)
        straight = receive(a, b, pieces)
        shuffled = pieces * 2
        random.Random(3).shuffle(shuffled)
        assert torch.equal(receive(a, b, shuffled), straight)
        assert torch.equal(receive(a, b, pieces[::-1]), straight)
        z = 0.7 * b.replica.phi + 0.7 * (b.replica.flat.values - b.replica.phi)
        assert torch.allclose(2 * straight, z, atol=0.7 / 254 * 0.1 if progress == "int8" else 1e-7)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def messages_of(end: End, progress: str) -> list[tuple[str, int, Encoded]]:
    """Every piece of both parts."""
    replica = end.replica
    parts = {"phi": (replica.phi, "fp32"), "progress": (replica.flat.values - replica.phi, progress)}
    return [
        (part, start, encode(whole[start : start + PIECE], codec))
        for part, (whole, codec) in parts.items()
        for start in range(0, replica.parameters, PIECE)
    ]


def receive(end: End, partner: End, pieces: list[tuple[str, int, Encoded]]) -> torch.Tensor:
    """z as `end` puts it together."""
    exchange = end.rounds._exchange
    pair = Pair(partner.me, f"copy {random.random()}")
    for part, offset, piece in pieces:
        message = Contribute(pair=pair.name, part=part, offset=offset, total=end.replica.parameters)  # type: ignore[arg-type]
        exchange.receive(exchange.of(pair), message, [piece])
    assert exchange.of(pair).received.is_set()
    partners = exchange.of(pair).partners
    for index in range(end.replica.pieces):
        bounds = end.replica.piece_bounds(index)
        partners.read(index, bounds, partners.total[bounds])
    return partners.total.clone()


# --- late ---------------------------------------------------------------------------------------


def test_a_late_step_carries_what_was_trained_meanwhile() -> None:
    async def main(trains: bool) -> None:
        a, b = await two_ends(outer__overlap="late")
        plain_a, plain_b = await two_ends(outer__overlap="none")
        ends = (a, b, plain_a, plain_b)
        agree(a, b)
        agree(plain_a, plain_b)
        for seed, end in enumerate(ends):
            end.train(seed % 2)
        await asyncio.gather(*(end.rounds.finish() for end in ends))
        assert a.replica.round == 0  # its step is still due
        assert a.replica.steps_in_round == 0  # but the next round has begun
        moved = a.train(7) if trains else torch.zeros(a.replica.parameters)
        await asyncio.sleep(5)
        await asyncio.gather(a.rounds.settle(wait=False), b.rounds.settle(wait=False))
        assert torch.equal(a.replica.phi, plain_a.replica.phi)
        assert torch.equal(a.replica.delta, plain_a.replica.delta)
        assert torch.allclose(a.replica.flat.values, plain_a.replica.phi + moved, atol=1e-7)
        assert torch.equal(b.replica.flat.values, plain_b.replica.flat.values)
        assert a.replica.steps_in_round == (1 if trains else 0)
        await asyncio.gather(*(end.close() for end in ends))

    run_swarm(main(trains=False))
    run_swarm(main(trains=True))


def test_leaving_a_round_late_does_not_wait_and_the_next_end_does() -> None:
    async def main() -> None:
        a, b = await two_ends(Link(latency=0.2), outer__overlap="late")
        agree(a, b)
        a.train(1), b.train(2)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert asyncio.get_running_loop().time() - began < 0.05
        await a.rounds.settle(wait=False)
        assert a.replica.round == 0
        a.train(3)
        await a.rounds.finish()  # alone: nobody agreed on this round
        assert a.replica.round == 2
        rounds = [event for event in a.events if event["event"] == "round"]
        assert [event["partner"] for event in rounds] == [b.me, None]
        assert rounds[0]["blocked_seconds"] > 0.4
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_the_last_round_is_not_left_late() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="late")
        agree(a, b)
        a.train(1), b.train(2)
        await asyncio.gather(a.rounds.finish(is_last=True), b.rounds.finish())
        assert a.replica.round == 1
        assert torch.equal(a.replica.flat.values, a.replica.phi)
        await b.rounds.settle()
        assert torch.equal(a.pulls[-1], -b.pulls[-1])
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_snapshot_before_the_late_step_is_a_state_to_go_on_from() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="late")
        agree(a, b)
        phi = a.replica.phi.clone()
        first = a.train(1)
        await a.rounds.finish()
        second = a.train(2)
        snapshot = a.replica.snapshot()
        assert torch.equal(snapshot.phi, phi)
        assert torch.allclose(snapshot.theta - snapshot.phi, first + second, atol=1e-6)
        other = Replica(a.replica.manifest, 0)
        other.restore(snapshot)
        other.finish_round_alone()
        assert torch.allclose(other.phi, phi + 0.7 * (first + second), atol=1e-6)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("progress", ["fp32", "int8"])
def test_a_partner_that_is_killed_leaves_an_update_of_ones_own(overlap: str, progress: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap=overlap, wire__progress=progress)
        agree(a, b)
        await asyncio.sleep(5)  # φ has arrived, where it goes early
        a.train(1), b.train(2)
        expected = alone(a.replica)
        a.transport._network.kill(b.me)
        await a.rounds.finish()
        await a.rounds.settle()
        assert_alone(a, expected)
        assert [event["event"] for event in a.events] == ["exchange-failed", "round"]
        assert a.events[-1]["partner"] is None
        await a.close()

    run_swarm(main())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_partner_that_never_comes_costs_the_deadline(overlap: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap=overlap, limits__gossip_deadline=6.0)
        agree(a, b)
        await asyncio.sleep(5)
        a.train(1)
        expected = alone(a.replica)
        began = asyncio.get_running_loop().time()
        await a.rounds.finish()
        await a.rounds.settle()
        assert 5.5 < asyncio.get_running_loop().time() - began < 6.5
        assert_alone(a, expected)
        b.train(2)
        expected = alone(b.replica)
        await b.rounds.finish()  # too late: it is refused at once and goes on alone, too
        await b.rounds.settle()
        assert asyncio.get_running_loop().time() - began < 7
        assert_alone(b, expected)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_broken_stream_costs_one_more_try() -> None:
    async def main() -> None:
        a, b = await two_ends()
        agree(a, b)
        real, broken = a.rpc.call, 0

        async def call(*args: Any, **named: Any) -> Any:
            nonlocal broken
            answer = await real(*args, **named)
            if broken < 2:
                broken += 1
                raise PeerUnreachable("the answer was lost")
            return answer

        a.rpc.call = call  # type: ignore[method-assign]
        a.train(1), b.train(2)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert torch.equal(a.pulls[-1], -b.pulls[-1])
        assert a.context.counters.partners == {b.me: 1}
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_piece_that_comes_again_after_the_end_is_answered_and_changes_nothing() -> None:
    async def main() -> None:
        a, b = await two_ends()
        await whole_round(a, b, 0)
        before = a.replica.snapshot()
        piece = encode(b.replica.phi[PIECE : 2 * PIECE], "fp32")
        message = Contribute(pair="pair 0", part="z", offset=PIECE, total=a.replica.parameters)
        await b.rpc.call(a.me, Traffic.GOSSIP, message, Done, [piece], deadline=5.0)
        assert torch.equal(a.replica.snapshot().phi, before.phi)
        for stranger in ("pair 1", "other"):
            with pytest.raises(Refused, match="unknown-pair"):
                await b.rpc.call(
                    a.me,
                    Traffic.GOSSIP,
                    message.model_copy(update={"pair": stranger}),
                    Done,
                    [piece],
                    deadline=5.0,
                )
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_after_a_download_the_partner_is_refused_and_the_round_ends_with_the_new_weights() -> None:
    async def main(overlap: str) -> None:
        a, b = await two_ends(outer__overlap=overlap)
        agree(a, b)
        await asyncio.sleep(5)
        a.train(1), b.train(2)
        if overlap == "late":
            await a.rounds.finish()
        await a.rounds.abandon()
        donor = Replica(a.replica.manifest, 0)
        donor.phi.mul_(1.5)
        pieces = {index: donor.read_piece(index, moments=True) for index in range(donor.pieces)}
        await a.context.compute.run(Priority.OPTIMIZER, a.replica.adopt, pieces, 9, 3)
        expected = alone(b.replica)
        began = asyncio.get_running_loop().time()
        await b.rounds.finish()
        await b.rounds.settle()
        assert asyncio.get_running_loop().time() - began < 1.0
        assert_alone(b, expected)
        a.train(4)
        expected = alone(a.replica)
        await a.rounds.finish()
        assert_alone(a, expected)
        assert a.replica.round == 4
        await asyncio.gather(a.close(), b.close())

    for overlap in OVERLAPS:
        run_swarm(main(overlap))


def damaged(damage: str, piece: torch.Tensor, total: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    message = {"pair": "pair", "part": "phi", "offset": PIECE, "total": total}
    tensors = [piece.clone()]
    if damage in ("nan", "inf"):
        tensors[0][5] = float(damage)
    changes: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {
        "short": ({}, [piece[:-1]]),
        "long": ({}, [torch.cat([piece, piece])]),
        "two": ({}, [piece, piece[:-1]]),
        "past the end": ({"offset": total // PIECE * PIECE}, [piece[: total % PIECE], piece]),
        "none": ({}, []),
        "shape": ({}, [piece.view(2, -1)]),
        "beside": ({"offset": PIECE + 1}, [piece]),
        "beyond": ({"offset": PIECE * 1000}, [piece]),
        "size": ({"total": total + 1}, [piece]),
        "part": ({"part": "z"}, [piece]),
    }
    update, tensors = changes.get(damage, ({}, tensors))
    return message | update, tensors


@pytest.mark.parametrize(
    "damage",
    [
        "nan",
        "inf",
        "short",
        "long",
        "two",
        "past the end",
        "none",
        "shape",
        "beside",
        "beyond",
        "size",
        "part",
    ],
)
def test_a_piece_that_does_not_fit_is_refused_and_nothing_of_it_is_kept(damage: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early")
        a.agree(b, "pair")
        fields, tensors = damaged(damage, b.replica.phi[PIECE : 2 * PIECE], a.replica.parameters)
        swap = a.rounds._exchange.of(Pair(b.me, "pair"))
        frame = SimpleNamespace(encoded=lambda: [encode(tensor, "fp32") for tensor in tensors])
        request = Request(b.me, Contribute(**fields), frame)  # type: ignore[arg-type]
        with pytest.raises(CodecError):
            await a.rounds.on_contribute(request)
        assert not swap.partners.has("phi", 1)
        assert swap.phi_sample is None
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


@pytest.mark.parametrize("codec", ["eden4", "eden2", "int32"])
def test_a_codec_that_is_not_for_gossip_is_refused_by_name_and_nothing_is_kept(codec: str) -> None:
    """The two of few bits are for activations and gradients: a mean over weights would lose too much."""

    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early")
        a.agree(b, "pair")
        phi = b.replica.phi[PIECE : 2 * PIECE]
        piece = encode(phi.to(torch.int32) if codec == "int32" else phi, codec)
        swap = a.rounds._exchange.of(Pair(b.me, "pair"))
        message = Contribute(pair="pair", part="phi", offset=PIECE, total=a.replica.parameters)
        with pytest.raises(CodecError, match=f"contributions do not travel in {codec}"):
            a.rounds._exchange.receive(swap, message, [piece])
        assert not swap.partners.has("phi", 1)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_weights_that_the_codec_cannot_carry_end_the_round_alone() -> None:
    """Numbers beyond float16 become infinite in it: the partner must not be told so, nor φ be made of it."""

    async def main(overlap: str) -> None:
        a, b = await two_ends(outer__overlap=overlap, wire__gossip="fp16", limits__gossip_deadline=5.0)
        agree(a, b)
        a.replica.flat.values[3] = 1e6
        a.replica.phi[3] = 1e6
        b.train(1)
        expected = alone(a.replica)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        await asyncio.gather(a.rounds.settle(), b.rounds.settle())
        assert torch.isfinite(a.replica.phi).all()
        assert torch.allclose(a.replica.phi, expected[0], rtol=1e-3, atol=1e-4)
        assert torch.isfinite(b.replica.phi).all()
        await asyncio.gather(a.close(), b.close())

    for overlap in OVERLAPS:
        run_swarm(main(overlap))


# --- what else is promised ----------------------------------------------------------------------


class Liar(Replica):
    """Tells its partners the opposite of its progress."""

    def offered_theta(self, bounds: slice) -> torch.Tensor:
        return 2 * self.phi[bounds] - self.flat.values[bounds]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_partners_are_told_is_made_in_one_place(overlap: str) -> None:
    async def main() -> None:
        a, b = await two_ends(kinds=(Replica, Liar), outer__overlap=overlap)
        phi = mean_phi(a, b)
        mine, theirs = await whole_round(a, b, 0)
        assert torch.allclose(mean_phi(a, b), phi + 0.7 * (mine - theirs) / 2, atol=1e-6)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_memory_is_taken_once_and_used_again(overlap: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap=overlap)
        for number in range(4):
            await whole_round(a, b, number)
        exchange = a.rounds._exchange
        assert len(exchange._buffers._free) == 1
        assert not exchange._swaps
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_the_next_rounds_contribution_may_come_before_this_round_has_ended() -> None:
    async def main() -> None:
        a, b = await two_ends()
        agree(a, b, "first")
        for end, other in ((a, b), (b, a)):
            end.rounds.matchmaker.agree_next(Pair(other.me, "second"))  # type: ignore[attr-defined]
        a.train(1), b.train(2)
        piece = encode(b.replica.phi[PIECE : 2 * PIECE], "fp32")
        message = Contribute(pair="second", part="z", offset=PIECE, total=a.replica.parameters)
        await b.rpc.call(a.me, Traffic.GOSSIP, message, Done, [piece], deadline=5.0)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert a.context.counters.partners == {b.me: 1}
        assert a.rounds._exchange.of(Pair(b.me, "second")).partners.has("z", 1)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())
