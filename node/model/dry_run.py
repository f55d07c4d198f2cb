"""A dry step before a replica serves: the largest microbatch forward and backward, and the optimizer, measured.

Peers are told of a node only when it is known how it computes without running out of memory. First one and two
sequences are computed, which tells what each costs; then a whole microbatch in the way that should fit. If that takes
more than it should, the next way is tried. Activations are recomputed only where they do not fit: torch's
checkpointing imports its compiler, which takes seconds and 70 MB.

It computes on blank weights, since a replica of a run that starts from a checkpoint has no others yet, and what is
computed does not matter: values that are not finite end no node here. Nothing of it stays in the replica.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from node.machine.accelerator import shares_memory, taken_by_metal
from node.machine.limits import Room, give_back_freed_memory, size
from node.model.execution import Execution, ExecutionMode, by_formula, choose, execution_of, modes, usable_on
from node.model.memory_model import MicrobatchBytes, Precision, memory_of_buffers, memory_of_state, sliced
from node.model.replica import Replica
from node.model.resources import free_caches, is_out_of_memory, room_on, too_little
from node.model.stage_work import StageWork
from node.model.transfer import transfer_for
from protocol.errors import Refused, ResourceError

_RESET_PEAK = "5"  # proc_pid_clear_refs(5)
_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class DryRunResult:
    """The way that was chosen, what a microbatch takes in it, and what there was for all in flight."""

    execution: Execution
    cost: MicrobatchBytes
    room: int

    def described(self) -> str:
        """Say for people how much of its room the activations take."""
        taken = self.cost.of(self.execution.in_flight)
        return f"activations take {size(taken)} of the {size(self.room)} left for them, measured"


def dry_run(replica: Replica, recompute: str, most_memory: int) -> DryRunResult:
    """Measure, and have the replica compute from now on in the fastest way that fits.

    `most_memory` is what the volunteer gives in all, 0 for no limit. Raises `ResourceError`.
    """
    device, chosen = replica.device, replica.passes.execution
    if device.type == "cuda" and most_memory:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_memory / total), device)
    work = StageWork(replica.manifest, replica.passes, transfer_for(device))
    trial = DryRun(replica, work, meter_of(device), lambda: room_on(device, most_memory), chosen.precision)
    return trial.run(recompute, chosen.compiles)


@contextmanager
def blank_weights(replica: Replica) -> Iterator[None]:
    """Have a replica that has not trained yet, so that its θ is φ, compute on weights that give finite values.

    Afterwards θ is φ again, and nothing is left of the passes between.
    """
    replica.flat.make_blank()
    replica.passes.weights_changed()
    try:
        yield
    finally:
        replica.flat.values.copy_(replica.phi)
        replica.passes.weights_changed()
        replica.passes.probes.clear()
        replica.forget_gradients()


class DryRun:
    """Measures the memory of a training step before the replica serves, and finds the largest that fits.

    `room` tells what may still be taken of the device's memory. Called by the compute thread.
    """

    def __init__(
        self,
        replica: Replica,
        work: StageWork,
        meter: MemoryMeter,
        room: Callable[[], Room],
        precision: Precision,
    ) -> None:
        self._replica = replica
        self._manifest = replica.manifest
        self._stage = replica.stage.index
        self._work = work
        self._meter = meter
        self._room = room
        self._precision = precision
        self._formula = by_formula(self._manifest, self._stage, precision)
        self._usable = 0
        self._probed: dict[bool, list[MicrobatchBytes]] = {}
        self._whole: dict[ExecutionMode, MicrobatchBytes | None] = {}

    def run(self, recompute: str, compiles: bool) -> DryRunResult:
        """Find the fastest way that fits. Raises `ResourceError` with what the stage needs when none does."""
        with blank_weights(self._replica):
            self._replica.dry_run_step()
            return self._fastest(recompute, compiles)

    def _fastest(self, recompute: str, compiles: bool) -> DryRunResult:
        allowed = list(modes(self._manifest, self._stage, recompute))
        room = self._room_for_activations()
        share = usable_on(self._replica.device)
        self._usable = int(room.free * share)
        while choice := choose(self._manifest, self._stage, allowed, self._cost, room.free, share):
            if choice.way in self._whole:
                execution = execution_of(choice, self._precision, compiles)
                cost, passes = self._whole[choice.way], self._replica.passes
                assert cost is not None
                if compiles:  # now, while nobody waits
                    execution = self._compiled(execution, int(cost.peak / share))
                passes.execute(execution)
                return DryRunResult(execution, cost, room.free)
            execution = execution_of(choice, self._precision, compiles=False)  # compiled it takes rather less
            self._whole[choice.way] = self._measured(execution, self._manifest.inner.sequences)
            room = self._room_for_activations()
        raise self._refusal(allowed, room)

    def _compiled(self, execution: Execution, whole_bytes: int) -> Execution:
        """Make code that fits as the execution did uncompiled: of the whole stage, else of its layers.

        Where memory runs out even so, none is made. The whole stage's holds the gradients of all working weights at
        once, which nothing else has shown.
        """
        passes, room = self._replica.passes, self._room if self._replica.device.type == "cuda" else None
        if room is not None:
            passes.compiling = replace(passes.compiling, whole_bytes=whole_bytes, room=lambda: room().free)
        passes.execute(execution)
        with passes.making_code():
            self._measured(execution, self._manifest.inner.sequences)
        for _ in range(2):
            found = self._measured(execution, self._manifest.inner.sequences)
            if found is not None and found.of(execution.in_flight) <= self._usable:
                return execution
            assert passes.compiled is not None
            passes.compiled.drop_whole()
        return execution if found is not None else replace(execution, compiles=False)

    def _room_for_activations(self) -> Room:
        """Bytes that are free now, without what rounds, checkpoints and messages will take of them."""
        self._meter.begin()
        room = self._room()
        if not shares_memory(self._replica.device):
            return room
        later = memory_of_buffers(self._manifest, self._stage).total
        return Room(room.free - later, room.limit, room.source)

    # --- what each way costs ------------------------------------------------------------------

    def _probe(self, recomputes: bool) -> list[MicrobatchBytes]:
        """Measure one and two sequences in this mode, where the formula gives reason to hope."""
        costs = list[MicrobatchBytes]()
        for sequences in range(1, min(2, self._manifest.inner.sequences) + 1):
            if self._formula(ExecutionMode(recomputes, sequences, 1)).peak > self._usable:
                break
            execution = Execution(self._precision, recomputes)
            if sequences == 1:
                self._measured(execution, 1)  # the first pass also takes what the kernels keep for good
            cost = self._measured(execution, sequences)
            if cost is None:
                break
            costs.append(cost)
        return costs

    def _cost(self, way: ExecutionMode) -> MicrobatchBytes | None:
        """The cost as measured, for whole microbatches that were computed, else from one and two sequences."""
        if way in self._whole:
            return self._whole[way]
        sequences = way.at_once or self._manifest.inner.sequences
        if way.recomputes not in self._probed:
            self._probed[way.recomputes] = self._probe(way.recomputes)
        costs = self._probed[way.recomputes]
        if len(costs) < min(2, sequences):
            return None
        one, two = costs[0], costs[-1]
        more = sequences - 1
        cost = MicrobatchBytes(
            one.kept + more * max(0, two.kept - one.kept), one.peak + more * max(0, two.peak - one.peak)
        )
        return sliced(self._manifest, self._stage, cost.peak) if way.at_once else cost

    def _measured(self, execution: Execution, sequences: int) -> MicrobatchBytes | None:
        """Measure a microbatch of so many sequences in this way; None when memory ran out.

        By formula where the pass was refused for its values, and so ended before its peak.
        """
        self._replica.passes.execute(execution)
        self._meter.begin()
        try:
            return self._pass(sequences)
        except Refused:
            at_once = execution.at_once or (0 if sequences == self._manifest.inner.sequences else sequences)
            return self._formula(ExecutionMode(execution.recomputes, at_once, 1))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            self._replica.forget_gradients()

    def _pass(self, sequences: int) -> MicrobatchBytes:
        manifest = self._manifest
        inputs, labels = self._batch(sequences, is_first=self._replica.stage.is_first)
        if self._stage == manifest.hops - 1:
            self._work.last_stage(inputs, labels).wait()
            return MicrobatchBytes(0, self._meter.peak())
        leaf, outputs, parcel = self._work.forward(inputs, labels)
        parcel.wait()
        kept = self._meter.held()
        if self._stage == manifest.head_stage:  # in a ring the microbatch comes back before its backward pass
            self._work.head(*self._batch(sequences, is_first=False), learns=True).wait()
        shape = (sequences, manifest.data.sequence_tokens, manifest.model.hidden_size)
        self._work.backward(leaf, outputs, torch.ones(shape)).wait()
        return MicrobatchBytes(kept, self._meter.peak())

    def _batch(self, sequences: int, is_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels as a peer sends them. Ones, since zeros take no memory until they are written to."""
        shape = (sequences, self._manifest.data.sequence_tokens)
        labels = torch.zeros(shape, dtype=torch.long)
        return labels if is_first else torch.ones(*shape, self._manifest.model.hidden_size), labels

    def _refusal(self, allowed: list[ExecutionMode], room: Room) -> ResourceError:
        """The error for a stage that does not fit, with the bytes that the most sparing way took, where it could be
        tried.
        """
        candidates = [way for way in allowed if way.least == 1]
        costs = [self._cost(way) or self._formula(way) for way in candidates]
        needed = int(min(cost.peak for cost in costs if cost is not None) / usable_on(self._replica.device))
        manifest, stage, on_host = self._manifest, self._stage, shares_memory(self._replica.device)
        held = memory_of_state(manifest, stage, self._precision)
        held += memory_of_buffers(manifest, stage).total if on_host else 0
        before = Room(room.free + held, room.limit, room.source)  # as it was when the stage began
        return too_little(manifest, stage, needed + held, before, on_host=on_host)


# --- what a piece of work takes -----------------------------------------------------------------


class MemoryMeter(abc.ABC):
    """Measures what a piece of work takes of a device's memory, one measurement at a time."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a measurement: what is held now is the zero of `held` and `peak`."""

    @abc.abstractmethod
    def held(self) -> int:
        """Bytes more than at the beginning, without what was freed."""

    @abc.abstractmethod
    def peak(self) -> int:
        """The most bytes more than at the beginning that were held at a time."""


class CudaMeter(MemoryMeter):
    """Measures by torch's allocator, which every tensor on the device comes from: peaks with the gaps that it
    leaves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._reserved = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        self._reserved = torch.cuda.memory_reserved(self._device)

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._reserved


class MetalMeter(MemoryMeter):
    """Measures an Apple GPU by what Metal holds for this process, which is in no resident size.

    Torch gives nothing of it back before caches are emptied: afterwards it still is what it was at the peak.
    """

    def __init__(self) -> None:
        self._before = 0
        self._reserved = 0

    def begin(self) -> None:
        torch.mps.synchronize()
        free_caches()
        self._before, self._reserved = torch.mps.current_allocated_memory(), taken_by_metal()

    def held(self) -> int:
        torch.mps.synchronize()
        return torch.mps.current_allocated_memory() - self._before

    def peak(self) -> int:
        torch.mps.synchronize()
        return taken_by_metal() - self._reserved


class HostMeter(MemoryMeter):
    """Measures by the resident size of the process, whose peak the kernel keeps; where it does not, by samples of
    it.
    """

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
    if device.type == "cuda":
        return CudaMeter(device)
    return MetalMeter() if device.type == "mps" else HostMeter()


def _kernel_keeps_peak() -> bool:
    """Begin the kernel's record of the peak anew; False where the system has no such thing."""
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
