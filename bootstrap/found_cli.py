"""`noloco-bootstrap`: found a run and keep its seed peer up.

The modules that do it are imported by the command itself: --help and mistyped options do not wait for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootstrap.creating.init_cli import Private, answered, init
from bootstrap.creating.invitation import RUN_DIRECTORY
from bootstrap.creating.invite_cli import delegate, invite, revoke
from bootstrap.display import OTHER_ADDRESS_FILE, require_places
from bootstrap.model_options import EndOfText, FromCheckpoint, OwnManifest, RunTokenizer
from node.command import App, Version, doing, fail, run_async
from node.config import MANIFEST_FILE
from node.machine.limits import parse_rate
from node.machine.listening import require_place
from node.machine.named import Use
from node.machine.open_files import take_open_files
from node.membership.outside import announced
from node.watch.events import set_up_logging
from protocol.errors import NolocoError, StateError, UserError
from protocol.files.keeping import own
from protocol.records.addresses import SEED_PORT, check_announced
from protocol.run.manifest import PRESETS, Manifest
from protocol.transport.ports import require_port

if TYPE_CHECKING:
    from bootstrap.creating.asking import Answered

KeepCopies = Annotated[
    bool | None,
    typer.Option(
        "--keep/--no-keep",
        envvar="NOLOCO_KEEP",
        help="Keep copies of all stages; default: if small.",
        show_default=False,
        show_envvar=False,
    ),
]
JoinMembers = Annotated[
    list[str] | None, typer.Option(help="Any member, to go on from another machine.", show_default=False)
]
PassedOn = Annotated[
    str,
    typer.Option(
        metavar="RATE",
        envvar="NOLOCO_RELAY_FOR_OTHERS",
        hidden=True,
        help="See docs/links.md; 0 passes nothing on.",
    ),
]
MaxUpload = Annotated[
    str,
    typer.Option(
        metavar="RATE",
        envvar="NOLOCO_MAX_UPLOAD",
        hidden=True,
        help="Upload limit, such as 20Mbit, of all that this peer sends.",
    ),
]
Host = Annotated[str, typer.Option(envvar="NOLOCO_HOST", help="Address to listen on.", show_envvar=False)]
Port = Annotated[
    int,
    typer.Option(envvar="NOLOCO_PORT", min=0, max=65_535, help="TCP port; 0: any.", show_envvar=False),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        envvar="NOLOCO_ANNOUNCE",
        help="Multiaddress to announce to other peers, for a port that is mapped.",
    ),
]
app = App()
for command in (init, invite, delegate, revoke):
    app.command()(command)


@app.callback(invoke_without_command=True)
def bootstrap(
    context: typer.Context,
    preset: Annotated[str | None, typer.Option(help=f"One of: {', '.join(PRESETS)}.")] = None,
    manifest: OwnManifest = None,
    tokenizer: RunTokenizer = "",
    end_of_text: EndOfText = "",
    from_checkpoint: FromCheckpoint = None,
    private: Private = None,
    directory: Annotated[
        Path, Use.WRITE_FOLDER, typer.Option("--state-dir", "--dir", help="For keys and manifest.")
    ] = RUN_DIRECTORY,
    join: JoinMembers = None,
    host: Host = "0.0.0.0",
    port: Port = SEED_PORT,
    announce: Announce = None,
    address_file: Annotated[
        Path | None, Use.WRITE_FILE, typer.Option(help="Also write the join addresses to this file.")
    ] = None,
    dashboard: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="NOLOCO_DASHBOARD",
            help="Show the run on a web page there.",
        ),
    ] = "",
    keep: KeepCopies = None,
    verbose: Annotated[
        bool, typer.Option(help="Also log what the network layer does.", show_default=False)
    ] = False,
    relay_for_others: PassedOn = "20Mbit",
    max_upload: MaxUpload = "",
    version: Version = False,
) -> None:
    """Found a run and keep its seed peer up.

    Without a manifest or preset it asks about the run. Started again with the same --state-dir, it resumes that
    run. noloco-bootstrap is the same program.

    Example: noloco found --preset llama-5m --tokenizer tokenizer.json
    """
    if context.invoked_subcommand is not None:
        return
    _require_usable(announce or (), dashboard, address_file)
    is_chosen = bool(preset or manifest or from_checkpoint or tokenizer)
    run = None if is_chosen or join or (directory / MANIFEST_FILE).exists() else _asked(private)
    doing("Getting ready to found the run, or to take it up")
    from bootstrap.creating.choosing import RunOptions
    from bootstrap.creating.run import WRITTEN, found, keep_seed_peer
    from protocol.transport.libp2p import Libp2pConfig

    set_up_logging(verbose)
    try:
        wanted, raw = (None, None) if run is None else (run.manifest, run.tokenizer)
        is_there = (directory / MANIFEST_FILE).exists()
        if is_chosen or (private is not None and run is None and not is_there):
            options = RunOptions(preset, manifest, tokenizer, end_of_text, from_checkpoint, private=private)
            wanted, raw = options.resolved()
        require_port(host, port)  # after what was typed: a mistake there is one on any machine
        with own(directory, "--state-dir", writes=WRITTEN):
            founded = replace(found(directory, wanted, raw), text="" if run is None else run.text)
            _require_access(founded.signed.manifest, private, directory)
            known_as = announced(announce or (), port, founded.peer_id)
            upload = _rate(max_upload, "--max-upload")
            config = Libp2pConfig(host=host, port=port, announce=known_as, upload=upload)
            passed_on = _rate(relay_for_others, "--relay-for-others")
            run_async(keep_seed_peer(founded, config, address_file, dashboard, keep, join or (), passed_on))
    except NolocoError as error:
        fail(error)


def _rate(text: str, option: str) -> float:
    """Return bytes per second. Raises `UserError`."""
    try:
        return 0.0 if text in ("", "0") else parse_rate(text)
    except ValueError as error:
        raise UserError(f"The rate of {option} cannot be used: {error}.") from None


def _require_access(manifest: Manifest, private: bool | None, directory: Path) -> None:
    """Raise `StateError` where the run that `directory` holds is private and --open was given, or the other way."""
    if private is not None and manifest.access.private != private:
        kind = "private" if manifest.access.private else "open"
        raise StateError(
            f"{directory} holds run '{manifest.name}', which is {kind}, and manifests never change. Give a new run a "
            "directory of its own with --state-dir."
        )


def _asked(private: bool | None) -> Answered | None:
    """Ask about a new run on a terminal, before anything large is loaded; None where nobody can answer.

    Whether it is `private` is not asked where an option says it.
    """
    if not sys.stdin.isatty():
        return None
    try:
        return answered({} if private is None else {"private": private})
    except NolocoError as error:
        fail(error)


def _require_usable(announce: Sequence[str], dashboard: str, address_file: Path | None) -> None:
    """End the command with a sentence where this machine or these options cannot do, before anything is loaded."""
    try:
        require_place(dashboard, "--dashboard")
        require_places(address_file, advice=OTHER_ADDRESS_FILE)
        for address in announce:
            check_announced(address)
        take_open_files()
    except NolocoError as error:
        fail(error)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
