"""`~` in a path that is a setting: a shell expands it only where it stands first in a word, nobody in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from protocol.errors import UserError

T = TypeVar("T")


def at_home(path: Path | str) -> Path:
    """The path with ~ or ~USER for a home folder. Raises `UserError` where there is no such user or folder."""
    home = os.environ.get("HOME")
    if Path(path).parts[:1] == ("~",) and home is not None and not Path(home).is_absolute():
        raise UserError(f"HOME is {home!r}, so {path} leads nowhere. Set HOME, or write the path from /.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"There is no user of this machine with the home folder of {path}. Check the name behind ~, set HOME, or "
            "write the path from /; a folder whose name begins so is ./~…."
        ) from None


def paths_at_home(value: T) -> T:
    """Expand "~" in a setting of whatever type: a path, several, or none."""
    if isinstance(value, Path):
        return at_home(value)  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        return type(value)(map(paths_at_home, value))
    return value
