"""Finds on this machine what a tool needs to visit a run where the command does not say it: token and addresses.

A token is taken, in this order: from --token or NOLOCO_TOKEN; from the directories that the command names; from the
run directory and the state directory in the folder where it is started; from nodes and seed peers that run here. What
is of another run, or of another user, is passed over. Addresses are taken from nodes and seed peers that run here,
then from those two directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bootstrap.creating.invitation import ADDRESSES, kept_addresses
from bootstrap.creating.visit_token import RUN_KEY, VISIT_TOKEN, passing_visit_token
from node.machine.home import at_home
from node.machine.named import shown
from node.storage.state_directory import StateDirectory
from node.watch.health import running_here
from node.watch.words import print_wrapped
from protocol.access.admission import Admission
from protocol.access.tokens import Token
from protocol.errors import JoinError, NolocoError
from protocol.records.addresses import is_address
from protocol.run.signed_manifest import SignedManifest

RUN_DIRECTORY = "noloco-run"
STATE_DIRECTORY = "noloco-state"
MANIFEST = "manifest.noloco"
OF_VISITS = (RUN_KEY, VISIT_TOKEN)  # in a run directory, one of which is enough


def token_finder(given: str, named: Sequence[Path] = ()) -> Callable[[Admission], str]:
    """Return what finds a token for the run of an admission once it is known; it returns "" where there is none.

    What is `given` is used as it is: a mistake in it is to be told. `named` directories come before all others.
    """
    return lambda admission: given or _found(admission, [*named, *_usual(), *running_here()])


def addresses_to_visit(join: Sequence[str], named: Sequence[Path] = ()) -> list[str]:
    """Return the addresses in `join`, or those that this machine knows, and say whose they are.

    `named` directories come before all others. Raises `JoinError` where there are none.
    """
    if join:
        return list(join)
    here = [place for place in running_here() if place.resolve().is_relative_to(Path.cwd())]
    for place in (*named, *here, *_usual()):
        if _is_own(place) and (found := _addresses_in(place)):
            return _told(place, found)
    elsewhere = {
        _manifest_in(place): place for place in running_here() if _is_own(place) and _addresses_in(place)
    }
    if len(elsewhere) > 1:
        raise JoinError(
            "Name the run: --join /ip4/…/tcp/…/p2p/… (the address of any member), or start this in a folder of one: "
            f"several are on this machine, in {', '.join(shown(place) for place in elsewhere.values())}."
        )
    for place in elsewhere.values():
        return _told(place, _addresses_in(place))
    raise JoinError(
        "Name the run: --join /ip4/…/tcp/…/p2p/… (the address of any member). Nothing on this machine knows one."
    )


def _told(place: Path, addresses: list[str]) -> list[str]:
    print_wrapped(f"Looking at the run of {shown(place)}. --join ADDRESS names another one.", on_error=True)
    return addresses


def _manifest_in(place: Path) -> bytes:
    """Return the manifest that tells the run of a directory from others'; empty where it cannot be read."""
    for directory in (place, *sorted(place.glob("device-*"))):
        with suppress(OSError):
            return (directory / MANIFEST).read_bytes()
    return b""


def _addresses_in(place: Path) -> list[str]:
    """The addresses kept in a run directory, in a state directory, or in the first of several devices'."""
    for directory in (place, *sorted(place.glob("device-*"))):
        with suppress(NolocoError, OSError):
            kept = kept_addresses(directory) if _is_own(directory / ADDRESSES) else []
            book = StateDirectory(directory).addresses() if _is_own(directory / "peers.json") else []
            if found := [address for address in (*kept, *book) if is_address(address)]:
                return found
    return []


def _usual() -> list[Path]:
    state = at_home(os.environ.get("NOLOCO_STATE_DIR") or STATE_DIRECTORY)
    return [Path(RUN_DIRECTORY), state]


def _found(admission: Admission, places: Sequence[Path]) -> str:
    """Return the first token that admits this peer; else the run's first one, whose refusal tells what is wrong."""
    found = list(dict.fromkeys(token for place in places for token in _tokens_in(place, admission.run_id)))
    for token in found:
        if admission.admits(admission.me, Token.from_text(token).credential(admission.me)):
            return token
    return found[0] if found else ""


def _tokens_in(place: Path, run_id: str) -> Iterator[str]:
    """The tokens for this run in a run directory, in a state directory, or in those of several devices."""
    for directory in (place, *sorted(place.glob("device-*"))):
        if not _is_own(directory):
            continue
        with suppress(NolocoError, OSError):  # damaged, or gone meanwhile: as if there were none
            token = _of_run(directory, run_id) or _of_node(directory)
            if token and Token.from_text(token).run_id == run_id:
                yield token


def _of_run(directory: Path, run_id: str) -> str:
    files = [name for name in OF_VISITS if (directory / name).exists()]
    if not files or not all(_is_own(directory / name) for name in (*files, MANIFEST)):
        return ""
    signed = SignedManifest.from_bytes((directory / MANIFEST).read_bytes())
    return passing_visit_token(directory, signed) if signed.run_id == run_id else ""


def _of_node(directory: Path) -> str:
    return StateDirectory(directory).token() if _is_own(directory / "token") else ""


def _is_own(path: Path) -> bool:
    """Return whether it is there, and belongs to the user of this process."""
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False
