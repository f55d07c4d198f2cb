"""Stage choice: newcomers that see the same records spread evenly without talking to each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from node.places.stage_choice import choose_stage
from protocol.transport.base import PeerId

counts = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def newcomers_of(count: int, same_moment: bool) -> list[tuple[float, PeerId]]:
    return [(0.0 if same_moment else 0.1 * n, PeerId(f"peer {n:02}")) for n in range(count)]


@given(serving=counts, count=st.integers(1, 20), same_moment=st.booleans())
def test_newcomers_level_the_stages_as_far_as_they_can(
    serving: list[int], count: int, same_moment: bool
) -> None:
    replicas = dict(enumerate(serving))
    newcomers = newcomers_of(count, same_moment)
    chosen = Counter(choose_stage(len(serving), replicas, newcomers, me) for me in newcomers)
    assert chosen.total() == count
    after = [served + chosen[stage] for stage, served in enumerate(serving)]
    # nobody is where another stage would have needed it more
    assert all(not chosen[stage] or after[stage] <= min(after) + 1 for stage in range(len(serving)))


@given(serving=counts, count=st.integers(1, 10), data=st.data())
def test_the_order_in_which_records_are_read_does_not_matter(
    serving: list[int], count: int, data: Any
) -> None:
    newcomers = newcomers_of(count, same_moment=True)
    me = data.draw(st.sampled_from(newcomers))
    shuffled = data.draw(st.permutations(newcomers))
    replicas = dict(enumerate(serving))
    assert choose_stage(len(serving), replicas, shuffled, me) == choose_stage(
        len(serving), replicas, newcomers, me
    )


def test_a_newcomer_whose_own_record_is_not_there_yet_chooses_all_the_same() -> None:
    assert choose_stage(2, {0: 1}, [], (0.0, PeerId("me"))) == 1


def test_four_newcomers_to_an_empty_run_of_two_stages_take_two_each() -> None:
    newcomers = newcomers_of(4, same_moment=False)
    assert [choose_stage(2, {}, newcomers, me) for me in newcomers] == [0, 1, 0, 1]


def test_an_empty_stage_comes_first() -> None:
    assert choose_stage(3, {0: 5, 1: 1}, [], (0.0, PeerId("me"))) == 2
