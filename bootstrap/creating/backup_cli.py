"""`noloco backup` and `restore`: a directory's keys and settings in one file under a passphrase, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.creating.invitation import RUN_DIRECTORY
from bootstrap.display import require_places, write_whole
from node.command import doing, fail
from node.machine.named import Use, is_there
from node.watch.words import print_wrapped
from protocol.errors import NolocoError, UserError
from protocol.files.keeping import FOR_ITS_OWNER

ADVICE = "Choose another file."
PassphraseFile = Annotated[
    Path | None,
    Use.READ_FILE,
    typer.Option(
        help="Take the passphrase from this file's first line instead of asking.", show_default=False
    ),
]


def backup(
    file: Annotated[Path, Use.WRITE_FILE, typer.Argument(help="File to write.")],
    directory: Annotated[
        Path, Use.READ_FOLDER, typer.Option("--state-dir", help="A run's directory, or a node's.")
    ] = RUN_DIRECTORY,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Write a directory's keys and settings to one file, under a passphrase.

    What else is there, as the states of stages, other members have. Keep the file on another machine.

    Example: noloco backup my-run.backup
    """
    from bootstrap.creating.backup import KEYS, gather, sealed

    try:
        if is_there(file):
            raise UserError(f"{file} exists already. {ADVICE}")
        require_places(file, advice=ADVICE)
        made = gather(directory)
        contents = sealed(made, _passphrase(passphrase_file, is_new=True))
        write_whole(file, contents, ADVICE, FOR_ITS_OWNER)
    except NolocoError as error:
        fail(error)
    print_wrapped(
        f"Wrote {file}: {len(made.files)} files of {made.run or 'a node without a run'}, {len(contents):,} bytes."
    )
    for name in made.keys:
        print_wrapped(f"  {name} {KEYS[name]}.")


def restore(
    file: Annotated[Path, Use.THERE_FILE, typer.Argument(help="File that noloco backup wrote.")],
    directory: Annotated[
        Path, Use.WRITE_FOLDER, typer.Option("--state-dir", help="Directory to write into.")
    ] = RUN_DIRECTORY,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Write the files of a backup into a directory that has none of them.

    Example: noloco restore my-run.backup
    """
    from bootstrap.creating.backup import NODE_KEY, opened
    from bootstrap.creating.backup import restore as write

    try:
        passphrase = _passphrase(passphrase_file, is_new=False)
        doing("Opening the backup")
        found = opened(file, passphrase)
        write(found, directory)
    except NolocoError as error:
        fail(error)
    print_wrapped(f"Restored {len(found.files)} files of {found.of} into {directory}.")
    command = "noloco-node" if NODE_KEY in found.files else "noloco found"
    print_wrapped(f"Start it again with: {command} --state-dir {directory}")
    print_wrapped("Not while the old machine runs: two peers under one key take each other's place.")


def _passphrase(file: Path | None, *, is_new: bool) -> str:
    """The passphrase: of a file, or asked for; a new one twice. Raises `UserError`."""
    if file is not None:
        try:
            with file.open(encoding="utf-8") as there:
                return there.readline(4_096).rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot read the passphrase in {file} ({error}). Check --passphrase-file."
            ) from None
    if not sys.stdin.isatty():
        raise UserError(
            "There is no terminal to ask for the passphrase. Give it with --passphrase-file FILE."
        )
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new))
