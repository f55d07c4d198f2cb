"""Contributions modulo a few bits: near replicas average as with any codec, far ones leave each other as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from node.model.fragment import PIECES_AT_ONCE, Fragment, Weights
from node.model.outer import OuterSettings
from node.model.replica import Replica
from node.model.transfer import DeviceTransfer
from node.rounds.contribution import OutgoingUpdate, sampled
from node.rounds.exchanges import Exchanges
from node.rounds.meeting import Pair
from node.rounds.nearness import Nearness
from protocol.codecs.codec import Encoded, encode
from protocol.codecs.kernels import BLOCK
from protocol.codecs.near_codecs import BITS, kept_apart
from protocol.errors import CodecError
from protocol.run.manifest import Wire
from tests.far_device import far_device
from tests.swarm.micro import run_swarm
from tests.unit.test_device_transfer import EncodingTransfer
from tests.unit.test_exchange import AtOnce
from tests.unit.two_ends import PIECE, End, mean_delta, mean_phi, two_ends, whole_round

pytestmark = pytest.mark.usefixtures("small_pieces")

CODECS = list(BITS)


async def near_ends(codec: str, **more: Any) -> tuple[End, End]:
    alpha = 0.0 if codec == "mod2" else 0.5  # what the manifest allows
    return await two_ends(wire__gossip=codec, outer__alpha=alpha, **more)


def sent_codecs(end: End, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the end sends of its z from now on, in order."""
    codecs: list[str] = []
    of = end.averager.exchanges.of

    def noting(pair: Any) -> Any:
        exchange = of(pair)
        kept, original = exchange.outgoing, exchange.outgoing.encode
        if not hasattr(kept, "noted"):
            kept.noted = True  # type: ignore[attr-defined]

            def encode(part: Any, indices: Any) -> list[list[Encoded]]:
                made = original(part, indices)
                codecs.extend(piece[0].codec for piece in made)
                return made

            kept.encode = encode  # type: ignore[method-assign]
        return exchange

    monkeypatch.setattr(end.averager.exchanges, "of", noting)
    return codecs


