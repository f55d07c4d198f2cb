"""What is asked of an export, and whether it can be had: known before anybody is asked for anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ResourceError, StateError, UserError
from protocol.transport.base import PeerId

PARTIAL = "partial"  # the folder in the export in which it is made
FACTS = "noloco.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # and what torch calls them
DEFAULT_SHARD = "2GB"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class ExportOrder:
    """What the export is to be. With `route` of that replica of each stage, else of any, or of the mean."""

    directory: Path
    mean: bool = False
    dtype: str = "fp32"
    shard_size: str = DEFAULT_SHARD
    route: Sequence[PeerId] = ()
    validation_loss: float | None = None


def check_order(order: ExportOrder) -> None:
    """Raises `UserError` for what cannot be; before anybody is asked for anything. Leaves nothing behind."""
    directory = order.directory
    shard_bytes(order.shard_size)
    if order.dtype not in DTYPES:
        raise ResourceError(f"There is no --dtype {order.dtype!r}. Choose one of: {', '.join(DTYPES)}.")
    if directory.exists() and not directory.is_dir():
        raise StateError(f"{directory} is a file. Choose a directory for the model with --out.")
    if (directory / "config.json").exists() and not (directory / FACTS).exists():
        raise StateError(
            f"{directory} holds a model that is no export of a run. Choose another --out; nothing was changed."
        )
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip().upper())
    if match is None or not float(match[1]):
        raise UserError(f"{text!r} is no size of a file. Write --shard-size 2GB, or 500MB.")
    return int(float(match[1]) * _UNITS[match[2]])
