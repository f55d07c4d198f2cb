"""What a user named by a path: asked about here before a command uses it, so that all of them refuse it alike.

An option's annotation says what it is for, as in `Annotated[Path, Use.READ_FILE, typer.Option(…)]`. What is missing
is no matter here: the command that reads it knows what to say.
"""

from __future__ import annotations

import errno
import os
import stat
from enum import Enum
from pathlib import Path

from protocol.errors import StateError, UserError

HUB = "hub:"  # before the name of something on the Hugging Face Hub
_CAUSES = {  # with the system's words for them, which differ
    errno.EACCES: "Check its permissions and those of the folders that it is in",
    errno.EPERM: "Check its permissions and those of the folders that it is in",
    errno.ELOOP: "Mend its links, which lead in a circle",
    errno.ENAMETOOLONG: "Shorten its name",
    errno.ESTALE: "Mount its file system again",
    errno.EIO: "Check the disk, which may be failing",
    errno.ENOTDIR: "Check the path, in which a file stands for a folder",
}


class Use(Enum):
    """What a path is for."""

    READ_FILE = "file"
    READ_FOLDER = "folder"
    READ = "file or folder"
    TEXT = "training data"  # files, globs, folders and names: node.data.sources asks about them
    WRITE_FILE = "file to write"
    WRITE_FOLDER = "folder to write"


def require_use(path: Path | str, use: Use, named: str) -> None:
    """Check that what is there can serve. Nothing is opened, so nothing waits.

    `named` is the option, or what stands for an argument in the help. Raises `UserError`.
    """
    found = look_at(path, named, UserError)
    if found is None:
        return
    is_folder, is_file = stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode)
    takes_folder = use in (Use.READ_FOLDER, Use.WRITE_FOLDER)
    if is_folder and use in (Use.READ_FILE, Use.WRITE_FILE):
        raise UserError(f"{shown(path)} is a folder. Name a file with {named}.")
    if is_file and takes_folder:
        raise UserError(f"{shown(path)} is a file. Name a folder with {named}.")
    if is_folder or is_file or (use is Use.WRITE_FILE and not _is_named_pipe(path, found)):
        return
    advice = "Name a folder" if takes_folder else "Write it to a file, and name that"
    if use is Use.WRITE_FILE:
        advice = "Name a file, or write to /dev/stdout,"
    raise UserError(f"{shown(path)} is a pipe or a device. {advice} with {named}.")


def _is_named_pipe(path: Path | str, found: os.stat_result) -> bool:
    """Return whether opening it waits for somebody who reads; a shell's >(…) has its reader."""
    return stat.S_ISFIFO(found.st_mode) and os.path.lexists(os.path.realpath(path))


def look_at(path: Path | str, named: str = "", error: type[UserError] = StateError) -> os.stat_result | None:
    """What is at a path that this user may go into if it is a folder; None where nothing is.

    Raises `error`, a sentence, for all else that the system has against it.
    """
    try:
        found = os.stat(path)  # noqa: PTH116
        if stat.S_ISDIR(found.st_mode):
            os.stat(os.path.join(path, os.curdir))  # noqa: PTH116, PTH118 - Path leaves out the dot
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:  # the latter for a NUL in it
        raise error(told(path, problem, named)) from None
    return found


def is_there(path: Path, error: type[UserError] = StateError) -> bool:
    """Return whether something is at a path. Raises `error`, a sentence, where the system does not say."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as problem:
        raise error(told(path, problem)) from None
    return True


def told(path: Path | str, problem: OSError | ValueError, named: str = "") -> str:
    """The sentence on what the system has against a path, and what to do."""
    reason = getattr(problem, "strerror", None) or str(problem)
    advice = _CAUSES.get(getattr(problem, "errno", None) or 0, "Check the path")
    otherwise = f", or choose another {named}" if named else ""
    return f"Cannot use {shown(path)} ({reason}). {advice}{otherwise}."


def shown(path: Path | str) -> str:
    """A path for people: what in it is no text, or would move a terminal's cursor, is escaped."""
    text = os.fspath(path).encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
