"""What the commands around a model share: options, and the run's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootstrap.observer import Observer
from node.data.tokenizer import read_tokenizer
from protocol.manifest import BYTES

Join = Annotated[list[str] | None, typer.Option(help="Address of any member of the run.")]
ModelDirectory = Annotated[Path | None, typer.Option(help="Directory of an export, instead of --join.")]
TokenizerFile = Annotated[
    str | None, typer.Option("--tokenizer", help="The run's tokenizer.json, where no member has it.")
]


async def raw_tokenizer(observer: Observer, place: str | None) -> bytes | None:
    """The run's tokenizer.json; None where bytes are tokens."""
    if observer.manifest.data.tokenizer == BYTES or place is None:
        return None
    return read_tokenizer(place)
