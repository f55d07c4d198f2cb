"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.machine.named import Use

Join = Annotated[list[str] | None, typer.Option(help="Address of any member of the run.")]
AccessToken = Annotated[
    str, typer.Option("--token", envvar="NOLOCO_TOKEN", help="Token of a private run.", show_default=False)
]
PresetToTrain = Annotated[str | None, typer.Option(help="Preset to train; default: tiny.")]
OwnManifest = Annotated[Path | None, Use.THERE_FILE, typer.Option(help="Your own manifest (TOML).")]
RunTokenizer = Annotated[
    str, Use.READ, typer.Option(help="The run's tokenizer.json, or hub:NAME; default: bytes are tokens.")
]
EndOfText = Annotated[str, typer.Option(help="The tokenizer's end-of-text token, if unusual.")]
FromCheckpoint = Annotated[
    str | None,
    Use.CHECKPOINT,
    typer.Option(help="Model to start from: a directory or a hub name."),
]
ModelDirectory = Annotated[
    Path | None, Use.READ_FOLDER, typer.Option(help="Directory of an exported model, instead of --join.")
]
TokenizerFile = Annotated[
    str, Use.READ, typer.Option("--tokenizer", help="The run's tokenizer.json, if no member can send it.")
]
DataOption = Annotated[
    list[str] | None,
    Use.TEXT,
    typer.Option(
        help="Use this text instead of the run's own: files or globs, a dataset directory or hub:NAME."
    ),
]
TextFieldOption = Annotated[
    str,
    typer.Option(help="Field of a row that holds the text or a chat, as answer.text."),
]
