"""The donors of one download are about as far as each other; one that lies or started again is none of them."""

from __future__ import annotations

import pytest

from node.state.transfer import DonorProgress, RunLimits, adopted, follows, together
from protocol.ground import PeerId

LIMITS = RunLimits(most_steps=1_000, inner_steps=10)


def chosen(*rounds: int) -> list[int]:
    """The rounds of those that are taken."""
    told = {PeerId(f"peer {n:02}"): DonorProgress(10 * round_, round_) for n, round_ in enumerate(rounds)}
    return sorted(progress.round for progress in together(told).values())


@pytest.mark.parametrize(
    ("rounds", "taken"),
    [
        ((14, 0, 13, 14), [13, 14, 14]),
        ((14, 0), [14]),
        ((14, 13, 0, 1), [13, 14]),  # a half that started again
        ((14, 0, 1, 2, 0), [0, 0, 1, 2]),  # most did, or the one says what it likes
        ((2, 1, 10**6, 1), [1, 1, 2]),
        ((50, 20, 90, 10**6, 10**6), [90]),  # none of them near another
        ((0, 1, 0), [0, 0, 1]),
        ((14, 13, 10**6), [13, 14]),
        ((86, 18, 18, 17), [17, 18, 18]),
        ((18, 86), [86]),
        ((100, 120, 140, 90), [90, 100, 120, 140]),
        ((), []),
    ],
)
def test_the_largest_group_gives_and_of_two_the_one_that_is_further(
    rounds: tuple[int, ...], taken: list[int]
) -> None:
    assert chosen(*rounds) == taken


def test_a_replica_that_closed_has_more_rounds_than_steps_and_gives_its_state() -> None:
    closed = {PeerId(name): DonorProgress(step=5, round=9) for name in "ab"}
    assert together(closed) == closed
    assert LIMITS.allow(5, 9)
    assert adopted(list(closed.values()), LIMITS) == DonorProgress(5, 9)


def test_rounds_that_no_closing_makes_cannot_be() -> None:
    assert not together({PeerId("a"): DonorProgress(step=5, round=10_006)})
    assert not LIMITS.allow(5, 10_006)


def test_a_piece_must_follow_what_its_donor_told() -> None:
    told = DonorProgress(140, 14)
    assert follows(DonorProgress(140, 14), told, 0.0, LIMITS)
    assert follows(DonorProgress(165, 16), told, 1.0, LIMITS)
    assert follows(DonorProgress(136, 14), told, 1.0, LIMITS), "as it was saved earlier in the round"
    assert not follows(DonorProgress(80, 14), told, 1.0, LIMITS), "no round is so long"
    assert not follows(DonorProgress(130, 13), told, 1.0, LIMITS), "it started again"
    assert not follows(DonorProgress(0, 0), told, 100.0, LIMITS)
    assert not follows(DonorProgress(10**6, 10**5), told, 60.0, LIMITS)
    assert not follows(DonorProgress(10**6, 14), told, 1.0, LIMITS)


def test_the_median_of_the_donors_is_adopted_and_never_more_than_the_run_has() -> None:
    donors = [DonorProgress(140, 14), DonorProgress(150, 15), DonorProgress(2**62, 2**61)]
    assert adopted(donors, LIMITS) == DonorProgress(150, 15)
    assert adopted([DonorProgress(2**62, 2**61)], LIMITS) == DonorProgress(1_000, 11_000)
