"""`noloco export`: what is asked for, and whether it can be made, known before anybody is asked for anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import AccessToken, Join, TokenizerFile
from node.command import fail, run_async
from node.machine.limits import parse_size
from protocol.errors import NolocoError, ResourceError, StateError, UserError
from protocol.transport.base import PeerId

PARTIAL = "partial"  # the folder in the export in which it is made
FACTS = "noloco.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # and what torch calls them
DEFAULT_SHARD = "2GB"
LEAST_SHARD = 1_000  # bytes: less is a size whose unit was forgotten


def export(
    out: Annotated[Path, typer.Option(help="Directory to write the checkpoint to.")],
    join: Join = None,
    token: AccessToken = "",
    mean: Annotated[
        bool,
        typer.Option(
            "--mean",
            help="Export the mean of all replicas of a stage at one round instead of a single replica.",
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="Data type of the checkpoint: fp32 or bf16.")] = "fp32",
    shard_size: Annotated[str, typer.Option(help="Maximum file size, such as 2GB or 500MB.")] = DEFAULT_SHARD,
    tokenizer: TokenizerFile = "",
) -> None:
    """Write a Hugging Face checkpoint of a running or finished swarm.

    Started again with the same --out, an export that was cut short goes on where it stopped.

    Example: noloco export --out model --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    order = ExportOrder(out, mean, dtype, shard_size)
    try:
        check_order(order)
    except NolocoError as error:
        fail(error)
    from bootstrap.export.exporting import export_swarm

    run_async(export_swarm(join or [], token, order, tokenizer))


@dataclass(frozen=True)
class ExportOrder:
    """What to export: the replicas of `route` if it is given, else any replica of each stage, or their mean."""

    directory: Path
    mean: bool = False
    dtype: str = "fp32"
    shard_size: str = DEFAULT_SHARD
    route: Sequence[PeerId] = ()
    validation_loss: float | None = None


def check_order(order: ExportOrder) -> None:
    """Raises `UserError` for an order that cannot be met, before any peer is asked. Leaves nothing behind."""
    directory = order.directory
    shard_bytes(order.shard_size)
    if order.dtype not in DTYPES:
        raise ResourceError(f"There is no --dtype {order.dtype!r}. Choose one of: {', '.join(DTYPES)}.")
    if directory.exists() and not directory.is_dir():
        raise StateError(f"{directory} is a file. Choose a directory for the model with --out.")
    if (directory / "config.json").exists() and not (directory / FACTS).exists():
        raise StateError(f"{directory} holds a model, not an export of a run. Choose another --out.")
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
