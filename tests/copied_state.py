"""A copy of a replica's state for tests, at once; beside training its `snapshots` make copies."""

from __future__ import annotations

from node.model.flat import StageState
from node.model.replica import Replica


def copied_state(replica: Replica) -> StageState:
    """Return a copy of the state on the host, which later steps leave as it is."""
    live = replica.state()
    return live.holding({name: tensor.to("cpu", copy=True) for name, tensor in live.tensors().items()})
