"""Exchanges that fail: partners that die, never come or send nonsense leave a round of one's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.model.compute import Priority
from node.model.replica import Replica
from node.rounds.meeting import Pair
from protocol.codecs.codec import encode
from protocol.errors import CodecError, PeerUnreachable, Refused
from protocol.messages.training import Contribute
from protocol.rpc.rpc import Request
from tests.copied_state import copied_state
from tests.swarm.micro import run_swarm
from tests.unit.two_ends import OVERLAPS, PIECE, agree, alone, assert_alone, two_ends, whole_round

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("progress", ["fp32", "int8"])
def test_a_partner_that_is_killed_leaves_an_update_of_ones_own(overlap: str, progress: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap=overlap, wire__progress=progress)
        agree(a, b)
        await asyncio.sleep(5)  # φ has arrived, where it goes early
        a.train(1), b.train(2)
        expected = alone(a.replica)
        a.transport.network.kill(b.me)
        await a.rounds.finish()
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
        assert 5.5 < asyncio.get_running_loop().time() - began < 6.5
        assert_alone(a, expected)
        b.train(2)
        expected = alone(b.replica)
        await b.rounds.finish()  # too late: it is refused at once and goes on alone, too
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
        before = copied_state(a.replica)
        piece = encode(b.replica.phi[PIECE : 2 * PIECE], "fp32")
        message = Contribute(pair="pair 0", part="z", offset=PIECE, total=a.replica.parameters)
        await b.rpc.call(a.me, message, [piece], deadline=5.0)
        assert torch.equal(copied_state(a.replica).phi, before.phi)
        for stranger in ("pair 1", "other"):
            with pytest.raises(Refused, match="unknown-pair"):
                await b.rpc.call(
                    a.me,
                    message.model_copy(update={"pair": stranger}),
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
        await a.rounds.abandon()
        donor = Replica(a.replica.manifest, 0)
        donor.phi.mul_(1.5)
        pieces = {index: donor.read_piece(index, moments=True) for index in range(donor.whole.pieces)}
        await a.context.compute.run(Priority.OPTIMIZER, a.replica.adopt, pieces, 9, 3)
        expected = alone(b.replica)
        began = asyncio.get_running_loop().time()
        await b.rounds.finish()
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
        exchange = a.averager.exchanges.of(Pair(b.me, "pair"))
        frame = SimpleNamespace(encoded=lambda: [encode(tensor, "fp32") for tensor in tensors])
        request = Request(b.me, Contribute(**fields), frame)  # type: ignore[arg-type]
        with pytest.raises(CodecError):
            await a.averager.on_contribute(request)
        assert not exchange.incoming.has("phi", 1)
        assert exchange.phi_sample is None
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
        exchange = a.averager.exchanges.of(Pair(b.me, "pair"))
        message = Contribute(pair="pair", part="phi", offset=PIECE, total=a.replica.parameters)
        with pytest.raises(CodecError, match=f"contributions do not travel in {codec}"):
            a.averager.exchanges.receive(exchange, message, [piece])
        assert not exchange.incoming.has("phi", 1)
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
        assert torch.isfinite(a.replica.phi).all()
        assert torch.allclose(a.replica.phi, expected[0], rtol=1e-3, atol=1e-4)
        assert torch.isfinite(b.replica.phi).all()
        await asyncio.gather(a.close(), b.close())

    for overlap in OVERLAPS:
        run_swarm(main(overlap))
