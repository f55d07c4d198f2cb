"""The losses that a local swarm measures beside its training, as `summary.json` has them, for the loss chart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from bootstrap.dashboard.board import Measured
from bootstrap.dashboard.collector import Audience
from node.machine.processes import in_background

READ_SECONDS = 5.0  # between two readings while somebody watches
MOST_BYTES = 8 * 2**20  # of a summary; one of a hundred nodes has some hundred kilobytes
MOST_MEASURED = 1_000  # points that are shown, the latest ones
LATEST = 1e11  # wall clock, seconds: no later time is one


def measured_in(file: Path, run_id: str) -> Measured | None:
    """Return the losses of a swarm's summary; None where it is of another run, or no summary of this version."""
    try:
        with file.open("rb") as opened:
            said = json.loads(opened.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not run_id or said.get("run_id") != run_id:
        return None
    began, told = _number(said.get("began")), said.get("validation_loss")
    if not began or not isinstance(told, list):
        return None
    points = [point for entry in told[-MOST_MEASURED:] if (point := _point(entry, began)) is not None]
    return Measured(
        held_out=said.get("is_held_out") is not False,
        points=points,
        bigram=_number(said.get("bigram_entropy")),
    )


def _point(entry: object, began: float) -> tuple[float, int, float] | None:
    """The point of [tokens, seconds, nats]; None for anything else."""
    if not isinstance(entry, list) or len(entry) != 3:
        return None
    tokens, seconds, nats = map(_number, entry)
    if tokens is None or seconds is None or nats is None:
        return None
    return round(min(began + seconds, LATEST), 3), int(tokens), nats


def _number(value: object) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_one and 0 <= value < 1e15 and math.isfinite(value) else None  # type: ignore[arg-type, operator]


async def follow_measured(
    file: Path, run_id: str, note: Callable[[Measured], None], audience: Audience
) -> None:
    """Note the losses of a swarm that runs, for ever, while somebody watches."""
    while True:
        await audience.somebody()
        found = await in_background("measured losses", measured_in, file, run_id)
        if found is not None:
            note(found)
        await audience.rest(READ_SECONDS, 2 * READ_SECONDS)
