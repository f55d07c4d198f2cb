"""`noloco export`: its options, which are looked at before anything is imported that takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.export.order import DEFAULT_SHARD, ExportOrder, check_order
from bootstrap.model_options import AccessToken, Join, TokenizerFile
from node.command import doing, fail, run_async
from node.machine.named import Use
from protocol.errors import NolocoError


def export(
    out: Annotated[Path, Use.WRITE_FOLDER, typer.Option(help="Directory to write the checkpoint to.")],
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
    """Write a Hugging Face checkpoint of a run, finished or not.

    Started again with the same --out, an export that was cut short goes on where it stopped.

    Example: noloco export --out model --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    order = ExportOrder(out, mean, dtype, shard_size)
    try:
        check_order(order)
    except NolocoError as error:
        fail(error)
    doing("Getting ready to export")
    from bootstrap.export.exporting import export_swarm

    run_async(export_swarm(join or [], token, order, tokenizer))
