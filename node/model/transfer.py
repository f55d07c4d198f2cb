"""Copies between the host and the device that computes, and results that arrive on the host later.

On a GPU kernels are only launched: what they make is copied to the host and encoded while the next microbatch is
computed. Whoever needs it awaits a `Pending`. Where the host is the device, everything is there at once.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from node.model.resources import named, retried

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

AHEAD = 2  # pieces of work launched and not finished: one runs, one waits, and a more urgent one need not wait long


class Pending(abc.ABC, Generic[T_co]):
    """A result that is on its way to the host."""

    is_here = False

    @abc.abstractmethod
    def wait(self) -> T_co:
        """Block until it is here and return it; raises what making it raised."""

    async def result(self) -> T_co:
        """Wait for it in a thread. Raises as `wait`, and `OutOfMemory` or `DeviceFailed` for any way to say that."""
        if self.is_here:
            return self.wait()
        try:
            return await asyncio.to_thread(retried, self.wait)
        except (MemoryError, RuntimeError) as error:
            raise named(error) from None


class Here(Pending[T_co]):
    """A result that has arrived."""

    is_here = True

    def __init__(self, result: T_co) -> None:
        self._result = result

    def wait(self) -> T_co:
        return self._result


class Deferred(Pending[T_co]):
    """A result that is made, by calling `make`, when somebody waits for it."""

    def __init__(self, make: Callable[[], T_co]) -> None:
        self._make = make

    def wait(self) -> T_co:
        return self._make()


class CudaCopy(Pending[torch.Tensor]):
    """A tensor in pinned memory, into which a stream of the GPU copies until `arrived`."""

    def __init__(self, host: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self._host = host
        self._arrived = arrived

    def wait(self) -> torch.Tensor:
        self._arrived.synchronize()
        return self._host


class DeviceTransfer:
    """Copies to and from a device that is the host, or one without streams: everything is there at once.

    Only the device's compute thread may call it.
    """

    encodes_there = False  # whether tensors go up and down in the codecs' bytes

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy values to the device, for work launched from now on."""
        return host.to(self._device)

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Pending[torch.Tensor]:
        """Begin to copy what the work launched so far makes of `tensor`, as `dtype`."""
        return Here(tensor.detach().to("cpu", dtype))

    def hand_over(self, result: Pending[T]) -> Pending[T]:
        """Return a result to await outside the compute thread. Here it is made at once; raises as `Pending.wait`."""
        return Here(result.wait())

    def keep_pace(self) -> None:
        """Wait until at most `AHEAD` pieces of work are unfinished. Here each is finished when it returns."""


class CudaTransfer(DeviceTransfer):
    """Copies to and from a GPU, hidden behind what it computes.

    Kernels are only launched, each way has a stream and pinned memory of its own, and whoever wants a result waits
    for it outside the compute thread, which launches the next piece of work meanwhile. What is sent and received goes
    over PCIe in the codecs' bytes; torch keeps the pinned memory for the next ones.
    """

    encodes_there = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends: deque[torch.cuda.Event] = deque()  # of the pieces of work that were launched last

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        if host.device.type != "cpu":  # it was made there of received bytes
            return host
        pinned = host.contiguous().pin_memory()  # the allocator keeps it until the copy has been made
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._up)
        tensor.record_stream(computing)
        return tensor

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Pending[torch.Tensor]:
        made = tensor.detach().to(dtype or tensor.dtype).contiguous()
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else a core spins
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            host.copy_(made, non_blocking=True)
            arrived.record(self._down)
        made.record_stream(self._down)
        return CudaCopy(host, arrived)

    def hand_over(self, result: Pending[T]) -> Pending[T]:
        """Return it as it is: whoever awaits it waits for the GPU."""
        return result

    def keep_pace(self) -> None:
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()


def transfer_for(device: torch.device) -> DeviceTransfer:
    """Return the transfer that suits the device: with streams on a GPU."""
    return CudaTransfer(device) if device.type == "cuda" else DeviceTransfer(device)
