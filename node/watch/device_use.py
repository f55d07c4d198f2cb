"""A node's device, and how much of it the node uses: for people who watch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import psutil
import torch

from node.machine.accelerator import taken_by_metal
from node.machine.devices import peak_of


@dataclass(frozen=True)
class DeviceUse:
    """Bytes of memory that this node takes of the device's, and the share of the published operations that it does
    for training, recomputation not counted; None where nothing is published of the device.
    """

    name: str
    memory: int
    of_memory: int
    share_of_peak: float | None


def device_use(device: torch.device, work_per_second: float) -> DeviceUse:
    """`work_per_second` are floating-point operations that a model's tokens ask for, forward and backward."""
    if device.type == "mps":
        taken = psutil.Process().memory_info().rss + taken_by_metal()
        return DeviceUse("an Apple GPU", taken, psutil.virtual_memory().total, None)
    if device.type != "cuda":
        return DeviceUse(device.type, psutil.Process().memory_info().rss, psutil.virtual_memory().total, None)
    name, total = _of_gpu(device)
    peak = peak_of(name)
    share = None if peak is None else work_per_second / peak
    return DeviceUse(name, torch.cuda.memory_reserved(device), total, share)


@cache
def _of_gpu(device: torch.device) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory
