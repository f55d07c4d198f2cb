"""The first line of `noloco manifest check`: the machines that a run fits, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence

from bootstrap.checking.costs import cost_of
from bootstrap.checking.report import AssumedLinks, fit_of
from node.machine.devices import DEVICES, Device, processor_of
from node.watch.words import count, duration
from protocol.run.manifest import Manifest

PROCESSORS = (4, 8, 16, 32, 64)  # GB of machines without a GPU
PATIENCE = 30 * 24  # hours: what takes a processor longer is for GPUs
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def usual_devices() -> list[Device]:
    """Machines without a GPU by their memory, then GPUs by theirs."""
    gpus = sorted((device for device in DEVICES.values() if device.is_gpu), key=lambda each: each.memory)
    return [*map(processor_of, PROCESSORS), *gpus]


def verdict(
    manifest: Manifest, devices: Sequence[Device], links: AssumedLinks, replicas: int, machines: int = 0
) -> str:
    """Say in a sentence which of the devices the run fits, else of the usual ones, and how long it takes.

    Of so many `machines`, where more are there than `replicas` of each stage take, one stage or another has more.
    """
    costs = [(each, cost_of(manifest, each, links, replicas)) for each in devices or usual_devices()]
    fitting = [(each, cost) for each, cost in costs if cost is not None]
    if not fitting:
        named = ", ".join(each.name for each in devices) or "any device that is known"
        return f"Does not fit {named}: more stages, or a smaller model."
    quick = (one for one in fitting if one[1].hours <= PATIENCE)
    device, cost = next(quick, min(fitting, key=lambda one: one[1].hours))
    kind = device.name if device.name.startswith("machines") else f"{device.name}s"
    each = NUMBERS[replicas] if replicas < len(NUMBERS) else f"{replicas:,}"
    needed = replicas * manifest.stages
    at_least = "at least " * (machines > needed)
    return (
        f"Fits {max(machines, needed):,} {kind}, {at_least}{each} replica{'s' * (replicas > 1)} a stage, "
        f"{links.up() * 8e-6:g} Mbit/s up: about {duration(3600 * cost.hours)} for {count(cost.tokens)} tokens."
    )


def is_fit(manifest: Manifest, device: Device) -> bool:
    return all(fit_of(manifest, stage, device) != "no" for stage in range(manifest.stages))
