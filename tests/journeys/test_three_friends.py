"""A pause, a move and a Ctrl-C in a run of three friends: what it has learnt is there afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.terminals import INNER_STEPS, LIFETIME, FriendsRun
from tests.patience import patience

WORSE = 0.1  # of a loss, at most
LAST = r"This node is the last that has the state of stage {} \(step [\d,]+\)"


@pytest.mark.timeout(patience(900))
def test_a_pause_a_move_and_a_ctrl_c_lose_nothing(tmp_path: Path) -> None:
    run = FriendsRun(tmp_path)
    a, b, c = run.three_friends()
    a.trains(100)
    before = a.loss()

    b.types("noloco node pause").sees("Paused")
    b.sees(LAST.format(1))
    a.presses_ctrl_c()
    left = a.saved(0)[0]
    a.types("noloco-node --stage 1").serves(1)
    a.trains()
    c.presses_ctrl_c().sees(LAST.format(0))
    a.presses_ctrl_c()
    b.types("noloco node resume").serves(1)
    a.types("noloco-node --stage 0")
    assert a.serves(0) >= left - INNER_STEPS
    a.trains()
    c.types("noloco-node").serves(0)
    c.meets()
    a.trains(100)

    assert run.beginnings() == [0, 1]  # each once, when the run began
    assert not run.happened("begun-anew", "yielded", "waiting-for-stage")
    assert a.loss() < before + WORSE
    run.everyone_leaves()
    assert a.saved(0)[1].is_same(c.saved(0)[1], LIFETIME)
    assert a.saved(0)[1].beginning == 0


@pytest.mark.timeout(patience(900))
def test_a_newcomer_waits_for_the_friend_who_has_the_stage_and_says_so(tmp_path: Path) -> None:
    run = FriendsRun(tmp_path, "--no-keep", stage_return=600.0)
    a, b, c = run.three_friends()
    holders = f"{a.peer[-8:]}|{c.peer[-8:]}"

    a.presses_ctrl_c().loses_the_disk()
    c.types_until("noloco node status", LAST.format(0))
    c.presses_ctrl_c().sees(LAST.format(0))
    left, lineage = c.saved(0)
    d = run.terminal("D").types(f"noloco-node {run.join} --stage 0")
    waiting = (
        rf"[sS]tage 0 was at step [\d,]+; …({holders}) had it (.+ ago|just now)\. "
        r"Waiting for it until .*\d\d:\d\d; begin anew with --begin-anew"
    )
    d.sees(waiting)
    run.seed.wait_for(r"joins\. " + waiting)
    b.types(f"noloco status --join {b.address}").sees(waiting)
    c.types("noloco-node").serves(0)
    assert d.serves(0) >= left - INNER_STEPS
    d.trains()

    assert run.beginnings() == [1]  # that of stage 0 was told to A's lost disk
    assert not run.happened("begun-anew", "yielded")
    run.everyone_leaves()
    assert d.saved(0)[1].is_same(lineage, LIFETIME)
