"""The order of an export, and the check that it can be met, made before anybody is asked for anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bootstrap.export.folder import PARTIAL, require_free
from node.machine.limits import parse_size
from protocol.errors import ResourceError, StateError, UserError
from protocol.ground import PeerId

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # and what torch calls them
DEFAULT_SHARD = "2GB"
LEAST_SHARD = 1_000  # bytes: less is a size whose unit was forgotten


@dataclass(frozen=True)
class ExportOrder:
    """An order to export the replicas of `route` if it is given, else any replica of each stage, or their mean."""

    directory: Path
    mean: bool = False
    dtype: str = "fp32"
    shard_size: str = DEFAULT_SHARD
    route: Sequence[PeerId] = ()
    validation_loss: float | None = None


def check_order(order: ExportOrder) -> None:
    """Refuse an order that cannot be met, before any peer is asked. Raises `UserError`. Leaves nothing behind."""
    directory = order.directory
    shard_bytes(order.shard_size)
    if order.dtype not in DTYPES:
        raise ResourceError(f"There is no --dtype {order.dtype!r}. Choose one of: {', '.join(DTYPES)}.")
    if directory.exists() and not directory.is_dir():
        raise StateError(f"{directory} is a file. Choose a directory for the model with --out.")
    require_free(directory)
    partial = directory / PARTIAL
    made = [folder for folder in [partial, *partial.parents] if not folder.exists()]
    try:
        partial.mkdir(parents=True, exist_ok=True)
        probe = partial / "writable"
        probe.touch()
        probe.unlink()
        for folder in made:
            folder.rmdir()
    except OSError as error:
        raise StateError(f"Cannot write to {directory} ({error.strerror}). Choose another --out.") from None


def shard_bytes(text: str) -> int:
    """Bytes of "2GB" or "500MB". Raises `UserError`."""
    with suppress(ValueError):
        if (found := parse_size(text)) >= LEAST_SHARD:
            return found
    raise UserError(f"{text!r} is not a size of a file. Write --shard-size 2GB, or 500MB.")
