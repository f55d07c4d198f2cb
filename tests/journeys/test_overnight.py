"""Everything is closed in the evening, and opened in the other order without the founder's machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.journeys.terminals import INNER_STEPS, LIFETIME, FriendsRun
from tests.patience import patience

WORSE = 0.1  # of a loss, at most


@pytest.mark.timeout(patience(900))
def test_closed_overnight_and_opened_in_the_other_order_without_the_seed(tmp_path: Path) -> None:
    run = FriendsRun(tmp_path)
    a, b, c = run.three_friends()
    a.trains(100)
    before = a.loss()

    for friend in (a, b, c):
        friend.presses_ctrl_c()
    saved = {friend.name: friend.saved(stage) for friend, stage in ((a, 0), (b, 1), (c, 0))}
    assert run.seed.leave() == 0
    shutil.rmtree(run.place / "run")

    c.types("noloco-node").sees("None of the known peers answers. This node goes on with its saved state")
    assert c.serves(0) >= saved["C"][0] - INNER_STEPS
    b.types("noloco-node")
    assert b.serves(1) >= saved["B"][0] - INNER_STEPS
    a.types("noloco-node").serves(0)
    for friend in (a, b, c):
        friend.trains()
    a.meets()
    d = run.terminal("D").types(f"noloco-node --join {b.address}")
    d.sees("Serving stage")
    d.trains()
    a.trains(100)

    assert run.beginnings() == [0, 1]  # each once, when the run began
    assert not run.happened("begun-anew", "yielded", "waiting-for-stage")
    assert a.loss() < before + WORSE
    run.everyone_leaves()
    for friend, stage in ((a, 0), (b, 1), (c, 0)):
        assert friend.saved(stage)[1].is_same(saved[friend.name][1], LIFETIME)