@pytest.mark.parametrize("codec", CODECS)
def test_the_pairs_mean_of_phi_moves_as_the_formula_says(codec: str) -> None:
    """mean(φ) ← mean(φ) + α·mean(δ) + β·mean(Δ), whatever could be read."""

    async def main() -> None:
        a, b = await near_ends(codec)
        settings, apart = a.replica.whole.settings, (a.replica.phi - b.replica.phi).norm()
        for number in range(6):
            phi, delta = mean_phi(a, b), mean_delta(a, b)
            moved = await whole_round(a, b, number)
            expected = phi + settings.alpha * delta + settings.beta * (moved[0] + moved[1]) / 2
            assert torch.allclose(mean_phi(a, b), expected, atol=1e-6)
            assert torch.allclose(a.pulls[-1], -b.pulls[-1], atol=1e-6)
        # of the noise that this progress is, what rounding puts back stays: ρ² of its square, and the momentum's
        assert (a.replica.phi - b.replica.phi).norm() < {4: 0.4, 3: 0.7, 2: 1.6}[BITS[codec]] * apart
        assert [event["partner"] for event in a.events if event["event"] == "round"] == [b.me] * 6
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_the_first_exchange_is_in_int8_and_the_next_ones_modulo(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        a, b = await near_ends("mod3")
        codecs = sent_codecs(a, monkeypatch)
        for number in range(3):
            await whole_round(a, b, number)
        pieces = a.replica.whole.pieces
        assert codecs == ["int8"] * pieces + ["mod3"] * 2 * pieces
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def moved_far(end: End) -> None:
    """As by a partition: to other weights, where training goes on."""
    far = torch.randn(end.replica.parameters, generator=torch.Generator().manual_seed(4)) * 10
    for tensor in (end.replica.phi, end.replica.flat.values):
        tensor.add_(far)


def test_who_is_far_away_is_read_by_what_the_sample_of_its_weights_shows() -> None:
    async def main() -> None:
        a, b = await near_ends("mod3")
        for number in range(2):
            await whole_round(a, b, number)
        moved_far(b)
        before = (a.replica.phi - b.replica.phi).norm()
        await whole_round(a, b, 2)
        assert torch.allclose(a.pulls[-1], -b.pulls[-1], atol=1e-4)
        assert a.pulls[-1].norm() > 0.3 * before
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_who_is_far_without_a_sample_is_left_as_it_is_and_met_in_int8_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither is pulled by what it cannot read, and the round after that reads all."""

    async def lost(*_: Any) -> None:
        pass

    async def main() -> None:
        a, b = await near_ends("mod3")
        codecs = sent_codecs(a, monkeypatch)
        for number in range(2):
            await whole_round(a, b, number)
        moved_far(b)
        before = (a.replica.phi - b.replica.phi).norm()
        monkeypatch.setattr(Exchanges, "_send_sample", lost)
        await whole_round(a, b, 2)
        assert not a.pulls[-1].any()
        assert not b.pulls[-1].any()
        await whole_round(a, b, 3)
        assert a.pulls[-1].norm() > 0.3 * before
        assert codecs[-a.replica.whole.pieces :] == ["int8"] * a.replica.whole.pieces
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_block_that_one_replica_alone_has_moved_is_read_all_the_same() -> None:
    """Read beside what this replica was at the beginning of the round, the partner's is near."""

    async def main() -> None:
        a, b = await near_ends("mod3")
        for number in range(3):
            await whole_round(a, b, number)
        a.replica.flat.values[:BLOCK].add_(torch.linspace(-3, 3, BLOCK))
        before = (a.replica.phi - b.replica.phi)[:BLOCK].norm()
        await whole_round(a, b, 3)
        assert a.pulls[-1][:BLOCK].norm() > 0.5 * a.replica.whole.settings.beta * before
        assert torch.allclose(a.pulls[-1], -b.pulls[-1], atol=1e-5)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_step_in_one_launch_is_that_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.model.outer.fused_on", lambda _: None)
    results: list[torch.Tensor] = []

    async def main(kind: type[Replica]) -> None:
        a, b = await near_ends("mod3", kinds=(kind, kind))
        for number in range(2):
            await whole_round(a, b, number)
        results.append(a.replica.phi)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main(Replica))
    monkeypatch.setattr("node.rounds.exchanges.transfer_for", EncodingTransfer)
    run_swarm(main(AtOnce))
    one, other = results
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_the_partner_that_never_says_what_it_read_leaves_a_round_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        a, b = await near_ends("mod3", limits__gossip_deadline=2.0)
        await whole_round(a, b, 0)
        monkeypatch.setattr(b.averager.exchanges, "_read", lambda *_: asyncio.sleep(60))
        await whole_round(a, b, 1)
        partners = [event["partner"] for event in a.events if event["event"] == "round"]
        assert partners == [b.me, None]
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_bits_of_another_size_are_refused() -> None:
    async def main() -> None:
        a, b = await near_ends("mod3")
        await whole_round(a, b, 0)
        a.agree(b, "next")
        exchange = a.averager.exchanges.of(Pair(b.me, "next"))
        for tensors in (
            [],
            [encode(torch.zeros(3, dtype=torch.int32), "int32")],
            [encode(torch.zeros(40), "fp32")],
        ):
            with pytest.raises(CodecError):
                a.averager.exchanges.receive_unread(exchange, tensors)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_encoding_on_another_device_waits_twice_for_each_group_of_pieces() -> None:
    """For how far the own weights have moved and for the bytes; and once for how far the partner is."""
    generator = torch.Generator().manual_seed(3)
    theta, phi, partners = (1e-2 * torch.randn(20 * PIECE, generator=generator) for _ in range(3))
    settings = OuterSettings(0.5, 0.7, 0.7, kept_apart("mod3"))

    def outgoing(theta: torch.Tensor, phi: torch.Tensor) -> tuple[OutgoingUpdate, Fragment]:
        weights = Weights(theta, phi, torch.zeros_like(phi))
        own = Fragment(weights, slice(0, len(partners)), [], theta.__getitem__, settings)
        nearness = Nearness(own.parameters)
        blocks = 20 * PIECE // BLOCK
        nearness.met(torch.full((blocks,), 0.01), torch.zeros(blocks), *torch.zeros(2, blocks).bool())
        transfer = DeviceTransfer(torch.device("cpu"))
        update = OutgoingUpdate(own, {"z": 1.0}, Wire(gossip="mod3"), transfer, nearness, "pair")
        update.partners_phi = sampled(partners)
        return update, own

    (here, own) = outgoing(theta, phi)
    expected = here.encode("z", own.all_pieces)
    assert len(expected) > PIECES_AT_ONCE
    with far_device() as device:
        there, own = outgoing(device.holding(theta), device.holding(phi))
        found = there.encode("z", own.all_pieces)
        assert device.waits == 1 + 2 * -(-20 // PIECES_AT_ONCE)
    bytes_of = [b"".join(each.buffers) for piece in found for each in piece]
    same = sum(one == b"".join(each.buffers) for one, [each] in zip(bytes_of, expected, strict=True))
    assert same >= 0.8 * len(expected)  # one value half way between two points makes a piece another
