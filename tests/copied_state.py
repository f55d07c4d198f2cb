"""A copy of a replica's state for tests, at once; beside training its `snapshots` make copies."""

from __future__ import annotations

from node.model.replica import Replica
from node.storage.stage_state import StageState


def copied_state(replica: Replica) -> StageState:
    """Return a copy of the state on the host, which later steps leave as it is."""
    live = replica.state()
    return live.holding({name: tensor.to("cpu", copy=True) for name, tensor in live.tensors().items()})
