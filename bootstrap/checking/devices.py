"""Devices that a command line names; and this machine, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from node.machine.devices import DEVICES, GB, Device
from protocol.errors import UserError

if TYPE_CHECKING:  # names of devices are needed before a command imports torch
    import torch

    from protocol.manifest import Manifest

MEASURED_TOKENS = 256  # in a layer of this machine's measurement; more changes little


def named(names: str) -> list[Device]:
    """The devices of "a100,4090". Raises `UserError` for an unknown name."""
    devices = []
    for name in filter(None, (part.strip().lower() for part in names.split(","))):
        if name not in DEVICES:
            raise UserError(f"The device {name!r} is unknown. Known devices: {', '.join(DEVICES)}.")
        devices.append(DEVICES[name])
    return devices


def measured_here(manifest: Manifest) -> Device:
    """This machine, timed on one layer forward and backward and on a pass over memory. Takes seconds."""
    import torch

    from node.model.resources import room_on
    from node.model.stage import Stage, work_of

    cuda = torch.cuda.is_available()
    where = torch.device("cuda" if cuda else "cpu")
    three = manifest.model.model_copy(update={"layers": 3})
    layer = manifest.model_copy(update={"stages": 3, "model": three})
    stage = Stage(layer, 1).to(where)
    tokens = min(MEASURED_TOKENS, manifest.data.sequence_tokens)
    inputs = torch.ones(1, tokens, manifest.model.hidden_size, device=where, requires_grad=True)

    def once() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
            stage(inputs).sum().backward()

    seconds = _fastest(once, where)
    passes = torch.empty(2**26, device=where)
    copying = _fastest(lambda: passes.mul_(1.0), where)
    short = layer.model_copy(update={"data": layer.data.model_copy(update={"sequence_tokens": tokens})})
    flops = 6 * work_of(short, 1) * tokens / seconds
    bandwidth = 2 * passes.nbytes / copying / GB
    return Device("here", flops / 1e12, bandwidth, room_on(where).free / GB, is_gpu=cuda, efficiency=1.0)


def _fastest(work: Callable[[], object], where: torch.device) -> float:
    """Seconds of the fastest of three, after one that warms up."""
    import torch

    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
