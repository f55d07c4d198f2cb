"""Whether a place on the disk may be used: its owner, who else can change it, and whose links lead there.

`files.keeping` asks here before it writes or locks anything. The refusals are `PermissionError`s whose `strerror`
is the reason, so that a caller's "Cannot write … (…). Choose another …" is a whole sentence.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_LINKS = 40  # on the way to a file, as Linux follows (path_resolution(7))


def refusal(reason: str) -> PermissionError:
    """An error that this user may not use a place, for `reason`."""
    return PermissionError(errno.EPERM, reason)


def require_way(path: Path) -> None:
    """Refuse a path that leads through a link which neither this user nor root made. Raises `PermissionError`."""
    for link in _links_to(path.absolute(), MOST_LINKS):
        owner = link.lstat().st_uid
        if owner not in _trusted():
            raise refusal(f"{link} is a link that {_name(owner)} made")


def require_folder(directory: Path, *, is_private: bool = False) -> None:
    """Refuse a folder, which is there, that another user prepared or can change. Raises `PermissionError`, `OSError`.

    One that is not private may belong to another user where this one is root, as a volume of a container may. A
    private one holds keys: it and all that lies in it must be this user's or root's.
    """
    require_way(directory)
    found, me = directory.stat(), os.geteuid()
    if found.st_uid not in _trusted() and (is_private or me != 0):
        raise refusal(f"it belongs to {_name(found.st_uid)}, who can change what is in it")
    is_sticky = bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & stat.S_IWOTH and found.st_uid != me:
        # a volume of a container is often open to all, and only root can have mounted it
        is_volume = directory.is_mount() and not is_sticky
        if not is_volume and (is_private or not is_sticky):
            raise refusal("every user of this machine can change what is in it")
    if is_private:
        _require_contents(directory, was_open=bool(found.st_mode & (stat.S_IWOTH | stat.S_IWGRP)))


def read_own(path: Path) -> bytes:
    """Read a secret, which no other user can have put there. Raises `PermissionError`, `OSError`.

    Root may read what belongs to the owner of its folder, too.
    """
    require_way(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise refusal("it is not a file")
        trusted = _trusted() | ({path.parent.stat().st_uid} if os.geteuid() == 0 else set())
        if found.st_uid not in trusted:
            raise refusal(f"it belongs to {_name(found.st_uid)}")
        return file.read()


def require_only_name(descriptor: int, path: Path) -> None:
    """Refuse to write to an open file that has another name, in a folder of others. Raises `PermissionError`."""
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and path.parent.stat().st_uid != os.geteuid():
        raise refusal("the file has another name, elsewhere")


def _require_contents(directory: Path, was_open: bool) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            if found.st_uid not in _trusted():
                raise refusal(f"{entry.name} in it belongs to {_name(found.st_uid)}")
            if was_open and stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                raise refusal(f"{entry.name} in it has another name, elsewhere")


def _trusted() -> set[int]:
    """The users whose files may be relied on: this one, and root; where root has no number here, the owner of /."""
    return {os.geteuid(), 0, Path("/").stat().st_uid}


def _links_to(path: Path, most: int) -> Iterator[Path]:
    """The links on the way to an absolute path, those included to which links lead. Raises `OSError` for a loop."""
    if not most:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    for place in [*reversed(path.parents), path]:
        if place.is_symlink():
            yield place
            yield from _links_to(place.parent / place.readlink(), most - 1)


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
