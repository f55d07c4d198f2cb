"""What a user named by a path: asked about here before a command uses it, so that all of them refuse it alike.

An option's annotation says what it is for, as in `Annotated[Path, Use.READ_FILE, typer.Option(…)]`. Where nothing is,
the command that uses it knows what to say.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from enum import Enum
from pathlib import Path

from protocol.errors import StateError, UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # of a repository there
HUB = "hub:"  # before the name of something on the Hugging Face Hub
_ADVICE = {  # by what the system has against a path
    errno.EACCES: "Check its permissions and those of the folders that it is in",
    errno.EPERM: "Check its permissions and those of the folders that it is in",
    errno.ELOOP: "Mend its links, which lead in a circle",
    errno.ENAMETOOLONG: "Shorten its name",
    errno.ESTALE: "Mount its file system again",
    errno.EIO: "Check the disk, which may be failing",
}


# Path makes one of the two slashes
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{1,20}):/+(?P<rest>.+)", re.DOTALL)
_ON_HUB = re.compile(
    r"(?:(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<kind>datasets/)?(?P<name>[\w.-]+/[\w.-]+)/?(?:tree/main/?)?$"
)


class Use(Enum):
    """What a path is for."""

    READ_FILE = "file"
    THERE_FILE = "file that is there"  # asked about before what takes seconds, as the import of torch
    READ_FOLDER = "folder"
    READ = "file or folder that is there"
    CHECKPOINT = "folder that is there, or a name on the hub"
    TEXT = "training data"  # files, globs, folders and names: node.data.sources asks about them
    WRITE_FILE = "file to write"
    WRITE_FOLDER = "folder to write"


_NO_FILE = "it is a pipe or a device"
_FOLDERS = (Use.READ_FOLDER, Use.WRITE_FOLDER)


def require_use(path: Path | str, use: Use, named: str) -> None:
    """Check that what is there can serve. Nothing is opened, so nothing waits.

    `named` is the option, or what stands for an argument in the help. Raises `UserError`.
    """
    require_no_address(path, UserError)
    try:
        found = look_at(path)
        if found is None and use is Use.CHECKPOINT:
            return require_checkpoint_name(str(path), UserError)
        if found is None and use in (Use.READ, Use.THERE_FILE):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if found is None or not (reason := _reason_against(path, found, use)):
            return None
        is_pipe = reason == _NO_FILE and use not in _FOLDERS
        advice = "Write it to a file" if is_pipe else f"Name a {'folder' if use in _FOLDERS else 'file'}"
    except (OSError, ValueError) as problem:
        reason, advice = _reason(problem), _ADVICE.get(getattr(problem, "errno", None) or 0, "Check the path")
        if isinstance(problem, FileNotFoundError) and HUB_NAME.fullmatch(str(path)) and "tokenizer" in named:
            advice = f"Check the path; for one on the Hugging Face Hub write {HUB}{path}"
    if use is Use.WRITE_FILE:
        raise UserError(f"Cannot write {shown(path)} ({reason}). Choose another {named}.")
    if use is Use.WRITE_FOLDER:
        raise UserError(f"Cannot use the directory {shown(path)} ({reason}). Choose another {named}.")
    raise UserError(f"Cannot read {shown(path)} ({reason}). {advice}, or choose another {named}.")


def require_checkpoint_name(source: str, error: type[UserError]) -> None:
    """Refuse what is neither a folder nor a name that the hub can have. Raises `error`, a sentence."""
    if not HUB_NAME.fullmatch(source) or is_there(Path(source), error):
        problem = UserError(
            f"{shown(source)} is not a directory. Give the one that config.json and the weights are in, or a name of "
            "the Hugging Face hub, as organisation/model."
        )
        raise error(str(problem))


def require_no_address(path: Path | str, error: type[UserError]) -> None:
    """Refuse an address of the web or of a store, from which nothing is fetched. Raises `error`, a sentence."""
    found = _ADDRESS.match(os.fspath(path))
    if found is None:
        return
    on_hub = _ON_HUB.match(found["rest"])
    if found["scheme"].lower() == "file":
        named = quoted("/" + found["rest"].lstrip("/"))
        problem = UserError(f"{shown(path)} is an address. Name the file by its path, as {named}.")
    elif on_hub is not None:
        wanted = f"{HUB}{on_hub['name']}" if on_hub["kind"] else on_hub["name"]
        more = "" if on_hub["kind"] else f" (a tokenizer alone: {HUB}{on_hub['name']})"
        problem = UserError(
            f"{shown(path)} is an address. For what the Hugging Face Hub has by that name write {wanted}{more}."
        )
    else:
        problem = UserError(
            f"{shown(path)} is an address, and nothing is fetched from there. Download it, and name the file."
        )
    raise error(str(problem))


def _reason_against(path: Path | str, found: os.stat_result, use: Use) -> str:
    """Why what was found cannot serve; empty if it can."""
    is_folder, is_file = stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode)
    if is_folder and use in (Use.READ_FILE, Use.THERE_FILE, Use.WRITE_FILE):
        return "it is a folder"
    if is_file and use in _FOLDERS:
        return "it is a file"
    if (
        is_file
        and use in (Use.READ_FILE, Use.THERE_FILE, Use.READ)
        and not os.access(path, os.R_OK, effective_ids=True)
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if is_folder or is_file:
        return ""
    is_written = use is Use.WRITE_FILE and not _is_named_pipe(path, found)
    return "" if is_written else _NO_FILE


def _is_named_pipe(path: Path | str, found: os.stat_result) -> bool:
    """Return whether opening it waits for somebody who reads; a shell's >(…) has its reader."""
    return stat.S_ISFIFO(found.st_mode) and os.path.lexists(os.path.realpath(path))


