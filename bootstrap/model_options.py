"""What the commands around a model share: options, and the run's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.observer import Observer
from node.data.tokenizer_exchange import RunTokenizer
from protocol.manifest import BYTES

Join = Annotated[list[str] | None, typer.Option(help="Address of any member of the run.")]
ModelDirectory = Annotated[Path | None, typer.Option(help="Directory of an export, instead of --join.")]
TokenizerFile = Annotated[
    str, typer.Option("--tokenizer", help="The run's tokenizer.json, where no member gives it.")
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Text, JSONL or parquet files or globs, a dataset directory or hub:NAME, not the run's own."
    ),
]
TextFieldOption = Annotated[str, typer.Option(help="Where JSONL, parquet and datasets have the text.")]


async def tokenizer_file(observer: Observer, own: str) -> bytes | None:
    """The run's tokenizer.json, `own` where that is named, else from members; None where bytes are tokens.

    Raises `TokenizerError` when it is not the run's, or nobody gives it.
    """
    if observer.manifest.data.tokenizer == BYTES:
        return None
    await observer.look()
    tokenizer = RunTokenizer(observer.manifest, observer.rpc, observer.view, own=own)
    await tokenizer.get()
    return tokenizer.raw
