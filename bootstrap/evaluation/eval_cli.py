"""`noloco eval`: loss, perplexity and bits per byte, of an export or of a running swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.model_options import (
    AccessToken,
    DataOption,
    Join,
    ModelDirectory,
    TextFieldOption,
    TokenizerFile,
)
from node.command import doing, fail, run_async
from node.data.sources import DEFAULT_FIELD
from node.machine.limits import require_cache_size
from node.machine.named import Use
from protocol.errors import NolocoError, UserError


def evaluate(
    model: ModelDirectory = None,
    join: Join = None,
    token: AccessToken = "",
    data: DataOption = None,
    text_field: TextFieldOption = DEFAULT_FIELD,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Use only the part of --data that the run holds out.")
    ] = False,
    data_cache: Annotated[
        Path | None,
        Use.WRITE_FOLDER,
        typer.Option(help="Directory for prepared documents with --held-out; defaults to the user's cache."),
    ] = None,
    cache_size: Annotated[
        str,
        typer.Option(help="Limit for prepared documents; default: the smaller of 20GB and 10% of the disk."),
    ] = "",
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of sequences; default: 256 held-out or all of --data."),
    ] = None,
    every_replica: Annotated[
        bool, typer.Option("--every-replica", help="Evaluate every replica instead of one per stage.")
    ] = False,
    tokenizer: TokenizerFile = "",
) -> None:
    """Measure loss, perplexity and bits per byte.

    Of an export or of a run. Without --data on text that the run holds out; --data files are measured whole.

    Example: noloco eval --join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…
    """
    if (model is None) == (not join):
        fail(UserError("Name the model: --model DIRECTORY of an export, or --join ADDRESS of a run."))
    if model is not None:
        _require_of_export(tokenizer, every_replica=every_replica)
    try:
        require_cache_size(cache_size)
    except ValueError as error:
        fail(UserError(f"--cache-size: {error}."))
    doing("Getting ready to measure")
    from bootstrap.evaluation.measuring import WantedLosses, evaluate_export, evaluate_swarm
    from node.data.opening import default_cache

    cache = data_cache or default_cache()
    wanted = WantedLosses(tuple(data or ()), text_field, held_out, sequences, cache, cache_size)
    if model is None:
        run_async(evaluate_swarm(join or [], token, wanted, every_replica, tokenizer))
        return
    try:
        evaluate_export(model, wanted)
    except NolocoError as error:
        fail(error)


def _require_of_export(tokenizer: str, *, every_replica: bool) -> None:
    """End the command for an option that is of a run, and would have no effect."""
    for option, given in (("--tokenizer", tokenizer), ("--every-replica", every_replica)):
        if given:
            fail(UserError(f"{option} is for a running swarm (--join). An export has its own: leave it out."))
