"""Stage choice: newcomers that see the same records spread evenly without talking to each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from node.membership.capacity import Peer, peer_of, surveyed
from node.membership.stage_choice import Arrival, better_stage, choose_stage
from node.membership.view import Member
from protocol.ground import PeerId
from protocol.records.announcement import Announcement

counts = st.lists(st.integers(0, 6), min_size=1, max_size=6)
ME = PeerId("me")


def newcomers_of(count: int, same_moment: bool) -> list[Arrival]:
    return [(0.0 if same_moment else 0.1 * n, PeerId(f"peer {n:02}")) for n in range(count)]


def replicas(counts: list[int], capacities: list[float | None] | None = None) -> list[Peer]:
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    known = capacities or [None] * len(counts)
    return [Peer(PeerId(f"old {n:02}"), stage, known[stage]) for n, stage in enumerate(stages)]


def chosen(counts: list[int], newcomers: list[Arrival], me: Arrival, **more: Any) -> int:
    stages = len(counts)
    capacities = more.pop("capacities", None)
    return choose_stage(
        replicas(counts, capacities),
        [1.0] * stages,
        newcomers,
        me,
        more.pop("may_serve", range(stages)),
        **more,
    )


@given(serving=counts, count=st.integers(1, 20), same_moment=st.booleans())
def test_newcomers_level_the_stages_as_far_as_they_can(
    serving: list[int], count: int, same_moment: bool
) -> None:
    newcomers = newcomers_of(count, same_moment)
    taken = Counter(chosen(serving, newcomers, me) for me in newcomers)
    assert taken.total() == count
    after = [served + taken[stage] for stage, served in enumerate(serving)]
    # nobody is where another stage would have needed it more
    assert all(not taken[stage] or after[stage] <= min(after) + 1 for stage in range(len(serving)))


@given(serving=counts, count=st.integers(1, 10), data=st.data())
def test_the_order_in_which_records_are_read_does_not_matter(
    serving: list[int], count: int, data: Any
) -> None:
    newcomers = newcomers_of(count, same_moment=True)
    me = data.draw(st.sampled_from(newcomers))
    shuffled = data.draw(st.permutations(newcomers))
    assert chosen(serving, shuffled, me) == chosen(serving, newcomers, me)


def test_a_newcomer_whose_own_record_is_not_there_yet_chooses_all_the_same() -> None:
    assert chosen([1, 0], [], (0.0, ME)) == 1


def test_four_newcomers_to_an_empty_run_of_two_stages_take_two_each() -> None:
    newcomers = newcomers_of(4, same_moment=False)
    assert [chosen([0, 0], newcomers, me) for me in newcomers] == [0, 1, 0, 1]


def test_an_empty_stage_comes_first() -> None:
    assert chosen([5, 1, 0], [], (0.0, ME)) == 2


def test_two_slow_replicas_need_help_more_than_one_fast_one() -> None:
    assert chosen([1, 2], [], (0.0, ME), capacities=[10.0, 2.0]) == 1


def test_a_stage_whose_microbatches_cost_more_needs_more_replicas() -> None:
    assert choose_stage(replicas([2, 2]), [1.0, 2.0], [], (0.0, ME), range(2)) == 1


def test_only_a_stage_that_fits_is_taken() -> None:
    assert chosen([5, 1, 3], [], (0.0, ME), may_serve=[0, 2]) == 2


def test_among_equally_poor_stages_the_links_decide_but_never_against_need() -> None:
    assert chosen([2, 2, 2], [], (0.0, ME), excess={0: 0.5, 1: -0.2, 2: 0.1}) == 1
    assert chosen([2, 2, 1], [], (0.0, ME), excess={0: 0.5, 1: -0.2, 2: 0.1}) == 2


# --- after the claim --------------------------------------------------------------------------


def claims(*stages: int) -> list[Peer]:
    return [
        Peer(PeerId(f"new {n}"), stage, since=float(n), is_serving=False) for n, stage in enumerate(stages)
    ]


@given(stages=st.lists(st.integers(0, 3), min_size=1, max_size=12), data=st.data())
def test_newcomers_that_met_at_a_stage_part_until_all_stages_are_level(stages: list[int], data: Any) -> None:
    """Whatever they chose at first, and in whatever order they look again."""
    peers = {p.peer: p for p in claims(*stages)}
    now = 100.0
    for _ in range(50):
        order = data.draw(st.permutations(sorted(peers)), label="order") if now < 103 else sorted(peers)
        moved = False
        for peer in order:
            better = better_stage(list(peers.values()), [1.0] * 4, peer, range(4))
            if better is not None:
                now += 1.0
                peers[peer] = Peer(peer, better, since=now, is_serving=False)
                moved = True
        if not moved:
            break
    level = Counter(p.stage for p in peers.values())
    assert max(level.values()) - min(level[s] for s in range(4)) <= 1


def test_of_those_that_met_the_last_one_goes() -> None:
    peers = claims(0, 0)
    assert better_stage(peers, [1.0, 1.0], PeerId("new 0"), range(2)) is None
    assert better_stage(peers, [1.0, 1.0], PeerId("new 1"), range(2)) == 1
    assert better_stage(peers, [1.0, 1.0], PeerId("new 0"), range(2), is_last_word=True) == 1


def test_who_came_for_the_links_stays_while_its_stage_is_as_poor_as_any() -> None:
    peers = [*replicas([15, 14]), Peer(ME, 0, since=1.0, is_serving=False)]
    assert better_stage(peers, [1.0, 1.0], ME, range(2), by_links=True) is None
    assert better_stage(peers, [1.0, 1.0], ME, range(2)) == 1


# --- records that lie -------------------------------------------------------------------------


def announced(stage: int, address: str, capacity: float | None = 1.0) -> Announcement:
    return Announcement(stage=stage, state="serving", since=0.0, capacity=capacity, addresses=[address])


def all_choose(members: list[Member], count: int = 10) -> Counter[int]:
    newcomers = newcomers_of(count, same_moment=False)
    return Counter(
        choose_stage(surveyed(map(peer_of, members)), [1.0] * 2, newcomers, me, range(2)) for me in newcomers
    )


def test_a_forged_capacity_does_not_send_everybody_to_the_other_stage() -> None:
    """Failed before: ten newcomers of ten chose the same one."""
    honest = [Member(PeerId(f"m{n}"), announced(n % 2, f"/ip4/9.9.{n}.1/tcp/4000"), 10.0) for n in range(10)]
    liar = Member(PeerId("liar"), announced(0, "/ip4/9.8.1.1/tcp/4000", capacity=1e9), 10.0)
    taken = all_choose([*honest, liar])
    print(f"of ten newcomers {taken[0]} went to the liar's stage and {taken[1]} to the other")
    assert taken[0] >= 3


def test_five_hundred_identities_of_one_network_do_not_send_everybody_to_the_other_stage() -> None:
    honest = [Member(PeerId(f"m{n}"), announced(n % 2, f"/ip4/9.9.{n}.1/tcp/4000"), 10.0) for n in range(20)]
    sybils = [
        Member(PeerId(f"s{n}"), announced(0, f"/ip4/9.8.7.{n % 250}/tcp/4000"), 10.0) for n in range(500)
    ]
    taken = all_choose([*honest, *sybils])
    print(f"of ten newcomers {taken[0]} went to the stage that the 500 claim and {taken[1]} to the other")
    assert taken[0] >= 3


def test_replicas_that_are_all_of_one_network_count_for_what_they_are() -> None:
    here = [
        Member(PeerId(f"m{n}"), announced(n % 2, f"/ip4/127.0.0.1/tcp/{4000 + n}"), 10.0) for n in range(9)
    ]
    assert {p.share for p in surveyed(map(peer_of, here))} == {1.0}
