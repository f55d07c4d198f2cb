"""Devices by name, with the numbers that their makers publish."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import UserError

# Of the published arithmetic, what training a Llama reaches: an assumption, not a measurement of ours. Megatron-LM
# reports 44 to 52 % (arXiv 2104.04473, table 1) with long tuning; unfused kernels and small microbatches reach less.
EFFICIENCY = 0.35
GB = 10**9


@dataclass(frozen=True)
class Device:
    """`tflops` of bf16 with float32 sums, without sparsity; gigabytes a second; gigabytes; a GPU has its own."""

    name: str
    tflops: float
    bandwidth: float
    memory: float
    is_gpu: bool = True
    efficiency: float = EFFICIENCY


# NVIDIA's data sheets of A100, H100, H200, L40S, L4, A10 and RTX A6000, halved where they count with sparsity, and
# the white papers of GA102 and Ada for 3090, 4080 and 4090. The processor: 8 cores at 3 GHz, 32 float32 operations a
# cycle each (two AVX2 units), and two channels of DDR4-3200.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312, 2039, 80),
        Device("a100-40", 312, 1555, 40),
        Device("h100", 989, 3350, 80),
        Device("h200", 989, 4800, 141),
        Device("l40s", 362, 864, 48),
        Device("l4", 121, 300, 24),
        Device("a10", 125, 600, 24),
        Device("a6000", 155, 768, 48),
        Device("4090", 165, 1008, 24),
        Device("4080", 97.5, 717, 16),
        Device("3090", 71, 936, 24),
        Device("cpu", 0.77, 51, 32, is_gpu=False),
    )
}


def named(names: str) -> list[Device]:
    """Of "a100,4090". Raises `UserError` for an unknown one."""
    devices = []
    for name in filter(None, (part.strip().lower() for part in names.split(","))):
        if name not in DEVICES:
            raise UserError(
                f"There are no numbers for the device {name!r} here. Known: {', '.join(DEVICES)}."
            )
        devices.append(DEVICES[name])
    return devices
