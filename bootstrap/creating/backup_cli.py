"""`noloco backup`: a directory's keys and settings in one file under a passphrase, and back."""

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


def backup(
    file: Annotated[Path, Use.WRITE_FILE, typer.Argument(help="File to write; with --restore, to read.")],
    directory: Annotated[
        Path, Use.WRITE_FOLDER, typer.Option("--state-dir", help="A run's directory, or a node's.")
    ] = RUN_DIRECTORY,
    restore: Annotated[bool, typer.Option("--restore", help="Write the file's contents there.")] = False,
    passphrase_file: Annotated[
        Path | None,
        Use.READ_FILE,
        typer.Option(
            help="File whose first line is the passphrase; asked for otherwise.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a directory's keys and small files to one, or back.

    The file is under a passphrase. It has no states of stages: other members have those. Keep it on another machine.

    Example: noloco backup my-run.backup
    """
    try:
        if restore:
            _restore(file, directory, _passphrase(passphrase_file, is_new=False))
        else:
            _write(file, directory, passphrase_file)
    except NolocoError as error:
        fail(error)


def _write(file: Path, directory: Path, passphrase_file: Path | None) -> None:
    from bootstrap.creating.backup import KEYS, gather, sealed

    if is_there(file):
        raise UserError(f"{file} exists already. {ADVICE}")
    require_places(file, advice=ADVICE)
    made = gather(directory)
    contents = sealed(made, _passphrase(passphrase_file, is_new=True))
    write_whole(file, contents, ADVICE, FOR_ITS_OWNER)
    print_wrapped(f"Wrote {file}: {len(made.files)} files of {made.of}, {len(contents):,} bytes.")
    for name in made.keys:
        print_wrapped(f"  {name} {KEYS[name]}.")


def _restore(file: Path, directory: Path, passphrase: str) -> None:
    from bootstrap.creating.backup import NODE_KEY, opened, restore

    doing("Opening the backup")
    found = opened(file, passphrase)
    restore(found, directory)
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
            raise UserError(f"Cannot read {file} ({error}). Check --passphrase-file.") from None
    if not sys.stdin.isatty():
        raise UserError(
            "There is no terminal to ask for the passphrase. Give it with --passphrase-file FILE."
        )
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new))
