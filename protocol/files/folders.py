"""The folders in which a process writes beside those that it is given: for sockets, temporary files and caches.

Everything here asks this file, which knows what a service manager (systemd.exec(5): RUNTIME_DIRECTORY and others), a
login (the XDG Base Directory Specification), a container and a user without a name or a home leave of them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ResourceError

# The path of a socket has 107 bytes at most (unix(7)); below the folder those of p2pd have up to 61
LONGEST_FOR_SOCKETS = 46
USUAL = ("/tmp", "/var/tmp")
OF_TEMPORARY_FILES = ("TMPDIR", "TEMP", "TMP")  # as Python's tempfile asks for them
OF_A_SERVICE = ("RUNTIME_DIRECTORY", "CACHE_DIRECTORY", "STATE_DIRECTORY")
# where libraries keep what they compile or fetch: by which variable, and in which folder of a cache
CACHES = {
    "XDG_CACHE_HOME": "",
    "HF_HOME": "huggingface",
    "MPLCONFIGDIR": "matplotlib",
    "NUMBA_CACHE_DIR": "numba",
    "TORCHINDUCTOR_CACHE_DIR": "compiled",
    "TRITON_CACHE_DIR": "triton",
}


def settle_temporary_files(environment: MutableMapping[str, str]) -> None:
    """Have libraries and children find a folder for temporary files. Raises `ResourceError` where there is none.

    torch needs one to be imported at all. Where Python finds none, or only the current folder, TMPDIR becomes one of
    those that the environment names.
    """
    try:
        found = tempfile.gettempdir()
    except FileNotFoundError:
        found = ""
    if found and found != str(Path.cwd()):
        return
    for place in temporary_folders(environment):
        if _is_writable(place):
            tempfile.tempdir = environment["TMPDIR"] = str(place)
            return
    if not found:
        raise _no_temporary_folder()


def settle_caches(environment: MutableMapping[str, str], otherwise: Path | None = None) -> None:
    """Have libraries keep what they cache where the service's cache is or, for a user without a home, `otherwise`."""
    place = _first(environment, "CACHE_DIRECTORY")
    if place is None and not environment.get("XDG_CACHE_HOME") and not has_home(environment):
        state = _first(environment, "STATE_DIRECTORY")
        place = otherwise if state is None else state / "cache"
    if place is not None:
        for variable, folder in CACHES.items():
            environment.setdefault(variable, str(place.absolute() / folder))


def folder_for_sockets(prefix: str) -> Path:
    """Make a new folder for this user alone, whose path leaves room for a socket's. Raises `ResourceError`."""
    tried = socket_folders()
    for place in tried:
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        except OSError:
            continue
    raise ResourceError(
        f"There is no folder for sockets: none of {_listed(tried)} can be written. Set TMPDIR to one that this user "
        f"can write and whose path has {LONGEST_FOR_SOCKETS} characters at most."
    )


@contextmanager
def short_temporary_folder() -> Iterator[None]:
    """Have libraries that make sockets among temporary files, as multiprocessing, find a folder with a short path.

    Raises `ResourceError`.
    """
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) > LONGEST_FOR_SOCKETS:
        probe = folder_for_sockets("noloco-")
        probe.rmdir()
        tempfile.tempdir = str(probe.parent)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for this user alone, gone when the context ends. Raises `ResourceError`."""
    place = lasting_folder(prefix)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def lasting_folder(prefix: str) -> Path:
    """Make a new folder among temporary files, which nobody removes. Raises `ResourceError`."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError:
        raise _no_temporary_folder() from None


def socket_folders() -> list[Path]:
    """The folders in which a process of this environment makes those for its sockets, the first one first."""
    service = _first(os.environ, "RUNTIME_DIRECTORY")
    places = [*([] if service is None else [service]), *temporary_folders(os.environ)]
    return [place for place in dict.fromkeys(places) if len(os.fsencode(place)) <= LONGEST_FOR_SOCKETS]


def folders_of_others() -> list[Path]:
    """Where processes of this user with another environment, as services and logins have, may have sockets."""
    logins = [Path("/run/user") / str(os.geteuid())]
    return list(
        dict.fromkeys([*socket_folders(), *map(Path, USUAL), *logins, *Path("/run").glob("noloco-*")])
    )


def temporary_folders(environment: Mapping[str, str]) -> list[Path]:
    """Where temporary files may lie: as the user says, where all do, in the login's, in the service's folders."""
    names = [environment.get(name, "") for name in OF_TEMPORARY_FILES]
    login = environment.get("XDG_RUNTIME_DIR", "")
    service = [place for name in OF_A_SERVICE if (place := _first(environment, name)) is not None]
    return list(dict.fromkeys([*(Path(text) for text in (*names, *USUAL, login) if text), *service]))


def has_home(environment: Mapping[str, str]) -> bool:
    """Return whether this user has a home folder that can be written."""
    home = environment.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return False
    return Path(home).is_absolute() and os.access(home, os.W_OK | os.X_OK)


def user_name() -> str:
    """The name of this process's user; a number where the machine knows none, as in a container."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _first(environment: Mapping[str, str], variable: str) -> Path | None:
    """The first folder of a variable that may name several, as systemd's do."""
    named = environment.get(variable, "").split(":")[0]
    return Path(named) if named else None


def _is_writable(place: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0123")
    except OSError:
        return False
    return True


def _no_temporary_folder() -> ResourceError:
    tried = _listed(temporary_folders(os.environ))
    return ResourceError(
        f"There is no folder for temporary files: none of {tried} can be written. Set TMPDIR to one that this user "
        "can write."
    )


def _listed(places: list[Path]) -> str:
    return ", ".join(map(str, places))
