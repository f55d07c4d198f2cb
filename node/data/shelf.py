"""Where stores of documents are kept: each is made once for all who want it, made again when it is damaged, and
removed when the room for it is wanted and nobody has it open.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from node.data.sources import contents_of, facts_of
from node.data.store import FILES, FORMAT, TEXT, DamagedStore, Mark, Store, write_store
from node.machine.limits import parse_share, parse_size, size
from protocol.errors import DataError
from protocol.files.keeping import advice_for, one_after_another, unless_busy
from protocol.files.places import require_folder, require_way

logger = logging.getLogger(__name__)

MOST_BYTES, SHARE_OF_DISK = 20 * 10**9, 0.1  # of the stores in one place, unless --cache-size says otherwise
_NAME = re.compile(r"[0-9a-f]{32}")
_BEING_MADE = ".new"
_OF_FORMAT_2 = {TEXT, "index.npy"}
_INDEX_OF_FORMAT_2 = re.compile(
    rb"\x93NUMPY\x01\0..\{'descr': '<u8', 'fortran_order': False, 'shape': \(\d+, 3\), \} *\n", re.DOTALL
)


@dataclass(frozen=True)
class Shelf:
    """The place of one store: of the text of `places`, in documents of at most `longest` bytes, in `cache`.

    `read` gives the documents of the text, each with its hash. `setting` is by what whoever reads an error chooses
    another place, `most` how many bytes all stores in `cache` may take, "" for the default.
    """

    places: tuple[Path, ...]
    field: str
    longest: int
    cache: Path
    read: Callable[[], Iterable[tuple[int, bytes]]]
    setting: str = "--data-cache"
    most: str = ""

    @cached_property
    def directory(self) -> Path:
        """The same for the same files, also when they have changed: then the store in it is replaced."""
        named = [FORMAT, self.field, self.longest, [os.path.realpath(place) for place in self.places]]
        return self.cache / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]

    def open(self) -> Store:
        """The store, made when there is none that is whole and of the present text. Raises `DataError`.

        Processes that want the same store at the same time wait for the first one's. Others that nobody has open are
        removed, the oldest first, until there is room.
        """
        with self.told():
            require_way(self.cache)
            self.cache.mkdir(parents=True, exist_ok=True)
            for folder in (self.cache, self.directory):
                if folder.exists():
                    require_folder(folder)
            with one_after_another(_lock_of(self.directory)):
                store = self._kept() or self._made()
            os.utime(self.directory)
            make_room(self.cache, self.most)
            return store

    def open_again(self, before: Store, number: int) -> Store:
        """The store in the place of one of which a document is damaged, made again unless somebody has done so.

        Raises `DataError` where that cannot be, or where the text is another one now.
        """
        with self.told(), one_after_another(_lock_of(self.directory)):
            try:
                store = Store(self.directory, self.longest)
                store.read(number)
            except (DamagedStore, OSError):
                logger.warning(
                    "The prepared documents in %s are damaged; they are made again.", self.directory
                )
                try:
                    store = self._made()
                    store.read(number)
                except DataError as error:
                    raise DataError(
                        f"The prepared documents in {self.directory} are damaged and cannot be made again. {error}"
                    ) from None
        if store.identity != before.identity:
            raise DataError(
                f"The prepared documents in {self.directory} were damaged, and the text that they were made of has "
                "changed since. Start again: training goes on with the text as it is now."
            )
        return store

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn the system's errors into a `DataError` that says what to do."""
        try:
            yield
        except OSError as error:
            advice = advice_for(error)
            raise DataError(
                f"Cannot keep the documents in {self.cache} ({error.strerror}). {advice}, or choose another "
                f"{self.setting}."
            ) from None
        except DamagedStore:
            raise DataError(
                f"The prepared documents in {self.directory} are damaged as soon as they are made. Check the disk, "
                f"or choose another {self.setting}."
            ) from None

    def _kept(self) -> Store | None:
        """The store that is there; None for a damaged one, which is warned of, and for one of other text."""
        if not self.directory.exists():
            return None
        try:
            store = Store(self.directory, self.longest)
        except (DamagedStore, OSError):
            logger.warning("The prepared documents in %s are damaged; they are made again.", self.directory)
            return None
        if store.mark.facts != (facts := self._facts()):
            if store.mark.contents != self._contents():
                return None
            replace(store.mark, facts=facts).write(self.directory)  # touched, or copied
        return store

    def _made(self) -> Store:
        beside = self.directory.with_suffix(_BEING_MADE)
        for outdated in (
            beside,
            self.directory,
        ):  # before the new one is written: the disk need not hold both
            _clear(outdated)
        try:
            mark = Mark(
                self._facts(), self._contents()
            )  # before the text is read, which may change meanwhile
            if not write_store(beside, self.read(), mark):
                named = ", ".join(map(str, self.places[:3])) or "nothing"
                raise DataError(f"There is no text in {named}. Name files with text in them.")
            self.directory.mkdir(exist_ok=True)
            for name in FILES:  # the mark last, which makes the store whole
                if (beside / name).exists():
                    (beside / name).replace(self.directory / name)
        finally:
            _clear(beside)
        return Store(self.directory, self.longest)

    def _facts(self) -> str:
        return _digest([fact for place in self.places for fact in facts_of(place)])

    def _contents(self) -> str:
        return _digest([fact for place in self.places for fact in contents_of(place)])


