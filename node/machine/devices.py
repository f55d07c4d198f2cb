"""Devices by name, with the numbers that their makers publish."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Of the published arithmetic, what training a Llama reaches: an assumption, not a measurement of ours. Megatron-LM
# reports 44 to 52 % (arXiv 2104.04473, table 1) with long tuning; unfused kernels and small microbatches reach less.
EFFICIENCY = 0.35
GB = 10**9


@dataclass(frozen=True)
class Timed:
    """Seconds a token, measured: a layer forward and backward, the head, and encoding a tensor for a peer."""

    layer: float
    head: float
    encoding: float


@dataclass(frozen=True)
class Device:
    """`tflops` of bf16 with float32 sums, without sparsity; gigabytes a second; gigabytes; watts at full load.

    0 watts: not known. A GPU has a memory of its own. `timed` is of a device that was measured.
    """

    name: str
    tflops: float
    bandwidth: float
    memory: float
    watts: float = 0.0
    is_gpu: bool = True
    efficiency: float = EFFICIENCY
    timed: Timed | None = None


# NVIDIA's data sheets of A100, H100, H200, L40S, L4, A10, RTX A6000 and DGX B200 (an eighth), halved where they count
# with sparsity; its white papers of GA102, Ada and RTX Blackwell (also PRO) for the 30, 40 and 50 series, by their
# rows of sums in float32; AMD's data sheets of MI300X and MI355X. Apple publishes none of its GPUs. Watts are
# the boards' limits in the same sheets, without the machine around them. The processor: 8 cores at 3 GHz, 32 float32
# operations a cycle each (two AVX2 units), two channels of DDR4-3200, and 65 W, as such desktop processors are sold.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312, 2039, 80, 400),
        Device("a100-40", 312, 1555, 40, 400),
        Device("h100", 989, 3350, 80, 700),
        Device("h200", 989, 4800, 141, 700),
        Device("l40s", 362, 864, 48, 350),
        Device("l4", 121, 300, 24, 72),
        Device("a10", 125, 600, 24, 150),
        Device("a6000", 155, 768, 48, 300),
        Device("b200", 2250, 8000, 180, 1000),
        Device("pro6000", 504, 1792, 96, 600),
        Device("mi300x", 1307, 5300, 192, 750),
        Device("mi355x", 2517, 8000, 288, 1400),
        Device("5090", 209.5, 1792, 32, 575),
        Device("5080", 112.6, 960, 16, 360),
        Device("5070ti", 87.9, 896, 16, 300),
        Device("5070", 61.7, 672, 12, 250),
        Device("4090", 165, 1008, 24, 450),
        Device("4080", 97.5, 717, 16, 320),
        Device("4070ti", 80.2, 504, 12, 285),
        Device("3090", 71, 936, 24, 350),
        Device("3080", 59.5, 760, 10, 320),
        Device("3070", 40.6, 448, 8, 220),
        Device("cpu", 0.77, 51, 32, 65, is_gpu=False),
    )
}

FOR_A_NODE = 0.75  # of the memory of a machine without a GPU: the rest is the system's and other programs'


def processor_of(gigabytes: float) -> Device:
    """A machine without a GPU, as fast as "cpu", of whose memory a node may have three quarters."""
    return replace(DEVICES["cpu"], name=f"machines of {gigabytes:.3g} GB", memory=FOR_A_NODE * gigabytes)


# What drivers call them. Exactly these: an "H100 PCIe" or a part of an A100 is another device, and slower. A 3080 is
# not here, since its driver calls one of 10 and one of 12 GB, which has more units, the same.
DRIVERS_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA B200": "b200",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "pro6000",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi355x",
    "NVIDIA GeForce RTX 5090": "5090",
    "NVIDIA GeForce RTX 5080": "5080",
    "NVIDIA GeForce RTX 5070 Ti": "5070ti",
    "NVIDIA GeForce RTX 5070": "5070",
    "NVIDIA GeForce RTX 4070 Ti": "4070ti",
    "NVIDIA GeForce RTX 3070": "3070",
    "NVIDIA GeForce RTX 4090": "4090",
    "NVIDIA GeForce RTX 4080": "4080",
    "NVIDIA GeForce RTX 3090": "3090",
}


def watts_of(name: str) -> float:
    """Watts at full load of the device that a driver calls so; 0 of an unknown one."""
    known = DRIVERS_NAMES.get(name)
    return 0.0 if known is None else DEVICES[known].watts


def peak_of(name: str) -> float | None:
    """Published operations a second of the device that a driver calls so; None of an unknown one."""
    known = DRIVERS_NAMES.get(name)
    return None if known is None else DEVICES[known].tflops * 1e12
