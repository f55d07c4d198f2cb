"""From two replicas a stage to one and back, in training all the while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.terminals import LIFETIME, FriendsRun
from tests.patience import patience

WORSE = 0.1  # of a loss, at most


@pytest.mark.timeout(patience(900))
def test_two_replicas_a_stage_become_one_and_two_again(tmp_path: Path) -> None:
    run = FriendsRun(tmp_path)
    a, b, c = run.three_friends()
    d = run.terminal("D").types(f"noloco-node {run.join} --stage 1").trains()
    d.meets()
    a.trains(100)
    before = a.loss()

    c.presses_ctrl_c()
    b.presses_ctrl_c()
    assert "This node is the last" not in c.shown + b.shown
    a.trains()
    d.trains()
    c.types("noloco-node").serves(0)
    b.types("noloco-node").serves(1)
    for friend in (a, b, c, d):
        friend.trains()
    for friend in (b, c):
        friend.meets()
    a.trains(100)

    a.presses_ctrl_c()  # and now the other one of each
    d.presses_ctrl_c()
    c.trains()
    a.types("noloco-node").serves(0)
    d.types("noloco-node").serves(1)
    for friend in (a, d):
        friend.meets()
    a.trains(100)

    assert run.beginnings() == [0, 1]  # each once, when the run began
    assert not run.happened("begun-anew", "yielded", "waiting-for-stage")
    assert a.loss() < before + WORSE
    run.everyone_leaves()
    for one, other, stage in ((a, c, 0), (b, d, 1)):
        assert one.saved(stage)[1].is_same(other.saved(stage)[1], LIFETIME)
