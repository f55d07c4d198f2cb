"""The devices that the nodes of a local swarm compute on, and a sentence about them."""

from __future__ import annotations

from collections import Counter

import torch

from node.process.serving import choose_device, devices_of
from protocol.errors import UserError


def devices_told(setting: str) -> tuple[tuple[str, ...], str]:
    """The devices that `--device` names, which the nodes take in turn, and a sentence about them.

    "auto" is a GPU where there is one. Raises `UserError` for a device that this machine does not have.
    """
    devices = tuple(map(_checked, devices_of(setting)))
    if setting == "auto" and devices == ("cpu",):
        return devices, "The nodes compute on the CPU: torch sees no GPU here."
    counts = Counter(map(described, devices))
    named = ", ".join(f"{times} × {name}" if times > 1 else name for name, times in counts.items())
    return devices, f"The nodes compute on {named}."


def _checked(device: str) -> str:
    """Check as `choose_device` does, without taking memory of a GPU that this process computes nothing on."""
    if not device.startswith("cuda"):
        return choose_device(device)
    number = device.removeprefix("cuda").removeprefix(":") or "0"
    if not number.isdigit() or int(number) >= torch.cuda.device_count():
        raise UserError(
            f"The device {device!r} cannot be used here: torch sees {torch.cuda.device_count()} GPUs. "
            "Try --device auto."
        )
    return device


def described(device: str) -> str:
    """Name a device for people: "cuda:0 (NVIDIA H100 80GB HBM3)", "the CPU"."""
    if device == "cpu":
        return "the CPU"
    if device.startswith("mps"):
        return f"{device} (an Apple GPU)"
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device
