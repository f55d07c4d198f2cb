"""What kinds of devices have by different names: NVIDIA's and AMD's GPUs (torch.cuda), Apple's (torch.mps), the host.

Apple's has the host's memory for its own: it is counted once, and what Metal has taken of it is in no process's
resident size.
"""

from __future__ import annotations

import psutil
import torch

# AMD's with matrix units for bf16: CDNA 1 to 4, RDNA 3 and 4. RDNA 2 counts as "capability 10.3" and has none
BF16_OF_AMD = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def has_bf16(device: torch.device) -> bool:
    """Return whether bf16 is faster there than float32. CPUs do it slowly; of Apple's GPUs that was not measured."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(BF16_OF_AMD)
    return torch.cuda.get_device_capability(device) >= (8, 0)


def can_bf16(device: torch.device) -> bool:
    """Return whether it computes in bf16 at all, if slowly: Apple's GPUs do from macOS 14 on."""
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return device.type != "cuda" or has_bf16(device)


def shares_memory(device: torch.device) -> bool:
    """Return whether the device's memory is the host's."""
    return device.type in ("cpu", "mps")


def has_mps() -> bool:
    """Return whether torch sees a GPU of Apple's here."""
    return bool(torch.backends.mps.is_available())


def use(device: torch.device) -> None:
    """Have this thread's calls without a device go to this one, not to the first GPU, which would get a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def give_back_cached() -> None:
    """Give back the memory of GPUs that torch keeps for later allocations."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if has_mps():
        torch.mps.empty_cache()


def taken_by_metal() -> int:
    """Bytes that Metal holds for this process: 0 where there is none."""
    return torch.mps.driver_allocated_memory() if has_mps() else 0


def most_for_metal() -> int:
    """Bytes that Metal recommends to take at most; the host's memory where it recommends none."""
    return torch.mps.recommended_max_memory() or psutil.virtual_memory().total
