"""`noloco swarm`: its options, and words from its first second on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootstrap.display import require_places, say
from bootstrap.export.folder import require_free
from bootstrap.from_lab import from_lab
from bootstrap.local import SUMMARY
from bootstrap.local.page import open_page, require_place
from bootstrap.model_options import (
    DataOption,
    EndOfText,
    FromCheckpoint,
    OwnManifest,
    PresetToTrain,
    RunTokenizer,
    TextFieldOption,
)
from node.command import fail, run_async
from node.data.sources import DEFAULT_FIELD
from node.machine.named import Use
from node.machine.open_files import take_open_files
from protocol.errors import INTERRUPTED, NolocoError, StateError
from protocol.files.folders import lasting_folder, short_temporary_folder

if TYPE_CHECKING:
    from rich.console import Console

    from bootstrap.local.nodes import LocalPlan
    from bootstrap.local.progress import StatusLine

STEPS = 1000
CHAOS_STEPS = 20_000  # more than ten minutes are enough for: the runs end by the clock
SET_IN = " " * 17  # below the labels of the summary
PRELOADED = "bootstrap.local.preloaded"
DISTURBED = "bootstrap.lab.chaos.faults"  # imported first of all: see there


Stages = Annotated[int | None, typer.Option(min=1, help="Pipeline stages; default: the manifest's.")]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Inner steps; default: 1000."),
]
Directory = Annotated[
    Path | None,
    Use.WRITE_FOLDER,
    typer.Option("--state-dir", "--dir", help="Where to keep all; default: a new folder."),
]
HeldOut = Annotated[int, typer.Option(min=1, help="Held-out sequences to measure on.")]
TraceFile = Annotated[
    Path | None,
    Use.WRITE_FILE,
    typer.Option(help="All nodes' timing, for ui.perfetto.dev."),
]
SummaryFile = Annotated[
    Path | None,
    Use.WRITE_FILE,
    typer.Option(help="File to write the summary to; default: beside the export."),
]
Devices = Annotated[
    str,
    typer.Option(help="Of the nodes, in turn: auto, cpu, all, or a list as cuda:0,cuda:1."),
]
Dashboard = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Of the web page; none: no page; default: a free port."),
]
Chaos = Annotated[
    int | None,
    typer.Option(metavar="SEED", help="Train again with faults, and compare."),
]


def swarm(
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Replicas per stage.")] = 3,
    stages: Stages = None,
    preset: PresetToTrain = None,
    manifest: OwnManifest = None,
    data: DataOption = None,
    text_field: TextFieldOption = DEFAULT_FIELD,
    tokenizer: RunTokenizer = "",
    end_of_text: EndOfText = "",
    from_checkpoint: FromCheckpoint = None,
    steps: Steps = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Stop training after this many minutes.")] = 5.0,
    directory: Directory = None,
    summary: SummaryFile = None,
    picture: Annotated[
        Path | None, Use.WRITE_FILE, typer.Option(help="Save the last table as an SVG file.")
    ] = None,
    validation_sequences: HeldOut = 256,
    trace: TraceFile = None,
    device: Devices = "auto",
    dashboard: Dashboard = "",
    chaos: Chaos = None,
) -> None:
    """Train a model with a swarm of real peers on this machine.

    At the end it is measured and exported.

    Example: noloco swarm --data 'books/*.txt' --replicas 2
    """
    try:
        require_place(dashboard)
        if summary is None and directory is not None:
            require_summary(directory / SUMMARY)
        for place in () if directory is None else _exports_in(directory, chaos):
            require_free(place, "--state-dir")
        for name, file in (("summary", summary), ("picture", picture), ("trace", trace)):
            require_places(file, advice=f"Choose another file with --{name}.")
        take_open_files()
    except NolocoError as error:
        fail(error)
    with _started(chaos, dashboard) as (console, progress, listening):
        import torch

        from bootstrap.creating.choosing import RunOptions
        from bootstrap.local.devices import devices_told
        from bootstrap.local.nodes import LocalPlan

        torch.set_num_threads(1)  # the nodes need the cores
        steps = steps or (STEPS if chaos is None else CHAOS_STEPS)
        try:
            run, raw = RunOptions(
                preset, manifest, tokenizer, end_of_text, from_checkpoint, stages, steps
            ).resolved()
            devices, told = devices_told(device)
        except NolocoError as error:
            fail(error)
        say(console, told)
        place = directory or lasting_folder("noloco-swarm-")
        plan = LocalPlan(
            run, replicas, place, minutes, validation_sequences, summary or place / SUMMARY, picture, trace,
            data=tuple(data or ()), text_field=text_field, tokenizer=raw, from_checkpoint=from_checkpoint,
            devices=devices,
            listening=listening,
            page_named=dashboard,
        )  # fmt: skip
        complete = _train(plan, console, progress, chaos)
    if not complete:
        sys.exit(INTERRUPTED)


def require_summary(file: Path) -> None:
    """Refuse to replace a file that nobody named and that is no summary of a swarm. Raises `StateError`."""
    try:
        found = json.loads(file.read_bytes()) if file.exists() else {"preset": ""}
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or "preset" not in found:
        raise StateError(f"{file} is not the summary of a swarm. Name another file with --summary.")


def _exports_in(directory: Path, chaos: int | None) -> list[Path]:
    """The folders of the exports that the swarms will make at the end."""
    swarms = [directory] if chaos is None else [directory / "undisturbed", directory / "disturbed"]
    return [swarm / "export" for swarm in swarms]


@contextmanager
def _started(chaos: int | None, dashboard: str) -> Iterator[tuple[Console, StatusLine, socket.socket | None]]:
    """Print the first lines, and start the process that nodes are forked from, which imports torch meanwhile.

    The socket is the one for the page, None without a page.
    """
    from rich.console import Console

    from bootstrap.local.progress import LineInPlace, StatusLine

    console = Console(markup=False)
    console.print("Starting a swarm on this machine. Ctrl-C ends it.")
    told = partial(say, console)
    try:
        _begin_preloading(*([] if chaos is None else [DISTURBED]))  # before torch is imported here
        listening = open_page(dashboard, told)
    except NolocoError as error:
        fail(error)
    in_place = LineInPlace(console) if console.is_terminal and not console.is_dumb_terminal else None
    with listening or nullcontext(), StatusLine(told, in_place) as progress:
        progress.doing("importing torch")
        yield console, progress, listening


def _begin_preloading(*before: str) -> None:
    """Start the process that nodes will be forked from; it imports the modules `before` and `PRELOADED`.

    Returns at once. To be called before this process imports anything large, so that both import at the same time.
    Raises `ResourceError` where no folder can have that process's socket.
    """
    from multiprocessing import forkserver

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads must not fork
    multiprocessing.set_forkserver_preload([*before, PRELOADED])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a Ctrl-C is for this process alone
    try:
        with short_temporary_folder():
            forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    # Until the swarm has begun: whoever ends it leaves no folder of that process behind
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _train(plan: LocalPlan, console: Console, progress: StatusLine, chaos: int | None) -> bool:
    """Train and print what was measured; returns whether the run is complete or had all its time."""
    from bootstrap.local.swarm import run_swarm

    if chaos is not None:
        report = run_async(from_lab("chaos.chaos:run_both")(plan, console, progress, chaos))
        say(console, *report.lines())
        return bool(report.complete)
    result, had_its_time = run_async(run_swarm(plan, console, progress))
    say(console, *result.lines(), later=SET_IN)
    if result.validation_loss:
        say(console, f"summary          {plan.summary}", later=SET_IN)
    return had_its_time
