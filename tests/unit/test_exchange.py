"""Two replicas exchange contributions and take the outer step: the same for the pair in every overlap and codec."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from node.model.replica import Replica
from node.rounds.exchanges import PIECES_PER_JOB
from node.rounds.meeting import Pair
from protocol.codecs.codec import encode
from protocol.messages.training import Contribute
from protocol.run.manifest import Manifest
from tests.swarm.micro import run_swarm
from tests.unit.test_device_transfer import EncodingTransfer
from tests.unit.two_ends import OVERLAPS, PIECE, agree, mean_delta, mean_phi, two_ends, whole_round

pytestmark = pytest.mark.usefixtures("small_pieces")

# --- the pair's mean -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("gossip", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("progress", ["fp32", "int8"])
def test_the_pairs_mean_of_phi_moves_as_the_formula_says(overlap: str, gossip: str, progress: str) -> None:
    """mean(φ) ← mean(φ) + α·mean(δ) + β·mean(Δ), whatever the codecs lose."""

    async def main() -> None:
        a, b = await two_ends(outer__overlap=overlap, wire__gossip=gossip, wire__progress=progress)
        settings, apart = a.replica.whole.settings, (a.replica.phi - b.replica.phi).norm()
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


class AtOnce(Replica):
    """Encodes and takes outer steps as on a GPU, uncompiled."""

    def __init__(self, manifest: Manifest, stage: int) -> None:
        super().__init__(manifest, stage)
        self.whole.steps_at_once = True


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("gossip", "progress"), [("fp32", "fp32"), ("int8", "bf16"), ("bf16", "int8")])
def test_a_step_in_one_launch_is_that_in_pieces(
    overlap: str, gossip: str, progress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a partner, and then alone."""
    monkeypatch.setattr("node.model.outer.fused_on", lambda _: None)
    monkeypatch.setattr("node.rounds.pull.PIECES_IN_A_COPY", 3)
    results: list[list[torch.Tensor]] = []

    async def main(kind: type[Replica]) -> None:
        wire: dict[str, Any] = {"wire__gossip": gossip, "wire__progress": progress}
        a, b = await two_ends(kinds=(kind, kind), outer__overlap=overlap, **wire)
        assert a.replica.whole.pieces > 2 * PIECES_PER_JOB
        await whole_round(a, b, 0)  # in a second one a last digit might be a step of int8
        a.train(7)
        a.replica.finish_round_alone(a.replica.whole)
        results.append([a.replica.phi, a.replica.delta, a.replica.flat.values, b.replica.phi])
        assert a.context.counters.spread is not None
        await asyncio.gather(a.close(), b.close())

    run_swarm(main(Replica))
    monkeypatch.setattr("node.rounds.exchanges.transfer_for", EncodingTransfer)
    run_swarm(main(AtOnce))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=2e-7)
        assert float(one.abs().max()) > 1e-3


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_without_memory_for_all_of_it_the_step_is_taken_in_pieces(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.model.outer.fused_on", lambda _: None)
    original, calls = torch.zeros_like, iter(range(10**6))

    def zeros_like(tensor: torch.Tensor, **given: Any) -> torch.Tensor:
        if given.get("device") is not None:
            next(calls)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(tensor, **given)

    results = []

    async def main(kind: type[Replica]) -> None:
        a, b = await two_ends(kinds=(kind, kind), outer__overlap=overlap, wire__gossip="int8")
        await whole_round(a, b, 0)
        results.append(a.replica.phi)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main(Replica))
    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    run_swarm(main(AtOnce))
    assert next(calls) == 4  # both sides tried twice
    assert torch.equal(*results)


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
    for mine, plain in zip(results["phi-early"], results["none"], strict=True):
        assert torch.allclose(mine[0], plain[0], atol=1e-6)
        assert torch.allclose(mine[1], plain[1], atol=1e-6)


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


# --- what else is promised -------------------------------------------------------------------------


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
        assert repr(a.averager.exchanges) == "<Exchanges, under way: 0, buffers free: 1>"
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_the_next_rounds_contribution_may_come_before_this_round_has_ended() -> None:
    async def main() -> None:
        a, b = await two_ends()
        agree(a, b, "first")
        for end, other in ((a, b), (b, a)):
            end.averager.matchmaker.agree_next(Pair(other.me, "second"))  # type: ignore[attr-defined]
        a.train(1), b.train(2)
        piece = encode(b.replica.phi[PIECE : 2 * PIECE], "fp32")
        message = Contribute(pair="second", part="z", offset=PIECE, total=a.replica.parameters)
        await b.rpc.call(a.me, message, [piece], deadline=5.0)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert a.context.counters.partners == {b.me: 1}
        assert a.averager.exchanges.of(Pair(b.me, "second")).incoming.has("z", 1)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_an_exchange_says_in_a_line_how_far_it_is() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early")
        partner, pieces = b.me[-8:], a.replica.whole.pieces
        assert repr(a.averager) == "<PairAverager, round 0: no partner, exchanges under way: 0>"
        agree(a, b)
        exchange = a.averager.exchanges.of(Pair(b.me, "pair"))
        assert repr(exchange) == (
            f"<PairExchange with …{partner}, pair pair: 0 of {2 * pieces} pieces sent, 0 received>"
        )
        await asyncio.sleep(5)  # φ has arrived
        assert repr(exchange) == (
            f"<PairExchange with …{partner}, pair pair: {pieces} of {2 * pieces} pieces sent, {pieces} received>"
        )
        assert repr(a.averager) == f"<PairAverager, round 0: with …{partner}, exchanges under way: 1>"
        a.train(1), b.train(2)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert repr(exchange).endswith(
            f"{2 * pieces} of {2 * pieces} pieces sent, {2 * pieces} received, over>"
        )
        assert repr(a.averager) == "<PairAverager, round 1: no partner, exchanges under way: 0>"
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())
