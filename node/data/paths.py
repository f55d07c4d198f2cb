"""Which files an entry of --data names: a path, a glob, or the Python library's own sources."""

from __future__ import annotations

import glob
import os
import sysconfig
from pathlib import Path

from protocol.errors import DataError

PYTHON_STDLIB = "python-stdlib"
DEFAULT_FIELD = "text"  # where JSON lines and the like have the text
HUB = "hub:"  # before the name of something on the Hugging Face Hub
_LEFT_OUT = {"test", "tests", "site-packages", "__pycache__"}


def python_stdlib_files() -> list[Path]:
    """The running Python's own .py files without tests and installed packages, sorted by path.

    About 12.6 MB in 3.11. The files, and so the corpus, differ a little between versions and builds.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # os.walk descends into what is left
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=Path.as_posix)


def files_of(entry: str) -> list[Path]:
    """The files that one entry names, those of a glob sorted by path and without the empty ones.

    `**` recurses, ~ is the home folder. Raises `DataError` for what is missing, unreadable, or named and empty.
    """
    try:
        found = python_stdlib_files() if entry == PYTHON_STDLIB else _find(Path(entry).expanduser())
        return [path for path in found if path.stat().st_size]
    except (OSError, RuntimeError, ValueError) as error:  # as of an unknown ~user, or a NUL in the path
        raise DataError(f"Cannot read {entry!r} ({error}). Check the path and its permissions.") from error


def _find(path: Path) -> list[Path]:
    if path.is_dir():
        raise DataError(f"{path} is a folder. Name the files in it, for instance {path / '**' / '*.txt'}.")
    if path.exists() or not glob.has_magic(str(path)):
        if not path.stat().st_size:
            raise DataError(f"{path} is empty. Name a file with text in it, or leave it out.")
        return [path]
    names = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
    files = [found for found in sorted(map(Path, names)) if not found.is_dir()]
    if not files:
        raise DataError(f"No file matches {path}. Check the pattern and the current folder, {Path.cwd()}.")
    return files
