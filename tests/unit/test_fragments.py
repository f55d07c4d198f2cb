"""Rounds that average a fragment of the parameters: what moves, what stays, whose turn it is."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from bootstrap.lab.in_memory.memory_link import Link
from node.membership.view import View
from node.model.fragment import fragments_of
from node.model.replica import Replica
from node.rounds import exchanges
from node.rounds.meeting import FragmentOrder, fragment_named
from node.rounds.round_statistics import SETTLED_ROUND
from protocol.codecs.kernels import BLOCK
from tests.swarm.micro import micro_manifest, run_swarm
from tests.unit.two_ends import Agreed, End, agree, mean_phi, two_ends, whole_round

FRAGMENTS = 3
MEAN: dict[str, Any] = {"outer__alpha": 0.0, "outer__beta": 1.0, "outer__gamma": 1.0}


async def two_with_fragments(**settings: Any) -> tuple[End, End]:
    return await two_ends(outer__fragments=FRAGMENTS, **MEAN | settings)


def round_of(fragment: int | None, fragments: int = FRAGMENTS) -> int:
    """A number of a round whose pair averages this fragment; None is all of them."""
    numbers = range(1_000)
    return next(n for n in numbers if fragment_named(f"pair {n}", fragments) == fragment)


@pytest.mark.parametrize("gossip", ["fp32", "int8", "mod3"])
@pytest.mark.parametrize("fragment", range(FRAGMENTS))
def test_a_round_moves_its_fragment_and_leaves_the_others(fragment: int, gossip: str) -> None:
    async def main() -> None:
        a, b = await two_with_fragments(wire__gossip=gossip)
        bounds = a.replica.fragments[fragment].bounds
        others = torch.ones(a.replica.parameters, dtype=torch.bool)
        others[bounds] = False
        before = mean_phi(a, b)
        kept = [end.replica.phi.clone() for end in (a, b)]
        mine, theirs = await whole_round(a, b, round_of(fragment))
        moved = before + (mine + theirs) / 2
        assert torch.allclose(mean_phi(a, b)[bounds], moved[bounds], atol=1e-6)
        for end, phi, progress in zip((a, b), kept, (mine, theirs), strict=True):
            assert torch.equal(end.replica.flat.values[bounds], end.replica.phi[bounds])
            assert torch.equal(end.replica.phi[others], phi[others])
            assert torch.equal(end.replica.flat.values[others], (phi + progress)[others])
        if gossip == "fp32":
            assert torch.allclose(a.replica.phi[bounds], b.replica.phi[bounds], atol=1e-6)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_what_a_fragment_gained_since_it_was_averaged_last_counts_in_its_turn() -> None:
    async def main() -> None:
        a, b = await two_with_fragments()
        before = mean_phi(a, b)
        gained = torch.zeros_like(before)
        for fragment in range(FRAGMENTS):
            gained += sum(await whole_round(a, b, round_of(fragment))) / 2
        last = a.replica.fragments[-1].bounds
        assert torch.allclose(mean_phi(a, b)[last], (before + gained)[last], atol=1e-6)
        assert a.replica.round == b.replica.round == FRAGMENTS
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_round_of_all_fragments_makes_the_two_one() -> None:
    async def main() -> None:
        a, b = await two_with_fragments()
        await whole_round(a, b, round_of(1))
        await whole_round(a, b, round_of(None))
        assert torch.allclose(a.replica.phi, b.replica.phi, atol=1e-6)
        assert torch.equal(a.replica.phi, a.replica.flat.values)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_round_of_a_fragment_sends_its_part_of_the_bytes() -> None:
    async def main() -> None:
        a, b = await two_with_fragments()
        await whole_round(a, b, round_of(0))
        one = a.context.counters.gossip_bytes
        await whole_round(a, b, round_of(None))
        all_of_it = a.context.counters.gossip_bytes - one
        assert one / all_of_it == pytest.approx(1 / FRAGMENTS, rel=0.15)  # beside a sample of φ
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_alone_and_at_the_end_all_of_phi_is_theta() -> None:
    replica = Replica(micro_manifest(outer__fragments=FRAGMENTS, **MEAN), 0)
    for end in (partial(replica.finish_round_alone, replica.whole), replica.settle):
        replica.flat.values.add_(0.01)
        end()
        assert torch.equal(replica.phi, replica.flat.values)
    assert replica.round == 2  # what was given of φ before is of another round


def test_what_is_given_after_the_end_is_no_copy_of_before_it() -> None:
    replica = Replica(micro_manifest(outer__fragments=FRAGMENTS, **MEAN), 0)
    replica.flat.values.add_(0.01)
    replica.snapshots.begin(replica.snapshots.room())
    while not replica.snapshots.advance(1.0, lambda: 0.0):
        pass
    replica.snapshots.keep(replica.snapshots.landed())
    assert replica.read_saved_piece(0) is not None
    replica.settle()
    assert replica.read_saved_piece(0) is None


def test_all_fragments_at_once_may_take_longer_than_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "LEAST_DEADLINE", 1.0)
    many = 16

    async def main() -> None:
        settings: dict[str, Any] = {
            "outer__fragments": many,
            "wire__gossip": "fp32",
            "limits__gossip_deadline": 60.0,
        }
        a, b = await two_ends(Link(latency=0.01, bandwidth=10_000), **MEAN | settings)
        for number in range(12):
            if fragment_named(f"pair {number}", many) is not None:
                await whole_round(a, b, number)
        await whole_round(a, b, round_of(None, many))
        partners = [event["partner"] for event in a.events if event["event"] == "round"]
        assert [partner == b.me for partner in partners] == [True] * len(partners)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


@pytest.mark.parametrize("of", [0, 2])
def test_a_pair_that_came_to_nothing_has_had_its_turn(of: int) -> None:
    async def main() -> None:
        a, b = await two_with_fragments()
        agree(a, b, f"pair {round_of(of)}")
        a.averager.matchmaker.next_fragment = 1  # type: ignore[misc]
        before, progress = a.replica.phi.clone(), a.train(1)
        a.averager.exchanges.end_all()
        await a.rounds.finish()
        bounds = a.replica.fragments[of].bounds
        assert torch.allclose(a.replica.phi[bounds], (before + progress)[bounds], atol=1e-6)
        bounds = a.replica.fragments[1].bounds
        assert torch.equal(a.replica.phi[bounds], before[bounds])
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_fragment_that_is_first_averaged_late_began_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "replicas", lambda *_: 4.0)

    async def main() -> None:
        a, b = await two_with_fragments()
        for end in (a, b):
            end.replica.round = SETTLED_ROUND + 1  # of which each fragment had a third
        await whole_round(a, b, round_of(0))
        late = a.context.counters.expected_spread
        await asyncio.gather(a.close(), b.close())
        a, b = await two_with_fragments()
        await whole_round(a, b, round_of(0))
        assert late == a.context.counters.expected_spread is not None
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_stage_of_one_block_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.model.fragment.BLOCK", 2**20)
    replica = Replica(micro_manifest(outer__fragments=FRAGMENTS, **MEAN), 0)
    assert replica.fragments == [replica.whole]


def test_a_pair_of_all_is_judged_by_what_is_known_of_each_fragment() -> None:
    """Otherwise a replica that asks for such pairs would be compared with other replicas that ask for them alone."""

    async def main() -> None:
        a, b = await two_with_fragments(outer__clip=1.5)
        for fragment in range(FRAGMENTS):
            await whole_round(a, b, round_of(fragment))
        before = a.replica.phi.clone()
        agree(a, b, f"pair {round_of(None)}")
        await asyncio.sleep(0.5)
        mine = a.train(50)
        b.train(51, scale=10.0)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert a.context.counters.partners == {b.me: FRAGMENTS + 1}
        assert [event["fraction"] for event in a.events if event["event"] == "clipped"][-1] == 1.0
        assert (a.replica.phi - before).norm() < 3 * FRAGMENTS * mine.norm()  # Δ of all rounds so far
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


# --- which one -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "count"), [(10_000, 3), (10_000, 64), (BLOCK, 4), (5, 2), (5 * BLOCK, 4)]
)
def test_fragments_are_whole_blocks_and_all_of_the_parameters(parameters: int, count: int) -> None:
    bounds = fragments_of(parameters, count)
    assert 1 <= len(bounds) <= count
    assert bounds[0].start == 0
    assert bounds[-1].stop == parameters
    assert all(one.stop == other.start for one, other in pairwise(bounds))
    assert all(one.start % BLOCK == 0 and one.stop > one.start for one in bounds)


def test_the_one_whose_turn_was_longest_ago_is_next_whoever_proposed() -> None:
    order, rng = FragmentOrder(FRAGMENTS), random.Random(1)
    for _ in range(3):
        turns = []
        for _ in range(FRAGMENTS):
            name = order.name(rng, is_of_all=False)
            turns.append(fragment_named(name, FRAGMENTS))
            order.round_ended(name)
        assert sorted(turns) == list(range(FRAGMENTS))  # type: ignore[type-var]
    others = FragmentOrder(FRAGMENTS).name(rng, is_of_all=False)
    order.round_ended(others)
    assert fragment_named(order.name(rng, is_of_all=False), FRAGMENTS) == 1
    assert fragment_named(order.name(rng, is_of_all=True), FRAGMENTS) is None


def test_a_round_alone_is_of_the_next_fragment_and_leaves_the_others() -> None:
    async def main() -> None:
        a, b = await two_with_fragments()
        before = a.replica.phi.clone()
        progress = a.train(1)
        a.averager.matchmaker = Agreed(None, a.averager.agreed, 0)  # type: ignore[assignment]
        await a.rounds.finish()
        first = a.replica.fragments[0].bounds
        assert torch.allclose(a.replica.phi[first], (before + progress)[first], atol=1e-6)
        assert torch.equal(a.replica.phi[first.stop :], before[first.stop :])
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())
    order = FragmentOrder(FRAGMENTS)
    turns = [order.next]
    for _ in range(FRAGMENTS):
        order.round_ended(None)
        turns.append(order.next)
    assert turns == [0, 1, 2, 0]


def test_without_fragments_every_name_is_of_all() -> None:
    rng = random.Random(2)
    order = FragmentOrder(1)
    names = {order.name(rng, is_of_all=last) for last in (True, False)}
    assert [fragment_named(name, 1) for name in names] == [None, None]
    assert len(Replica(micro_manifest(), 0).fragments) == 1
