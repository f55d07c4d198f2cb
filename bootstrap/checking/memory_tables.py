"""The memory of each stage and the speed of named devices, as tables of `noloco manifest check`."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from bootstrap.checking.devices import DeviceReport
from node.machine.limits import size
from node.model.memory_model import (
    BufferBytes,
    MicrobatchBytes,
    estimated,
    least_in_flight,
    memory_of_buffers,
    memory_of_state,
)
from node.model.resources import least_memory, memory_needed
from protocol.manifest import Manifest

FITS = {"whole": "", "smaller": " *", "no": "does not fit"}


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of one replica of a stage, in float32: `whole` at its fastest, `least` with everything that saves memory.

    `microbatch` is what one takes; `in_flight` of them keep all stages busy.
    """

    state: int
    buffers: BufferBytes
    microbatch: MicrobatchBytes
    in_flight: int
    whole: int
    least: int


def memory_figures(manifest: Manifest, stage: int) -> MemoryFigures:
    return MemoryFigures(
        state=memory_of_state(manifest, stage),
        buffers=memory_of_buffers(manifest, stage),
        microbatch=estimated(manifest, stage, manifest.inner.sequences, recomputes=False),
        in_flight=least_in_flight(manifest, stage),
        whole=memory_needed(manifest, stage),
        least=least_memory(manifest, stage),
    )


def memory_table(figures: list[MemoryFigures]) -> Table:
    headings = (
        "stage",
        "weights,\nmomenta",
        "averaging",
        "checkpoint",
        "messages",
        "a microbatch\nkept, at work",
        "in\nflight",
        "together",
        "at least",
    )
    table = _table(
        "Memory of one replica, in float32; with a GPU, averaging to messages are the host's:", headings
    )
    for stage, each in enumerate(figures):
        cost, buffers = each.microbatch, each.buffers
        parts = (each.state, buffers.averaging, buffers.checkpoint, buffers.messages)
        table.add_row(
            str(stage),
            *map(size, parts),
            f"{size(cost.kept)}, {size(cost.peak)}",
            str(each.in_flight),
            size(each.whole),
            size(each.least),
        )
    return table


def device_table(reports: list[DeviceReport]) -> Table:
    """One row for each device: tokens a second of one replica of each stage, and of a pipeline of such devices."""
    stages = range(len(reports[0].stages))
    headings = ("device", "memory", "TFLOPS", "used", *(f"stage {stage}" for stage in stages), "pipeline")
    table = _table("Tokens a second of one replica that waits for nobody:", headings)
    for report in reports:
        device = report.device
        speeds = [
            FITS["no"] if speed.fits == "no" else f"{speed.tokens_per_second:,.0f}{FITS[speed.fits]}"
            for speed in report.stages
        ]
        table.add_row(
            device.name,
            f"{device.memory:.0f} GB",
            f"{device.tflops:.3g}",
            "measured" if device.efficiency == 1.0 else f"{device.efficiency:.0%}",
            *speeds,
            f"{report.slowest:,.0f}" if report.slowest else "-",
        )
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="underline")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
