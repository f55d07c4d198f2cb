"""Tensors between the host and the device, hidden behind what the device computes where it can do both at once.

On a GPU kernels are only launched; each way has a stream and pinned memory of its own, and whoever wants a result
waits for it outside the compute thread, which launches the next piece of work meanwhile. On the CPU nothing is copied
and everything is there at once.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")

AHEAD = 2  # pieces of work launched and not finished: one runs, one waits, and a more urgent one need not wait long


class PendingResult(Generic[T]):
    """A result that is there, or will be when `fetch` returns."""

    def __init__(self, fetch: Callable[[], T], at_once: bool) -> None:
        self._fetch: Callable[[], T] | None = None if at_once else fetch
        self._result: Any = fetch() if at_once else None

    def fetch(self) -> T:
        """The result, for whoever may wait where this is called. Raises what fetching raises."""
        if self._fetch is None:
            result: T = self._result
            return result
        return self._fetch()

    def then(self, use: Callable[[T], U]) -> PendingResult[U]:
        """What `use` makes of it."""
        return PendingResult(lambda: use(self.fetch()), at_once=self._fetch is None)

    async def landed(self) -> T:
        """The same. Waits in a thread."""
        return self.fetch() if self._fetch is None else await asyncio.to_thread(self._fetch)


class DeviceTransfer(abc.ABC):
    """The two ways of one device. Called by its compute thread alone."""

    @abc.abstractmethod
    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """The same values on the device, for work launched from now on."""

    @abc.abstractmethod
    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """Begin to copy what the work launched so far makes of `tensor`; the function waits and returns it."""

    @abc.abstractmethod
    def landing(self, fetch: Callable[[], T]) -> PendingResult[T]:
        """What `fetch` will make of copies that were begun."""

    @abc.abstractmethod
    def keep_pace(self) -> None:
        """After a piece of work: wait until at most `AHEAD` are unfinished."""


class HostCopies(DeviceTransfer):
    """The CPU: the host is the device. Also for devices without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device)

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        copy = tensor.detach().to("cpu", dtype)
        return lambda: copy

    def landing(self, fetch: Callable[[], T]) -> PendingResult[T]:
        return PendingResult(fetch, at_once=True)

    def keep_pace(self) -> None:
        """Work is finished when it returns."""


class CudaCopies(DeviceTransfer):
    """Mutable state: a stream each way, and the ends of the pieces of work that were launched last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends: deque[torch.cuda.Event] = deque()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        pinned = host.contiguous().pin_memory()  # the allocator keeps it until the copy has been made
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._up)
        tensor.record_stream(computing)
        return tensor

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        made = tensor.detach().to(dtype or tensor.dtype).contiguous()
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            host.copy_(made, non_blocking=True)
            arrived.record(self._down)
        made.record_stream(self._down)

        def fetch() -> torch.Tensor:
            arrived.synchronize()
            return host

        return fetch

    def landing(self, fetch: Callable[[], T]) -> PendingResult[T]:
        return PendingResult(fetch, at_once=False)

    def keep_pace(self) -> None:
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()


def copies_of(device: torch.device) -> DeviceTransfer:
    return CudaCopies(device) if device.type == "cuda" else HostCopies(device)
