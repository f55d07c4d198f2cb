"""Measuring the memory that a piece of work takes, on the host and on a GPU."""

from __future__ import annotations

import abc
import threading
from pathlib import Path

import psutil
import torch

from node.machine.heap import give_back_freed_memory

_RESET_PEAK = "5"  # proc_pid_clear_refs(5)
_SAMPLE_SECONDS = 0.002


class MemoryMeter(abc.ABC):
    """What a piece of work takes of a device's memory. One measurement at a time."""

    @abc.abstractmethod
    def begin(self) -> None:
        """What is held now is the zero of `held` and `peak`."""

    @abc.abstractmethod
    def held(self) -> int:
        """Bytes more than at the beginning, without what was freed."""

    @abc.abstractmethod
    def peak(self) -> int:
        """The most bytes more than at the beginning that were held at a time."""


class CudaMeter(MemoryMeter):
    """By torch's allocator, which every tensor on the device comes from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


class HostMeter(MemoryMeter):
    """By the resident size of the process, whose peak the kernel keeps; where it does not, by samples of it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = 0
        self._sampled = 0
        self._is_sampling: threading.Event | None = None

    def begin(self) -> None:
        give_back_freed_memory()
        self._before = self._resident()
        if _kernel_keeps_peak():
            return
        if self._is_sampling is not None:
            self._is_sampling.clear()
        self._sampled, self._is_sampling = 0, threading.Event()
        self._is_sampling.set()
        threading.Thread(target=self._sample, args=(self._is_sampling,), daemon=True).start()

    def held(self) -> int:
        give_back_freed_memory()
        return max(0, self._resident() - self._before)

    def peak(self) -> int:
        highest = _kernels_peak() if self._is_sampling is None else self._sampled
        if self._is_sampling is not None:
            self._is_sampling.clear()
        return max(0, max(highest, self._resident()) - self._before)

    def _resident(self) -> int:
        resident: int = self._process.memory_info().rss
        return resident

    def _sample(self, is_wanted: threading.Event) -> None:
        pause = threading.Event()
        while is_wanted.is_set():
            self._sampled = max(self._sampled, self._resident())
            pause.wait(_SAMPLE_SECONDS)


def meter_of(device: torch.device) -> MemoryMeter:
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


def _kernel_keeps_peak() -> bool:
    """Begin it anew; False where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _kernels_peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
