"""Keeping things on disk: a file is written whole or not at all, and a directory has one owner at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from protocol.errors import LaterVersion, StateError, later, legible
from protocol.files.installation import upgrade_line
from protocol.files.places import refusal, require_folder, require_only_name, require_way
from protocol.version import own_version

LOCK = "lock"  # in a directory that a process owns
OWNED = {
    LOCK,
    "identity.key",
    "run.key",
    "manifest.noloco",
}  # of which one lies in a directory that had an owner
FORMAT = (
    2  # of directories, counted up when an earlier version could not go on from one: 1 has one checkpoint
)
FORMAT_FILE = "format.json"
FOR_ITS_OWNER = 0o600
FOR_OTHERS = 0o666  # less what the umask takes
MOST_JSON_BYTES = 16 * 1024 * 1024  # of a small file: the largest, the ledger, has 8,192 peers of 400 bytes
LONGEST_BESIDE = 40  # characters of a file's name in that of the file beside it: a name has 255 bytes at most


def replace_whole(path: Path, *contents: bytes | memoryview, mode: int = FOR_ITS_OWNER) -> None:
    """Replace the file as `replacing` does, with these contents."""
    with replacing(path, mode) as file:
        file.writelines(contents)


@contextmanager
def replacing(path: Path, mode: int = FOR_ITS_OWNER) -> Iterator[BinaryIO]:
    """A file beside, which is flushed to the disk and renamed at the end of the block; its directory must be there.

    Raises `OSError`; what was there before is then as it was, and nothing is left beside it. A device or a pipe is
    written to as it is. A process that is killed leaves the file beside; the next one to write `path` removes it.
    """
    require_way(path)
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            yield device
        return
    path = path.resolve()  # a link of this user's goes on leading there
    _remove_stale(path)
    file, beside = _file_beside(path, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _flush_names(path.parent)


def _file_beside(path: Path, mode: int) -> tuple[BinaryIO, Path]:
    """A new file under a name that nobody can foresee, locked as long as it is written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        beside = path.with_name(f"{path.name[:LONGEST_BESIDE]}.{secrets.token_hex(8)}.new")
        file = os.fdopen(os.open(beside, flags, mode), "wb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, beside
        file.close()  # taken for stale before it was locked


def _remove_stale(path: Path) -> None:
    """Remove the files beside `path` that nobody writes any more: of processes that were killed."""
    pattern = re.compile(re.escape(path.name[:LONGEST_BESIDE]) + r"\.[0-9a-f]{16}\.new")
    with suppress(OSError):
        for left in [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]:
            with suppress(OSError):
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with os.fdopen(os.open(left, flags), "rb") as file:
                    if os.fstat(file.fileno()).st_uid == os.geteuid():
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        left.unlink()


def _flush_names(directory: Path) -> None:
    """Bring a rename to the disk, as far as the file system can: the file itself is there, whole, in any case."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def descriptor_of(path: Path, *, is_fresh: bool = False, mode: int = FOR_OTHERS) -> int:
    """Open a file that grows while it is used, at its end; with `is_fresh` it is emptied. Raises `OSError`."""
    require_way(path)
    if path.exists() and not path.is_file():
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    path = path.resolve()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, mode)
    try:
        require_only_name(descriptor, path)
        if is_fresh:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_writable(path: Path) -> None:
    """Raise `OSError` now where `replace_whole` would later; make the folder, and leave no file behind."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if any(folder.exists() and not folder.is_dir() for folder in path.absolute().parents):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    require_way(path)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        return
    file, beside = _file_beside(path.resolve(), FOR_ITS_OWNER)
    file.close()
    beside.unlink()


def create_whole(path: Path, *contents: bytes | memoryview) -> None:
    """Write as `replace_whole` does, for the owner's eyes alone; raises `FileExistsError` when the file is there."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    replace_whole(path, *contents)


def small_json(path: Path) -> object:
    """Read a JSON file of `MOST_JSON_BYTES` at most; None for one that is larger, damaged or cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_JSON_BYTES + 1)
        contents: object = json.loads(text) if len(text) <= MOST_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return contents


PERMISSIONS = "Check its permissions"


