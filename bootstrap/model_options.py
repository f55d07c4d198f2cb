"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Join = Annotated[list[str] | None, typer.Option(help="Address of any member of the run.")]
PresetToTrain = Annotated[str | None, typer.Option(help="Preset to train; default: tiny.")]
OwnManifest = Annotated[Path | None, typer.Option(help="A manifest of your own (TOML).")]
RunTokenizer = Annotated[
    str, typer.Option(help="The run's tokenizer.json, or hub:NAME; default: bytes are tokens.")
]
FromCheckpoint = Annotated[
    str | None, typer.Option(help="Start from this Hugging Face model: a directory, or a hub name.")
]
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