def _digest(facts: list[tuple[str, int, object]]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _lock_of(directory: Path) -> Path:
    return directory.with_suffix(".lock")


def most_bytes(text: str, disk: int) -> int:
    """Bytes that all stores in one place may take, of a --cache-size and a disk's size."""
    if not text:
        return min(MOST_BYTES, int(SHARE_OF_DISK * disk))
    share = parse_share(text)
    return parse_size(text) if share is None else int(share * disk)


def make_room(cache: Path, most: str) -> None:
    """Remove what killed processes left, and the stores that were opened longest ago, down to the bound.

    Only what this program has made and nobody has open. What cannot be removed stays, without a word.
    """
    with suppress(OSError):
        bound = most_bytes(most, shutil.disk_usage(cache).total)
        for left in cache.glob(f"*{_BEING_MADE}"):
            if _NAME.fullmatch(left.stem) and Mark.of(left) is not None:
                _remove(left)
        stores = sorted(_stores_in(cache), key=lambda store: store.stat().st_mtime_ns)
        taken, removed = sum(map(_bytes_of, stores)), 0
        for store in stores:
            if taken - removed <= bound:
                return
            nbytes = _bytes_of(store)
            if _remove(store):
                removed += nbytes
                logger.info(
                    "Removed prepared documents that nobody has open, %s in %s: --cache-size is %s.",
                    size(nbytes), store, size(bound),
                )  # fmt: skip


def _stores_in(cache: Path) -> Iterator[Path]:
    for path in cache.iterdir():
        is_named = _NAME.fullmatch(path.name) and not path.is_symlink() and path.stat().st_uid == os.geteuid()
        if is_named and (Mark.of(path) is not None or _is_of_format_2(path)):
            yield path


def _is_of_format_2(path: Path) -> bool:
    """Return whether versions before 29 November 2026 have made it: such a store has no mark, but these two files."""
    if {entry.name for entry in path.iterdir()} != _OF_FORMAT_2:
        return False
    with (path / "index.npy").open("rb") as file:
        return _INDEX_OF_FORMAT_2.fullmatch(file.read(128)) is not None


def _bytes_of(store: Path) -> int:
    return sum(file.lstat().st_size for file in store.iterdir())


def _remove(store: Path) -> bool:
    """Remove a store unless somebody has it open; return whether it is gone."""
    with unless_busy(_lock_of(store)) as is_free:
        if not is_free or _is_open(store):
            return False
        if not _clear(store):
            return False
        _lock_of(store).unlink(missing_ok=True)
    return True


def _clear(store: Path) -> bool:
    """Remove the files of a store, and its directory where nothing else is in it; return whether it is gone.

    Who has it open goes on to read it. Raises `OSError`.
    """
    for name in (*_OF_FORMAT_2, *FILES):
        (store / name).unlink(missing_ok=True)
    with suppress(OSError):
        store.rmdir()
    return not store.exists()


def _is_open(store: Path) -> bool:
    """Return whether a process reads it; one that is in a place without locks may be read."""
    try:
        with (store / TEXT).open("rb") as text:
            fcntl.flock(text, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
