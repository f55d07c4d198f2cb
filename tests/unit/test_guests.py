"""Nodes of others in a swarm of `noloco swarm`: they are not waited for."""

from __future__ import annotations

import pytest

from bootstrap.local.swarm import have_finished
from protocol.announcement import State
from protocol.messages.peers import NodeStats


def at(stage: int, state: State = "finished") -> NodeStats:
    return NodeStats(stage=stage, state=state, step=9, round=1, loss=None, tokens_per_second=0.0)


@pytest.mark.parametrize(
    ("own", "guests", "finished"),
    [
        ([at(0), at(1)], [], True),
        ([at(0), at(1, "serving")], [], False),
        ([at(0, "serving"), at(1)], [], False),
        ([at(0), at(1)], [at(1, "serving")], True),
        ([at(0), at(1, "serving")], [at(1, "serving")], False),
        ([at(0), at(1, "serving")], [at(0, "serving")], True),  # the second stage works for the guest
        ([at(0, "serving"), at(1, "serving")], [at(0)], False),
    ],
)
def test_the_end_is_that_of_ones_own_nodes(
    own: list[NodeStats], guests: list[NodeStats], finished: bool
) -> None:
    assert have_finished(own, guests) is finished
