"""The states of stages that lie in a node's, or seed peer's, directory, for `noloco doctor --self`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from bootstrap.display import plain_table
from node.machine.limits import size
from node.storage.checkpoint_files import COPIES, OF_ONE_STAGE, OLDER_NAME, PATTERN, header_of
from node.watch.words import duration
from protocol.errors import StateError


def states_table(directory: Path, now: float) -> Table | None:
    """The table of the checkpoints and copies in the directory, at wall clock `now`; None without any."""
    rows = [*_rows(directory, "served here", now), *_rows(directory / COPIES, "copy of others'", now)]
    if not rows:
        return None
    headings = ("stage", "what", "step", "saved", "size")
    table = plain_table(f"states kept in {directory}", headings, left=("what",))
    for row in rows:
        table.add_row(*row)
    return table


def _rows(directory: Path, what: str, now: float) -> Iterator[tuple[str, str, str, str, str]]:
    for path in sorted([*directory.glob(PATTERN), *directory.glob(OF_ONE_STAGE)]):
        try:
            kept = header_of(path)
        except StateError:
            yield "?", f"damaged: {path.name}", "-", "-", "-"
            continue
        is_older = OLDER_NAME.fullmatch(path.name) is not None
        of = f"{what}, set aside: of an older lineage" if is_older else what
        age = f"{duration(max(1.0, now - kept.saved))} ago" if kept.saved else "-"
        yield str(kept.stage), of, f"{kept.step:,}", age, size(kept.nbytes)
