"""Datasets of Hugging Face's library: streamed from the Hub, or left by `save_to_disk`.

No code of a dataset is run: the library reads data files only (its loading scripts are gone since version 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Protocol, TypeAlias, TypeVar

from node.data.contents import without_mark
from node.data.fields import text_of
from node.data.rows import mended
from node.machine.limits import optional
from node.machine.named import HUB as HUB
from node.machine.named import quoted, require_text_name
from protocol.errors import DataError, later

Document: TypeAlias = Iterable[bytes]
_Part = TypeVar("_Part")  # what stands for a split
_WANTED_SPLIT = "train"


class _Dataset(Protocol):
    """The part of the library's datasets that is used here."""

    def __iter__(self) -> Iterator[Mapping[str, object]]: ...

    def shuffle(self, *, seed: int, buffer_size: int) -> _Dataset: ...


class HubStream:
    """A dataset of the Hub, NAME or NAME:CONFIG or NAME:CONFIG:SPLIT, read from the network as it is needed.

    A directory in the Hub's layout may stand for the name.
    """

    def __init__(self, name: str, field: str) -> None:
        self.name = name
        self._field = field
        place, config, split, *_ = [*name.split(":"), "", ""]
        self._dataset = opened_dataset(name, place, config or None, split or None)

    def texts(self, seed: int | None = None, buffer: int = 0) -> Iterator[str | None]:
        """The text of each example; with a seed in the order of the library's bounded shuffle.

        The same seed gives the same order each time.
        """
        dataset = self._dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=buffer)
        yield from texts_in(dataset, self._field, self.name)

    def documents(self, seed: int | None = None, buffer: int = 0) -> Iterator[Document]:
        """These texts as documents: what is not UTF-8 replaced, as in files, and the empty ones passed over."""
        return ((without_mark(mended(text).encode()),) for text in self.texts(seed, buffer) if text)


def opened_dataset(
    name: str, place: str, config: str | None = None, split: str | None = None, *, is_saved: bool = False
) -> _Dataset:
    """The split to train on where there are several: "train", or the only one. Raises `DataError`."""
    require_text_name(place, DataError)
    datasets = optional("datasets", "data")  # not earlier: it takes a second, and most nodes need none of it
    if is_saved:
        return _saved(datasets, place)
    try:
        opened = datasets.load_dataset(place, config, split=split, streaming=True)
    except Exception as error:  # noqa: BLE001  the library raises a dozen kinds, and others with each version
        raise later(
            DataError(
                f"Cannot read the dataset {name!r} ({reason(error)}). Check its name (hub:NAME:CONFIG:SPLIT) and "
                "the connection, or name files on this machine with --data."
            )
        ) from None
    splits: Mapping[str, _Dataset] = opened if isinstance(opened, Mapping) else {_WANTED_SPLIT: opened}
    return train_of(splits, name, f"Name one: --data {HUB}{name}::SPLIT.")


def _saved(datasets: ModuleType, place: str) -> _Dataset:
    """The split to train on of what `save_to_disk` left in a folder. Raises `DataError`."""
    try:
        opened = datasets.load_from_disk(place)
    except Exception as error:  # noqa: BLE001  as above
        raise DataError(
            f"The dataset {place!r}, which save_to_disk has left, is damaged or not whole ({reason(error)}). Save it "
            "again, or copy all of its folder; or name its .arrow files with --data."
        ) from None
    splits: Mapping[str, _Dataset] = opened if isinstance(opened, Mapping) else {_WANTED_SPLIT: opened}
    return train_of(splits, place, f"Name the folder of one: --data {quoted(f'{place}/SPLIT')}.")


def train_of(splits: Mapping[str, _Part], name: str, advice: str) -> _Part:
    found = splits.get(_WANTED_SPLIT)
    if found is None and len(splits) == 1:
        (found,) = splits.values()
    if found is None:
        raise DataError(
            f"The dataset {name!r} has no split 'train', but {', '.join(map(str, splits)) or 'none'}. {advice}"
        )
    return found


def texts_in(dataset: _Dataset, field: str, name: str) -> Iterator[str | None]:
    for number, example in enumerate(_examples(dataset, name)):
        yield text_of(example, field, f"The dataset {name!r}", is_first=not number)


def _examples(dataset: _Dataset, name: str) -> Iterator[Mapping[str, object]]:
    try:
        yield from dataset
    except Exception as error:  # noqa: BLE001  as above: damaged files, broken connections
        raise later(
            DataError(
                f"The dataset {name!r} broke off while it was read ({reason(error)}). Check files and connection."
            )
        ) from None


def reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
