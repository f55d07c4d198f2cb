"""What a folder that --data names is where it is no data set, and which of its files are meant instead.

Takes lists of files: sources.py walks the folders.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from node.data.beginnings import kind_of
from node.data.contents import ENDINGS
from node.data.store import INDEX, MARK, TEXT
from node.machine.kinds import advice_for
from node.machine.named import quoted, shown
from protocol.errors import DataError

# what repositories of data sets and models have beside rows; the first four are those that `datasets` passes over
_NO_ROWS = {
    "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "added_tokens.json",
    "generation_config.json", "package.json", "package-lock.json", "preprocessor_config.json",
    "special_tokens_map.json", "state.json", "tokenizer.json", "tokenizer_config.json", "tsconfig.json", "vocab.json",
}  # fmt: skip
_OWN = ("manifest.noloco", "identity.key", "run.key", "seed.key")
_STORES = ({TEXT, INDEX, MARK}, {TEXT, "index.npy"})  # of documents; the second of earlier versions
_MODEL = {"config.json", "adapter_config.json"}
_WEIGHTS = re.compile(r".*\.(safetensors|gguf|pth)|pytorch_model.*\.bin|tf_model\.h5")
_HEAD = 512  # bytes by which a kind of file is known
_MOST_SHOWN = 3  # files in a warning


def is_beside_rows(file: Path) -> bool:
    """Return whether a file has the name of one that holds no rows in any repository."""
    return file.name.lower() in _NO_ROWS


def require_no_other(directory: Path) -> None:
    """Check that a folder is not this program's own and no model's. Raises `DataError`, and `OSError`."""
    found = {path.name: path for path in directory.iterdir() if not path.name.startswith(".")}
    within = [path for path in found.values() if path.is_dir()]
    own = next(
        (name for name in _OWN if name in found or any((path / name).exists() for path in within)), None
    )
    if own is None and any(found.keys() >= files for files in _STORES):
        own = TEXT
    if own is not None:
        raise DataError(
            f"{directory} is a folder of noloco's own files ({own}), not of texts. Name the files, or the folder, "
            "with the texts."
        )
    weights = min(filter(_WEIGHTS.fullmatch, found), default=None)
    if weights is not None and found.keys() & _MODEL:
        raise DataError(
            f"{directory} is a model's checkpoint ({weights}), not texts. --from-checkpoint takes it; name "
            "texts with --data."
        )


def nothing_in(directory: Path, files: Sequence[Path]) -> DataError:
    """The error for a folder without a file that is known to be text; `files` are those in it that are not hidden."""
    example = _most_common(files)
    if example is None:
        hidden = sorted(found.name for found in directory.iterdir() if found.name.startswith("."))
        what = f"has hidden files alone, as {hidden[0]}" if hidden else "has no files"
        return DataError(f"{directory} is a folder that {what}. Name files with text in them.")
    count = sum(file.suffix == example.suffix for file in files)
    said = f"{directory} is a folder, and nothing in it is known to be text: there is {example.name}"
    said += f", and {len(files) - 1:,} more. " if len(files) > 1 else ". "
    with example.open("rb") as file:
        kind = kind_of(file.read(_HEAD))
    if kind is not None:
        return DataError(f"{said}That is {kind.what}. {advice_for(kind, example)}")
    named = example if count == 1 else pattern_for(directory, files, example)
    return DataError(f"{said}Name the files in it, for instance --data {quoted(named)}.")


def way_out(directory: Path, refused: Path, files: Iterable[Path]) -> str:
    """What to name in place of the folder, of whose `files` one was refused; empty where there are no others."""
    others = [file for file in files if file != refused and not is_beside_rows(file)]
    unlike = [file for file in others if _ending(file) != _ending(refused)]
    example = _most_common(unlike)
    if example is not None:
        pattern = quoted(pattern_for(directory, unlike, example))
        return f" Or name the files of this folder that are meant: --data {pattern}."
    if others:
        return f" Or name the files of this folder that are meant, as --data {quoted(others[0])}."
    return ""


def pattern_for(directory: Path, files: Iterable[Path], example: Path) -> Path:
    """The glob of all files in a folder with the ending of one of them."""
    like = [file for file in files if _ending(file) == _ending(example)]
    is_flat = all(file.parent == directory for file in like)
    return directory / f"*{_ending(example)}" if is_flat else directory / "**" / f"*{_ending(example)}"


def options_for(directory: Path, files: Sequence[Path]) -> str:
    """The options that name all files in a folder with the endings of these, as they are typed in a shell."""
    examples = {_ending(file): file for file in reversed(files)}
    patterns = sorted(pattern_for(directory, files, example) for example in examples.values())
    return " ".join(f"--data {quoted(pattern)}" for pattern in patterns)


def shown_in(directory: Path, files: Sequence[Path]) -> str:
    """The first few names of files, as they are within a folder."""
    names = [shown(os.path.relpath(file, directory)) for file in files[:_MOST_SHOWN]]
    return ", ".join(names)


def _ending(file: Path) -> str:
    """The ending of its name, with the one before a compression's."""
    return "".join(file.suffixes[-2:] if file.suffix.lower() in ENDINGS else file.suffixes[-1:])


def _most_common(files: Iterable[Path]) -> Path | None:
    """A file with the ending that most have; one that stands beside rows only where there is no other."""
    known = sorted(files, key=lambda file: (is_beside_rows(file), file))
    counts = Counter(_ending(file) for file in known if not is_beside_rows(file))
    ending = counts.most_common(1)[0][0] if counts else None
    return next((file for file in known if ending in (None, _ending(file))), None)
