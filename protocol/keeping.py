"""Keeping things on disk: a file is written whole or not at all, and a directory has one owner at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from protocol.errors import StateError

LOCK = "lock"  # in a directory that a process owns
FOR_ITS_OWNER = 0o600
FOR_OTHERS = 0o666  # less what the umask takes


def replace_whole(path: Path, *contents: bytes | memoryview, mode: int = FOR_ITS_OWNER) -> None:
    """Write the file beside, flush it to the disk, rename it; its directory must be there.

    Raises `OSError`; what was there before is then as it was, and nothing is left beside it. A device or a pipe is
    written to as it is.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            device.writelines(contents)
        return
    path = path.resolve()  # a link goes on leading there
    beside = path.with_name(path.name + ".new")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.writelines(contents)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def require_writable(path: Path) -> None:
    """Raise `OSError` now where `replace_whole` would later; make the folder, and leave no file behind."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if any(folder.exists() and not folder.is_dir() for folder in path.absolute().parents):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        return
    path = path.resolve()
    beside = path.with_name(path.name + ".new")
    beside.touch()
    beside.unlink()


def create_whole(path: Path, *contents: bytes | memoryview) -> None:
    """Write as `replace_whole` does, for the owner's eyes alone; raises `FileExistsError` when the file is there."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    replace_whole(path, *contents)


def advice_for(error: OSError, otherwise: str = "Check its permissions") -> str:
    """The beginning of a sentence. `otherwise` is for all that is neither a full disk nor a limit."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit on open files (ulimit -n)"
    return otherwise


class Lock:
    """One process at a time: on a directory, until `release` or the end of the process, however that comes.

    Mutable state: the file that is locked.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file: TextIO | None = None

    def __repr__(self) -> str:
        return f"Lock({self._path}, {'open' if self._file is None else 'held'})"

    def take(self) -> None:
        """Take the lock. Raises `BlockingIOError` while another process has it, and `OSError`."""
        file = self._path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            file.close()
            raise
        self._file = file

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def one_after_another(path: Path) -> Iterator[None]:
    """Processes, and threads, that come here with the same lock file wait for each other. Raises `OSError`."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def own(directory: Path, flag: str, *, is_private: bool = False) -> Lock:
    """Make the directory and lock it; a private one is for its owner's eyes alone, also if it was there.

    Raises `StateError` that names `flag`.
    """
    lock = Lock(directory)
    try:
        directory.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
        with suppress(PermissionError):  # somebody else's, who lets this user write there
            if is_private:
                directory.chmod(0o700)
        lock.take()
    except BlockingIOError:
        raise StateError(
            f"Another node or seed peer runs with the directory {directory}. "
            f"Give this one a directory of its own with {flag}."
        ) from None
    except OSError as error:
        advice = advice_for(error, f"Choose another with {flag}")
        raise StateError(f"Cannot use the directory {directory} ({error.strerror}). {advice}.") from None
    return lock
