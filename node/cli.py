"""`noloco-node`: the command that a volunteer starts.

It imports what trains, torch above all, once the settings are known to be usable: --help and mistakes come at once.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.command import App, Version, fail, options_from, run_async
from node.config import MANIFEST_FILE, NO_ADDRESS, RARE, NodeConfig, build_config
from node.data.sources import places_of
from node.machine.limits import require_room_to_start
from node.machine.named import HUB, Use
from node.machine.open_files import take_open_files
from node.machine.processes import end_process
from node.watch.events import set_up_logging
from node.watch.phases import Phases, told_while_importing
from node.watch.words import print_wrapped
from protocol.access.tokens import Token
from protocol.access.words import EXAMPLE, are_words, read_words
from protocol.errors import JoinError, NolocoError, TokenError, UserError
from protocol.files.folders import settle_caches
from protocol.records.addresses import check_address, check_announced, seed_place
from protocol.transport.ports import require_port

if TYPE_CHECKING:
    from node.watch.screen import Screen

Addresses = Annotated[
    list[str] | None,
    typer.Argument(metavar="ADDRESS", hidden=True),
]
HELP_OPTIONS = {"help_option_names": ["-h", "--help", "--help-all"]}

app = App()


@app.command(context_settings=HELP_OPTIONS)
@options_from(NodeConfig, RARE)
def node(
    addresses: Addresses = None,
    at: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]", help="Seed peer's host: noloco join WORDS --at HOST.", show_default=False
        ),
    ] = "",
    config: Annotated[
        Path | None, Use.READ_FILE, typer.Option(help="Settings file (TOML).", show_default=False)
    ] = None,
    version: Version = False,
    **flags: object,
) -> None:
    """Train one stage of a run together with other volunteers.

    `noloco join ADDRESS` is noloco-node --join ADDRESS. Every setting can also be NOLOCO_<NAME> in the environment.
    --help-all shows those that few people need.

    Example: noloco join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW… --port 31337
    """
    try:
        typed = " ".join(addresses or ())
        words = read_words(typed) if are_words(typed) else ""
        if addresses and not words:
            given = flags["join"]
            flags["join"] = [*(given if isinstance(given, list) else ()), *map(_address, addresses)]
        settings = build_config(flags, file=config)
        require_usable(settings, is_invited=_is_invited(words, at, settings))
        settle_caches(os.environ, settings.state_dir / "cache")
        require_room_to_start()
        take_open_files()
    except NolocoError as error:
        fail(error)
    screen = _screen() if settings.panel and sys.stderr.isatty() else None
    set_up_logging(settings.verbose, shown=screen)
    phases = Phases(rewrite=screen.wait if screen is not None else None)
    phases.begin("loading torch")
    with told_while_importing(phases):
        from node.process.serving import start
    if words:
        settings = _by_words(settings, words, at)
    gc.freeze()  # what was imported stays: each look at it for cycles would take 150 ms
    run_async(start(settings, phases, screen))
    end_process()


def _address(word: str) -> str:
    """Return the word, unless it can only be a command. Raises `UserError`."""
    if re.fullmatch(r"[\w-]+", word):
        raise UserError(
            f"{word!r} is a word where the address of a member belongs, as /ip4/…/tcp/…/p2p/…. Did you mean "
            "noloco join --help, or another command of noloco? noloco help lists them."
        )
    return word


def _is_invited(words: str, at: str, settings: NodeConfig) -> bool:
    """Return whether an invitation's words will lead to the run. Raises `UserError` for half of what that needs."""
    if words and not (at or settings.join):
        raise UserError(
            f"Say where the run's seed peer is: noloco join {words} --at HOST, or --at HOST:PORT where its port is "
            "not 31337."
        )
    if words and settings.token:
        raise UserError("The words give a token: leave out --token and NOLOCO_TOKEN, or the words.")
    if at and not words:
        raise UserError(f"--at goes with the words of an invitation: noloco join {EXAMPLE} --at HOST")
    if at and settings.join:
        raise UserError("--at and --join both say where the seed peer is: give one of them.")
    if at:
        seed_place(at)
    return bool(words)


def _by_words(settings: NodeConfig, words: str, at: str) -> NodeConfig:
    """Return the settings with the address and the token that the seed peer gives for the words.

    They are given once: the line that stands for them is printed, should the node not get as far as to keep them.
    """
    from node.membership.by_words import accept_invitation

    address, token = run_async(accept_invitation(words, settings.join, at))
    given = f" --token {token}" if token else ""
    print_wrapped(
        f"The words let this node in. From now on they stand for: noloco join {address}{given}", on_error=True
    )
    return settings.model_copy(update={"join": (address,), "token": token})


def _screen() -> Screen | None:
    from node.watch.screen import screen_here

    return screen_here()


def require_usable(settings: NodeConfig, *, is_invited: bool = False) -> None:
    """Check what can be seen before anything is loaded: where the run is, and the text. Raises `UserError`.

    A node that `is_invited` gets to know the first later.
    """
    several = settings.state_dir.glob("device-*/" + MANIFEST_FILE)
    if (
        not (is_invited or settings.join)
        and not (settings.state_dir / MANIFEST_FILE).exists()
        and not any(several)
    ):
        raise JoinError(NO_ADDRESS)
    for address in settings.join:
        check_address(address)
    for address in settings.announce:
        check_announced(address)
    if settings.token:
        _require_token(settings.token, settings.run)
    require_port(settings.host, settings.port)
    places_of([entry for entry in settings.data if not entry.startswith(HUB)])


def _require_token(text: str, run: str) -> None:
    """Check that it is a token, and of that run if one is expected. Raises `TokenError`."""
    token = Token.from_text(text)
    if run and token.run_id != run:
        raise TokenError(
            f"The token is for run {token.run_id}, and --run says {run}. Ask whoever invited you for a token of that "
            "run, or leave --run out."
        )


def main() -> None:
    app(args=with_value_of_compile(sys.argv[1:]))


def with_value_of_compile(arguments: Sequence[str]) -> list[str]:
    """Take `--compile` alone, as it was when it was a flag, for `--compile on`."""
    given = list(arguments)
    for index in reversed([index for index, argument in enumerate(given) if argument == "--compile"]):
        if given[index + 1 : index + 2] not in (["auto"], ["on"], ["off"]):
            given.insert(index + 1, "on")
    return given


if __name__ == "__main__":
    main()