def look_at(path: Path | str) -> os.stat_result | None:
    """What is at a path that this user may go into if it is a folder; None where nothing is.

    Raises `OSError` and `ValueError` (a NUL in it) for all else that the system has against it.
    """
    try:
        found = os.stat(path)  # noqa: PTH116
        if stat.S_ISDIR(found.st_mode):
            os.stat(os.path.join(path, os.curdir))  # noqa: PTH116, PTH118 - Path leaves out the dot
    except FileNotFoundError:
        return None
    return found


def is_folder(path: Path, error: type[UserError] = StateError) -> bool:
    """Return whether a folder that this user may go into is there. Raises `error`, a sentence."""
    found = _seen(path, error)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_there(path: Path, error: type[UserError] = StateError) -> bool:
    """Return whether something is there. Raises `error`, a sentence, where the system does not say."""
    return _seen(path, error) is not None


def _seen(path: Path, error: type[UserError]) -> os.stat_result | None:
    try:
        return look_at(path)
    except NotADirectoryError:
        return None
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem, error) from None


def unreadable(path: Path, problem: OSError | ValueError, error: type[UserError] = StateError) -> UserError:
    """The error for a path that the system does not read."""
    advice = _ADVICE.get(getattr(problem, "errno", None) or 0, "Check the path")
    return error(f"Cannot read {shown(path)} ({_reason(problem)}). {advice}.")


def _reason(problem: OSError | ValueError) -> str:
    return getattr(problem, "strerror", None) or str(problem)


def require_text_name(path: Path | str, error: type[UserError]) -> None:
    """Refuse a name with bytes that are no text, which libraries do not take. Raises `error`, a sentence."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        problem = UserError(
            f"{shown(path)} has bytes in its name that are not UTF-8, and the library that reads it takes none. "
            "Rename it, or name a link to it."
        )
        raise error(str(problem)) from None


def quoted(path: Path | str) -> str:
    """A path for a command line that people copy."""
    text = os.fspath(path)
    if text.isprintable():
        return shlex.quote(text)
    raw = shown(text.replace("\\", r"\\").replace("'", r"\'"))
    return f"$'{raw}'"  # bash and its kin read the escapes


def shown(path: Path | str) -> str:
    """A path for people: what in it is no text, or would move a terminal's cursor, is escaped."""
    return "".join(c if c.isprintable() else _escaped(c) for c in os.fspath(path))


def _escaped(letter: str) -> str:
    """A byte that is no text, which Python keeps as a surrogate, or another letter that is not to be printed."""
    byte = ord(letter) - 0xDC00
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else letter.encode("unicode_escape").decode()