def advice_for(error: OSError, otherwise: str = PERMISSIONS) -> str:
    """The beginning of a sentence. `otherwise` is for all that is neither a full disk nor a limit."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit on open files (ulimit -n)"
    first = {
        errno.EEXIST: "A file is where a folder is due: move it away",
        errno.ENOTDIR: "A file is where a folder is due: move it away",
        errno.EROFS: "Its file system may only be read: mount it otherwise",
        errno.EIO: "Check the disk, or mount its file system again",
        errno.ESTALE: "Check the disk, or mount its file system again",
        errno.ELOOP: "Check its links and the length of its name",
        errno.ENAMETOOLONG: "Check its links and the length of its name",
    }.get(error.errno or 0)
    if first is not None:
        return first if otherwise == PERMISSIONS else f"{first}, or {otherwise[0].lower()}{otherwise[1:]}"
    return otherwise


class Lock:
    """One process at a time: on a directory, until `release` or the end of the process, however that comes.

    Mutable state: the file that is locked.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file: BinaryIO | None = None

    def __repr__(self) -> str:
        return f"Lock({self._path}, {'open' if self._file is None else 'held'})"

    def take(self) -> None:
        """Take the lock. Raises `BlockingIOError` while another process has it, and `OSError`."""
        file = _lock_file(self._path)
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
    while True:
        with _lock_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # otherwise whoever had it has removed what it is of
                yield
                return


@contextmanager
def unless_busy(path: Path) -> Iterator[bool]:
    """Hold a lock file as `one_after_another` does, unless somebody has it: then give False. Raises `OSError`."""
    with _lock_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.fstat(file.fileno()).st_nlink > 0
        except BlockingIOError:
            is_free = False
        yield is_free


def _lock_file(path: Path) -> BinaryIO:
    """Open a file to lock, which is made if it is missing; no link is followed, and nothing in it changes."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise refusal(f"{path.name} in it is a link")
    return os.fdopen(os.open(path, flags, FOR_OTHERS), "rb")


def format_of(directory: Path) -> tuple[int, str]:
    """The number of a directory's format, and the version that wrote it first so: (1, "") of early versions."""
    path = directory / FORMAT_FILE
    told = small_json(path) if path.is_file() else None
    number = told.get("format") if isinstance(told, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**31:
        return 1, ""
    program = told.get("program") if isinstance(told, dict) else None
    return number, legible(program[:64]) if isinstance(program, str) else ""


def require_format(directory: Path, flag: str) -> None:
    """Raise `LaterVersion` that names `flag` for a directory which a later version has written."""
    number, program = format_of(directory)
    if number > FORMAT:
        by = f"noloco-node {program}" if program else "a later version"
        raise LaterVersion(
            f"The directory {directory} was written by {by} and has format {number}; this is "
            f"{own_version() or 'a copy'}, which reads formats up to {FORMAT}. Nothing in it was changed. Upgrade "
            f"this program ({upgrade_line()}), or choose another directory with {flag}."
        )


def _own_format() -> bytes:
    return json.dumps({"format": FORMAT, "program": own_version()}).encode()


def own(directory: Path, flag: str, *, is_private: bool = False, writes: Collection[str] = ()) -> Lock:
    """Make the directory and lock it; a private one is for its owner's eyes alone, also if it was there.

    Files named in `writes` will be replaced: one that is there before any process owned the directory is in the way.
    It is of this version's format from then on; what is in one of an earlier format is taken over file by file, by
    those that read it. Raises `StateError` that names `flag`, also for a later version's directory, which stays as
    it is.
    """
    lock = Lock(directory)
    writes = {*writes, FORMAT_FILE}
    try:
        require_way(directory)
        directory.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
        require_folder(directory, is_private=is_private)
        there = {path.name for path in directory.iterdir()}
        if not there & OWNED and (found := sorted(there & set(writes))):
            raise refusal(f"it has a {found[0]} that this program has not written")
        require_format(directory, flag)  # before anything in it, or of it, is changed
        with suppress(PermissionError):  # root's, who lets this user write there: the volume of a container
            if is_private:
                directory.chmod(0o700)
        lock.take()
        require_format(directory, flag)  # once more: another process may have had it until now
        if format_of(directory)[0] != FORMAT:
            replace_whole(directory / FORMAT_FILE, _own_format())
    except StateError:
        lock.release()
        raise
    except BlockingIOError:
        raise later(
            StateError(
                f"Another node or seed peer runs with the directory {directory}. "
                f"Give this one a directory of its own with {flag}."
            )
        ) from None
    except OSError as error:
        advice = advice_for(error, f"Choose another with {flag}")
        raise StateError(f"Cannot use the directory {directory} ({error.strerror}). {advice}.") from None
    return lock
