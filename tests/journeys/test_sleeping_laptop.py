"""A laptop sleeps past every deadline, and wakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.terminals import LIFETIME, FriendsRun
from tests.patience import patience

WORSE = 0.1  # of a loss, at most


@pytest.mark.timeout(patience(900))
@pytest.mark.parametrize("sleeper", ["B", "C"])
def test_a_laptop_that_slept_goes_on_where_the_run_is(sleeper: str, tmp_path: Path) -> None:
    """B is alone at its stage: the others wait for it. C has another beside it, which goes on meanwhile."""
    run = FriendsRun(tmp_path, "--no-keep", stage_return=600.0)
    a, b, c = run.three_friends()
    a.trains(100)
    before = a.loss()
    asleep = run.terminal(sleeper)

    asleep.closes_the_lid()
    run.seed.wait_for(rf"…{asleep.peer[-8:]} has left stage")
    if asleep is c:
        a.trains(50)
    asleep.opens_the_lid()
    for friend in (a, b, c):
        friend.trains()
    c.meets()
    a.trains(100)

    assert run.beginnings() == [0, 1]  # each once, when the run began
    assert not run.happened("begun-anew", "yielded")
    assert a.loss() < before + WORSE
    run.everyone_leaves()
    assert a.saved(0)[1].is_same(c.saved(0)[1], LIFETIME)
