"""A replica that was measured by a dry run before it serves, as a daemon's is; on a device with room for anything."""

from __future__ import annotations

import torch

from node.machine.limits import Room
from node.model.dry_run import DryRun, MemoryMeter
from node.model.replica import Replica
from node.model.stage_work import StageWork
from node.model.transfer import transfer_for
from protocol.run.manifest import Manifest


class NothingTaken(MemoryMeter):
    """Memory that every pass fits into: the real one would make a busy machine red."""

    def begin(self) -> None:
        """Begin nothing."""

    def held(self) -> int:
        return 0

    def peak(self) -> int:
        return 0


def measured(manifest: Manifest, stage: int, device: str) -> Replica:
    replica = Replica(manifest, stage, device)
    work = StageWork(manifest, replica.passes, transfer_for(torch.device(device)))
    room = Room(2**40, 2**40, "this test")
    DryRun(replica, work, NothingTaken(), lambda: room, "fp32").run("auto", compiles=False)
    return replica
