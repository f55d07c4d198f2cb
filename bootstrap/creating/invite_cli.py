"""`noloco invite`, `delegate` and `revoke`: who may come into a private run, and who may not any more."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.creating.invitation import RUN_DIRECTORY
from bootstrap.model_options import Join
from node.command import fail, run_async
from node.machine.named import Use
from node.watch.words import print_wrapped
from protocol.access.tokens import MAX_USES
from protocol.errors import NolocoError, UserError

Directory = Annotated[
    Path, Use.READ_FOLDER, typer.Option("--state-dir", "--dir", help="The run's, with run.key and manifest.")
]
MOST_DAYS = 100_000  # so that it ends within `protocol.ground.MOST_TIME`
Days = Annotated[float, typer.Option(min=0.001, max=MOST_DAYS, help="Days until it expires.")]


def invite(
    uses: Annotated[int, typer.Option(min=1, max=MAX_USES, help="Number of peers that may use it.")] = 1,
    days: Days = 30.0,
    delegate_file: Annotated[
        Path | None,
        Use.READ_FILE,
        typer.Option("--delegate", help="Sign with this delegate's file instead of run.key."),
    ] = None,
    words: Annotated[
        bool, typer.Option("--words", help="Print three words to join with, for one peer and ten minutes.")
    ] = False,
    directory: Directory = RUN_DIRECTORY,
) -> None:
    """Make a token for a private run, and the line to join with.

    Keep it as secret as a key. For an open run, which has no tokens, print that line alone. With --words the run's
    seed peer, which has the same --state-dir, gives the token to the one who types them.

    Example: noloco invite --uses 5 --days 30
    """
    from bootstrap.creating.invitation import in_a_line, kept_addresses, show_code
    from bootstrap.creating.inviting import Issuer, is_open

    if words:
        _invite_by_words(uses, days, delegate_file, directory)
        return

    addresses = kept_addresses(directory)
    try:
        if not delegate_file and addresses and is_open(directory):
            print(line := in_a_line(addresses))
            show_code(line, sys.stderr)
            return
        issuer = Issuer.delegate(delegate_file) if delegate_file else Issuer.owner(directory)
        token = issuer.invite(uses, days)
    except NolocoError as error:
        fail(error)
    print(token.to_text())
    line = in_a_line(addresses, token.to_text())
    print_wrapped(f"In one line: {line}", on_error=True)
    show_code(line, sys.stderr)
    print_wrapped(
        f"For {uses} peer{'s' if uses > 1 else ''} and {days:g} days. To take it back: "
        f"noloco revoke {token.invitation.serial.hex()}",
        on_error=True,
    )


def _invite_by_words(uses: int, days: float, delegate_file: Path | None, directory: Path) -> None:
    from bootstrap.creating.invitation import in_words, kept_addresses
    from bootstrap.creating.inviting import Issuer, is_open
    from bootstrap.creating.words_of_seed import invite_by_words

    try:
        if delegate_file is not None:
            raise UserError(
                "--words is for the seed peer's own directory: give the token itself, without --words, or ask the "
                "run's founder for words."
            )
        token = None if is_open(directory) else Issuer.owner(directory).invite(uses, days)
        spoken = invite_by_words(directory, token.to_text() if token is not None else "", time.time())
    except NolocoError as error:
        fail(error)
    print(spoken)
    print_wrapped(f"In one line: {in_words(kept_addresses(directory), spoken)}", on_error=True)
    print_wrapped(
        "The seed peer of this --state-dir answers to them while it is up: once, within ten minutes, and to no more "
        "than three wrong tries.",
        on_error=True,
    )
    if token is not None:
        print_wrapped(
            f"To take it back: noloco revoke {token.invitation.serial.hex()}",
            on_error=True,
        )


def delegate(
    file: Annotated[
        Path, Use.WRITE_FILE, typer.Argument(help="The file to write, for whoever is to invite others.")
    ],
    days: Days = 90.0,
    directory: Directory = RUN_DIRECTORY,
) -> None:
    """Let somebody else make tokens for a while.

    Revoking the file ends all of them.

    Example: noloco delegate friend.delegate
    """
    from bootstrap.creating.inviting import write_delegate

    try:
        named = write_delegate(directory, file, days)
    except NolocoError as error:
        fail(error)
    print_wrapped(f"Wrote {file}. Its holder makes tokens: noloco invite --delegate {file}")
    print_wrapped(f"To take it back: noloco revoke {named}")


def revoke(
    named: Annotated[list[str], typer.Argument(help="Tokens, their numbers, or peer ids.")],
    join: Join = None,
    directory: Directory = RUN_DIRECTORY,
) -> None:
    """Shut out who came with these tokens, or these peers.

    Members know within a minute.

    A seed peer that runs from the same --state-dir tells the members; otherwise name one with --join.

    Example: noloco revoke 12D3KooW…
    """
    from bootstrap.creating.inviting import publish, revoked_with

    try:
        sealed = revoked_with(directory, named)
    except NolocoError as error:
        fail(error)
    if join:
        run_async(publish(directory, join, sealed))
        print_wrapped("Revoked, and told to the run.")
    else:
        print_wrapped(
            "Revoked. The seed peer of this --state-dir tells the run, if it is up; otherwise do it again with "
            "--join."
        )
