"""`noloco watch`: the curves of a run, as any member tells them, written for other programs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bootstrap.dashboard.board import Board, Point
from bootstrap.dashboard.collector import IDLE_SECONDS, Audience
from bootstrap.dashboard.running import watched
from bootstrap.display import writing
from bootstrap.inspect.observer import visit
from node.machine.limits import optional
from node.machine.processes import on_interrupt
from node.watch.words import print_wrapped
from protocol.files.keeping import descriptor_of
from protocol.supervision import until_event

Write = Callable[[Point], None]


@dataclass(frozen=True)
class Destinations:
    tensorboard: Path | None = None
    wandb: str | None = None
    events: Path | None = None


def curves_of(point: Point) -> dict[str, float]:
    """The values known at that moment, by the names that TensorBoard and Weights & Biases group by."""
    values = {
        "learning/loss": point.loss,
        "replicas/spread": point.spread,
        "replicas/predicted_spread": point.expected,
        "speed/tokens_per_second": point.rate,
        "swarm/members": float(point.members),
    }
    return {name: value for name, value in values.items() if value is not None}


async def follow(join: Sequence[str], token: str, destinations: Destinations, seconds: float) -> None:
    """Write a point every `seconds` until told to stop.

    Raises `UserError` without the extra, `StateError` when nothing can be written, and as `visit`.
    """
    leaving = asyncio.Event()
    on_interrupt(lambda _: leaving.set())
    with ExitStack() as open_:
        writers = [open_.enter_context(writer) for writer in _writers(destinations)]
        # looked at as often as a page that nobody watches, or as points are written, if that is more often
        audience = Audience(watchers=1 if seconds < IDLE_SECONDS else 0)
        async with visit(join, token) as observer, watched(observer, audience) as board:
            print_wrapped(
                f"Following run '{board.run['name']}' every {seconds:g} s. Ctrl-C stops it; the run goes on."
            )
            await until_event(_write_for_ever(board, writers, seconds), leaving)


async def _write_for_ever(board: Board, writers: Sequence[Write], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        if board.now.members:
            for write in writers:
                write(board.now)


def _writers(destinations: Destinations) -> Iterator[AbstractContextManager[Write]]:
    if destinations.tensorboard is not None:
        yield to_tensorboard(destinations.tensorboard)
    if destinations.wandb is not None:
        yield to_wandb(destinations.wandb)
    if destinations.events is not None:
        yield to_file(destinations.events)


@contextmanager
def to_tensorboard(directory: Path) -> Iterator[Write]:
    """Event files; the step of a point is the tokens trained until then. Raises `UserError` without the extra."""
    optional("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with writing(directory, "Name another --tensorboard."):
        writer = SummaryWriter(str(directory))

    def write(point: Point) -> None:
        for name, value in curves_of(point).items():
            writer.add_scalar(name, value, point.tokens, walltime=point.time)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def to_wandb(project: str) -> Iterator[Write]:
    """A run in that project, logged in as wandb's own settings say. Raises `UserError` without the extra."""
    wandb = optional("wandb", "wandb")
    run = wandb.init(project=project)
    try:
        yield lambda point: run.log(curves_of(point) | {"tokens": point.tokens})
    finally:
        run.finish()


@contextmanager
def to_file(file: Path) -> Iterator[Write]:
    """One JSON object a line, with the fields of `Point`, appended; "-" is standard output."""
    if str(file) == "-":
        yield lambda point: print(json.dumps(point._asdict()), file=sys.stdout, flush=True)
        return
    with writing(file, "Name another --events."):
        lines = os.fdopen(descriptor_of(file), "a", encoding="utf-8", buffering=1)
    with lines:
        yield lambda point: print(json.dumps(point._asdict()), file=lines)
