"""A replica's state copied to the host while training goes on: all of it as it was at one instant.

It is copied in parts. Whoever is about to change a tensor has the rest of it copied first (`before_change`), so that
forward and backward passes, which change none, go on beside it; what inner steps change goes first. On the host the
parts are pieces of work between microbatches. On a GPU another thread launches them, on a stream of their own into
pinned memory, and a change waits on the GPU alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import torch

from node.storage.stage_state import StageState
from protocol.windows import window

# those that the next inner step changes, then those of the round's end
ORDER = ("theta", "first_moment", "second_moment", "phi", "delta")

PORTABLE = 1  # cudaHostRegisterPortable: pinned for whatever device is asked

Room: TypeAlias = dict[str, torch.Tensor]  # memory for a copy of each of them, on the host


class HostCopier:
    """Copies where the host is the device: a part is there when `copy` returns. Also the interface of the others."""

    entries = 2**14  # of a part: 64 KiB, some 20 µs
    rooms = 1  # kept; the state in it is no donor's any more once the next copy begins
    is_beside = False  # whether copies are launched from another thread, and cost the compute thread nothing

    def room(self, parameters: int) -> torch.Tensor:
        """Memory [parameters] that was touched, so that a copy into it is only that."""
        return torch.empty(parameters).zero_()

    def begin(self) -> None:
        """Begin a copy: parts hold what the work that was launched until now makes. Called by the compute thread."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def keep_pace(self) -> None:
        """Wait until few parts are on their way, so that other copies need not queue behind many."""

    def before_change(self) -> None:
        """Allow later work to change what is copied. Called by the compute thread, which does not wait."""

    def finish(self) -> None:
        """Wait until all parts are there."""


class MetalCopier(HostCopier):
    """Copies from an Apple GPU: each part is waited for, so that there are few, of whole tensors mostly."""

    entries = 2**26  # 256 MiB


class CudaCopier(HostCopier):
    """Copies a replica's state from a GPU to the host on a stream of its own, while training goes on."""

    entries = 2**22  # 16 MiB: a third of a millisecond on PCIe 5, and few launches
    rooms = 2
    is_beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends: list[torch.cuda.Event] = []

    def room(self, parameters: int) -> torch.Tensor:
        """Memory that is pinned where the system allows; copies to pageable memory are slower but the same.

        torch's own allocator of pinned memory takes the next power of two.
        """
        tensor = super().room(parameters)
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            refused = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, PORTABLE))
        if refused:
            self._clear_error()
        else:
            weakref.finalize(tensor, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
        return tensor

    def _clear_error(self) -> None:
        """Have the next launch raise the refusal, which clears it: else training's own next launch would."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(self._stream)
        self._ends = [*self._ends[-1:], end]

    def keep_pace(self) -> None:
        for end in self._ends[:1]:
            end.synchronize()

    def before_change(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


def copier_of(device: torch.device) -> HostCopier:
    if device.type == "cuda":
        return CudaCopier(device)
    return MetalCopier() if device.type == "mps" else HostCopier()


class Snapshots:
    """Makes consistent copies of a replica's state while it trains."""

    def __init__(self, live: Callable[[], StageState], copier: HostCopier) -> None:
        """`live` gives the state itself, which changes."""
        self._live = live
        self._copier = copier
        self._lock = threading.RLock()  # parts are copied by whichever thread comes first
        self._source: StageState | None = None
        self._room: Room = {}
        self._copied: dict[str, int] = {}  # entries that are there, of tensors that are not whole yet
        self._last: StageState | None = None
        self._free: list[Room] = []

    @window
    def __repr__(self) -> str:
        source, last = self._source, self._last
        copying = "nothing" if source is None else f"step {source.step}, {len(self._copied)} tensors left"
        kept = "none" if last is None else f"step {last.step}, round {last.round}"
        return f"Copying: {copying} | Last: {kept} | Rooms: {len(self._free)} free"

    @property
    def are_beside(self) -> bool:
        """True if another thread calls `advance`: it costs the compute thread nothing."""
        return self._copier.is_beside

    # --- making one ---------------------------------------------------------------------------

    def room(self) -> Room:
        """Memory for the next copy, kept from an earlier one where there is some. Takes long: for another thread."""
        with self._lock:
            if not self._free and self._copier.rooms == 1 and self._last is not None:
                self._free.append(self._last.tensors())
                self._last = None
            kept: Room = self._free.pop() if self._free else {}
        for name, tensor in self._live().tensors().items():
            if name not in kept:
                kept[name] = self._copier.room(tensor.numel())
        return kept

    def begin(self, room: Room) -> StageState:
        """Copy the state of this instant into `room` from now on. Returns its counts, with the live tensors.

        Called by the compute thread, between pieces of work. A copy that was not finished is given up.
        """
        with self._lock:
            self.give_up()
            live = self._live()
            tensors = live.tensors()
            for name in tensors.keys() - room.keys():  # error feedback has just begun
                room[name] = self._copier.room(tensors[name].numel())
            self._copier.begin()
            self._source, self._room = live, room
            self._copied = {name: 0 for name in ORDER if name in tensors}
            return live

    def give_up(self) -> None:
        """Drop what is being copied: nobody wants it any more."""
        with self._lock:
            if self._source is not None:
                self._copier.finish()
            self._source, self._room, self._copied = None, {}, {}

    def advance(self, seconds: float, clock: Callable[[], float]) -> bool:
        """Copy parts for about so long; returns whether all are copied, or on their way."""
        ends = clock() + seconds
        while True:
            with self._lock:
                if not self._copied:
                    return True
                self._copy_part(next(iter(self._copied)))
            if clock() >= ends:
                return not self._copied
            self._copier.keep_pace()

    def before_change(self, *names: str) -> None:
        """Prepare for a change of these tensors, of all when none is named. Called by the compute thread."""
        if self._source is None:
            return
        with self._lock:
            for name in names or ORDER:
                while name in self._copied:
                    self._copy_part(name)
            self._copier.before_change()

    def landed(self) -> StageState:
        """The state as it was at the instant, once all is copied. Waits: for another thread."""
        self._copier.finish()
        with self._lock:
            assert self._source is not None, "no snapshot was begun"
            assert not self._copied, "a snapshot is not whole yet"
            whole = self._source.holding({name: self._room[name] for name in self._source.tensors()})
            self.give_up()
        return whole

    def _copy_part(self, name: str) -> None:
        assert self._source is not None
        source, done = self._source.tensors()[name], self._copied[name]
        bounds = slice(done, done + self._copier.entries)
        self._copier.copy(self._room[name][bounds], source[bounds])
        if bounds.stop >= source.numel():
            del self._copied[name]
        else:
            self._copied[name] = bounds.stop

    # --- the last one -------------------------------------------------------------------------

    def keep(self, state: StageState) -> None:
        """Keep a copy that is written: donors may read it, and once there is a later one its memory is used again."""
        with self._lock:
            if self._last is not None:
                self._free = [self._last.tensors()]
            self._last = state

    def forget(self) -> None:
        """Forget the last copy: the weights were replaced, and it is of others."""
        with self._lock:
            self.before_change()
            if self._last is not None:
                self._free = [self._last.tensors()]
                self._last = None

    def read(self, round_: int, bounds: slice) -> tuple[StageState, list[torch.Tensor]] | None:
        """Copies of φ, δ and AdamW's moments over `bounds`, of the last snapshot if it is of this round.

        May be called from any thread.
        """
        with self._lock:
            last = self._last
            if last is None or last.round != round_:
                return None
            sources = last.phi, last.delta, last.first_moment, last.second_moment
            return last, [source[bounds].clone() for source in sources]
