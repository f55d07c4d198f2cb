"""What `noloco manifest check --join` shows: a row for each stage of the run, and sentences on this machine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootstrap.checking.report import AssumedLinks
from bootstrap.checking.this_machine import (
    NamedLinks,
    Resources,
    StageHere,
    StageInRun,
    Visit,
    as_json,
    judged,
    look_at,
    resources_here,
)
from bootstrap.display import plain_table
from node.machine.limits import size
from node.model.resources import least_memory, memory_needed
from node.model.stage import described_parameters
from protocol.run.manifest import Manifest

DAY = 24


async def show_machine(
    join: Sequence[str], token: str, named: NamedLinks, threads: int, watts: float, is_json: bool
) -> bool:
    """Show what this machine could serve in the run; return whether it could serve any stage.

    Raises `JoinError` when nobody answers, `TokenError` where a private run refuses the token.
    """
    visit = await look_at(join, token, measures=named.upload is None)
    manifest = visit.signed.manifest
    up = named.upload or visit.upload or named.assumed
    links = AssumedLinks.between(up, named.download or up, (visit.round_trip or 0.0) / 2)
    machine = await asyncio.to_thread(resources_here, manifest, threads, free_disk())
    stages = judged(visit, machine, links)
    if is_json:
        print(json.dumps(as_json(visit, machine, links, stages), indent=2))
    else:
        show(visit, machine, stages, sentences(visit, machine, links, stages, named, watts))
    return any(stage.fits != "no" for stage in stages)


def free_disk() -> int:
    """Bytes free where a node started here keeps its state, unless --state-dir says otherwise."""
    return shutil.disk_usage(Path()).free


def show(visit: Visit, machine: Resources, stages: Sequence[StageHere], said: dict[str, str]) -> None:
    manifest = visit.signed.manifest
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for subject, text in said.items():
        grid.add_row(subject, Text(text))
    title = f"{manifest.name}: {described_parameters(manifest)}"
    table = stage_table(manifest, stages, visit.stages, on_host=not machine.device.is_gpu)
    Console(markup=False).print(title, "", table, "", grid, sep="\n", highlight=False)


def stage_table(
    manifest: Manifest, stages: Sequence[StageHere], run: Sequence[StageInRun], on_host: bool
) -> Table:
    """One row for each stage: who serves it now, and what this machine could do there."""
    table = plain_table(
        "What this machine could do at most, in tokens a second and in bytes an hour:",
        ("stage", "serve\nit now", "their\ntokens/s", "memory\nat least", "at its\nfastest", "fits", "com-\nputes",
         "links\ncarry", "sends,\nMB/h", "gets,\nMB/h"),
        is_dense=True,
    )  # fmt: skip
    for here, there in zip(stages, run, strict=True):
        least = size(least_memory(manifest, here.stage, on_host=on_host))
        facts = (
            str(here.stage),
            str(there.replicas),
            f"{there.pace:,.0f}" if there.pace is not None else "-",
            least,
            size(memory_needed(manifest, here.stage)),
            here.fits,
        )
        if here.why:
            table.add_row(*facts, "-", "-", "-", "-")
            continue
        carries = f"{here.carries:,.0f}" if here.carries < float("inf") else "-"
        moved = (f"{nbytes / 1e6:,.0f}" for nbytes in (here.sent, here.received))
        table.add_row(*facts, f"{here.computes:,.0f}", carries, *moved)
    return table


def sentences(
    visit: Visit,
    machine: Resources,
    links: AssumedLinks,
    stages: Sequence[StageHere],
    named: NamedLinks,
    watts: float,
) -> dict[str, str]:
    """Say, by subject, what the table leaves out: this machine, its links, why a stage does not fit, power."""
    device, room = machine.device, machine.room
    said = {
        "machine": f"{size(max(0, room.free))} are free{room.described()}"
        + (f" on the GPU, {size(max(0, machine.host.free))} beside it" if device.is_gpu else "")
        + f", {size(machine.disk)} of disk here; {device.tflops:.3g} TFLOPS measured in a layer of this model.",
        "links": _links(visit, links, named),
    }
    taken = [stage for stage in stages if not stage.why]
    if not taken:
        said["fits"] = f"No stage. {stages[0].why}"
    elif len(taken) < len(stages):
        refused = next(stage for stage in stages if stage.why)
        said["fits"] = f"{len(taken)} of {len(stages)} stages. {refused.why}"
    if taken:
        said["limits"] = _limited(taken)
    if load := watts or device.watts:
        kwh = load / 1000
        said["power"] = f"{kwh:.2f} kWh an hour at full load of {load:.0f} W, {kwh * DAY:.1f} kWh a day."
    else:
        said["power"] = "not known: name the machine's --watts."
    return said


def _links(visit: Visit, links: AssumedLinks, named: NamedLinks) -> str:
    if named.upload is not None:
        up = "as you say"
    elif visit.upload is not None:
        up = "or more, measured to members"
    else:
        up = "assumed: no member answered probes; name it with --uplink"
    down = "as you say" if named.download is not None else "taken to be the same; name it with --downlink"
    trip = f" Round trip {1e3 * visit.round_trip:.0f} ms." if visit.round_trip is not None else ""
    return f"{links.up() * 8e-6:.1f} Mbit/s up ({up}), {links.down() * 8e-6:.1f} Mbit/s down ({down}).{trip}"


def _limited(taken: Sequence[StageHere]) -> str:
    by_links = [str(stage.stage) for stage in taken if stage.carries < stage.computes]
    if not by_links:
        return "computing, at every stage that fits."
    if len(by_links) == len(taken):
        return "the link, at every stage that fits."
    return f"the link at stage {', '.join(by_links)}, computing at the others."
