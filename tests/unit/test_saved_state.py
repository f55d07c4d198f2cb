"""Whether a saved state is worth going on from is for most of the others to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.membership.view import View
from node.service.first_state import OLD_ROUNDS, FirstState
from protocol.ground import PeerId
from protocol.records.announcement import Announcement
from protocol.records.lineage import Lineage
from tests.swarm.micro import micro_manifest


def missed(*rounds: int) -> float:
    """Rounds that a replica saved at round 20 has missed after a day, when others are at these."""
    view, now = View(), 86_400.0
    for number, round_ in enumerate(rounds):
        said = Announcement(
            stage=0, state="serving", since=0.0, step=5 * round_, round=round_, tokens_per_second=1e3
        )
        view.update(PeerId(f"peer {number}"), said, now + 60.0)
    context: Any = SimpleNamespace(
        stage=0,
        me=PeerId("me"),
        view=view,
        manifest=micro_manifest(),
        transport=SimpleNamespace(now=lambda: now),
    )
    checkpoint: Any = SimpleNamespace(saved=1.0, state=SimpleNamespace(round=20, lineage=Lineage()))
    rest: Any = SimpleNamespace()
    return FirstState(context, rest, rest, rest, rest, rest, rest, "", begin_anew=False).rounds_missed(
        checkpoint
    )


@pytest.mark.parametrize("rounds", [(), (20,), (21, 10**6), (22, 21, 10**6), (19, 22, 10**6, 10**6)])
def test_a_few_that_claim_to_be_far_ahead_make_no_saved_state_old(rounds: tuple[int, ...]) -> None:
    assert missed(*rounds) < OLD_ROUNDS


@pytest.mark.parametrize("rounds", [(30,), (30, 31), (30, 5, 31)])
def test_most_do(rounds: tuple[int, ...]) -> None:
    assert missed(*rounds) >= OLD_ROUNDS
