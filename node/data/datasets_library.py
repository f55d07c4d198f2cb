"""Datasets through Hugging Face's library: directories on this machine, and streams from the Hub.

No code of a dataset is run: the library reads data files only (its loading scripts are gone since version 4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from node.machine.extras import optional
from protocol.errors import DataError, UserError

T = TypeVar("T")

HUB = "hub:"  # before the name of something on the Hugging Face Hub
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves at the top of its directory
_DATA_FILES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".gz", ".zst")
_WANTED_SPLIT = "train"


def is_dataset_directory(path: Path) -> bool:
    """Whether the library would find examples here. Folders of plain text are none: it would take lines for texts."""
    if not path.is_dir():
        return False
    return any((path / name).exists() for name in _SAVED) or any(
        found.name.endswith(_DATA_FILES) for found in path.rglob("*") if not found.name.startswith(".")
    )


def examples_of(directory: Path, field: str) -> Iterator[str | None]:
    """The text of each example of a directory in the Hub's layout, or as `save_to_disk` left it, in order.

    Raises `DataError` with what to do.
    """
    dataset = _opened(str(directory), functools.partial(_open_directory, directory))
    yield from _texts(_only_split(dataset, str(directory)), field, str(directory))


class HubStream:
    """A dataset of the Hub, NAME or NAME:CONFIG or NAME:CONFIG:SPLIT, read from the network as it is needed.

    A directory in the Hub's layout may stand for the name.
    """

    def __init__(self, name: str, field: str) -> None:
        self.name = name
        self._field = field
        place, *rest = name.split(":")
        config = rest[0] if rest and rest[0] else None
        split = rest[1] if len(rest) > 1 else None
        opened = _opened(name, functools.partial(_load, place, config, split))
        self._dataset = _only_split(opened, name)

    def texts(self, seed: int | None = None, buffer: int = 0) -> Iterator[str | None]:
        """The text of each example; with a seed in the order of the library's bounded shuffle.

        The same seed gives the same order each time.
        """
        dataset = self._dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=buffer)
        yield from _texts(dataset, self._field, self.name)


def _open_directory(directory: Path) -> Any:
    datasets = optional("datasets", "data")
    if any((directory / name).exists() for name in _SAVED):
        return datasets.load_from_disk(str(directory))
    return _load(str(directory), None, None)


def _load(place: str, config: str | None, split: str | None) -> Any:
    datasets = optional("datasets", "data")  # not earlier: it takes a second, and most nodes need none of it
    return datasets.load_dataset(place, config, split=split, streaming=True)


def _opened(name: str, load: Callable[[], T]) -> T:
    """What `load` gives, whatever the library raises made a `DataError`."""
    try:
        return load()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  the library raises a dozen kinds, and others with each version
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"Cannot read the dataset {name!r} ({reason}). Check its name (hub:NAME:CONFIG:SPLIT) and "
            "the connection, or name files on this machine with --data."
        ) from None


def _only_split(dataset: Any, name: str) -> Any:
    """The split to train on, of a dataset that has several: "train", or the only one."""
    if not isinstance(dataset, Mapping):
        return dataset
    if _WANTED_SPLIT in dataset:
        return dataset[_WANTED_SPLIT]
    if len(dataset) == 1:
        return next(iter(dataset.values()))
    raise DataError(
        f"The dataset {name!r} has no split 'train', but {', '.join(map(str, dataset))}. "
        f"Name one: --data {HUB}{name}::SPLIT."
    )


def _texts(dataset: Any, field: str, name: str) -> Iterator[str | None]:
    examples = iter(dataset)
    while True:
        try:
            example = next(examples)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  as above: damaged files, broken connections
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(
                f"The dataset {name!r} cannot be read on ({reason}). Check its files and the connection."
            ) from None
        if field not in example:
            choice = ", ".join(example) or "none"
            raise DataError(
                f"The dataset {name!r} has no column {field!r}. "
                f"Name the one that holds the text with --text-field: there is {choice}."
            )
        value = example[field]
        if value is not None and not isinstance(value, str):
            raise DataError(
                f"The dataset {name!r}: {field!r} holds {type(value).__name__}, not text. "
                "Name the column that holds text with --text-field."
            )
        yield value
