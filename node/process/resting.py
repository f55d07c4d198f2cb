"""Lets a node rest from its stage: it takes no memory of its device, and stays the peer that it is.

What is in flight is finished, the replica is copied to the host, given up, and saved. The way up again is that of a
restart from a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from node.machine.accelerator import give_back_cached
from node.machine.limits import give_back_freed_memory
from node.service.node_resources import NodeResources, attempt
from node.service.service import Service
from node.storage.checkpoint_files import Checkpoint

REST_SECONDS = 8.0  # from being asked until the memory of the device is free
FINISH_SECONDS = 4.0  # of them are for the microbatches in flight
SAVE_SECONDS = 600.0  # to disk, when the device is free already and nobody waits


def release_memory(device: str) -> None:
    """Give back to the system what a stage that was given up had, of the device and of the host."""
    give_back_freed_memory()  # the parts know each other: the collector finds them first
    if torch.device(device).type != "cpu":
        give_back_cached()


async def stand_down(
    member: NodeResources, service: Service, training: asyncio.Task[bool] | None = None
) -> None:
    """Stop taking work. What is in flight is finished as far as there is time for it: others take the rest."""
    member.leave_by = asyncio.get_running_loop().time() + REST_SECONDS
    service.trainer.stop()
    withdrawing = member.supervisor.start(service.withdraw(), "withdrawing")
    if training is not None:
        await asyncio.wait([training], timeout=FINISH_SECONDS)
    await withdrawing


async def set_aside(
    member: NodeResources, service: Service, give_up: Callable[[], Awaitable[None]]
) -> Checkpoint | None:
    """Give the stage and its memory up. What goes on from there is in the state directory; returned without one.

    A checkpoint that cannot be copied or saved is told: the last one on disk stands.
    """
    checkpoint = await service.copied()
    del service
    await give_up()
    state = member.surroundings.state
    if checkpoint is None or state is None:
        return checkpoint
    saving = asyncio.to_thread(state.save_checkpoint, member.signed.run_id, checkpoint)
    await attempt(lambda: saving, "saving the state", SAVE_SECONDS)
    return None
