"""The folder of an export: what in it an export has written, what is in the way, and how a new one takes its place.

A file is an export's if its name is one that exports write and a list has its hash. The lists are the SHA256SUMS in
the folder and, while a new export takes its place, the one in partial/new.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import StateError
from protocol.files.places import require_folder, require_way

PARTIAL = "partial"  # the folder in the export in which it is made
FACTS = "noloco.json"
SUMS = "SHA256SUMS"
CONFIG = "config.json"  # an export without it is not whole
WRITTEN = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template\.jinja|README\.md|noloco\.json|SHA256SUMS"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
BEING_WRITTEN = re.compile(r"SHA256SUMS\.new|\.tmp\w{6}")  # the second by safetensors, which may be killed
FETCHED = re.compile(r"stage-\d{4,}\.(f32|jsonl)|writable")
# what transformers would take for a part of the model, or a person for its weights
PART_OF_A_MODEL = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|index\.json)|.*token.*\.(json|txt|model)")
MOST_NAMED = 5


def require_free(directory: Path, flag: str = "--out") -> None:
    """Refuse a folder with files that no export has written and that one would replace. Raises `StateError`.

    Changes nothing. What else lies in the folder stays.
    """
    try:
        require_way(directory)
        if not directory.exists():
            return
        require_folder(directory)
        found = list(_in_the_way(directory))
    except OSError as error:
        raise StateError(f"Cannot write to {directory} ({error.strerror}). Choose another {flag}.") from None
    if not found:
        return
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    names = ", ".join(found[:MOST_NAMED]) + more
    if CONFIG in found and not _has_facts(directory):
        raise StateError(
            f"{directory} holds a model, not an export of a run: {names}. Choose another {flag}."
        )
    raise StateError(
        f"{directory} holds files that an export has not written, or that were changed since: {names}. Move them "
        f"away, or choose another {flag}."
    )


def sha256_of(path: Path) -> str:
    """The file's SHA-256, in hexadecimal. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(new: Path) -> None:
    """Write the list of the files in `new`, which makes it whole. Raises `OSError`."""
    sums = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(new.iterdir())]
    beside = new / f"{SUMS}.new"
    beside.write_text("".join(sums), encoding="utf-8")
    for path in new.iterdir():
        path.chmod(0o644)  # a model is to be given away, whatever the volunteer's umask
        _flush(path)
    beside.replace(new / SUMS)
    _flush(new)


def put_in_place(directory: Path) -> None:
    """Move what is whole in partial/new into the folder, in place of the export there. No-op where nothing is whole.

    A caller that is stopped in the middle goes on by calling it again: each file that is there is on one of the lists
    all the time. Raises `OSError`, and `StateError` as `require_free`.
    """
    new = directory / PARTIAL / "new"
    if not (new / SUMS).is_file():
        return
    require_free(directory)
    former, coming = _lists_in(directory)
    names = {*coming, SUMS}
    for name in [
        CONFIG,
        *sorted(former.keys() - names - {CONFIG}),
    ]:  # first the one that made the export whole
        (directory / name).unlink(missing_ok=True)
    # the list comes after what is on it, and last the file that makes the export whole
    for name in [*sorted(names - {CONFIG, SUMS}), SUMS, CONFIG]:
        if (new / name).exists():
            (new / name).replace(directory / name)
    _flush(directory)


def clear_new(directory: Path) -> Path:
    """Make partial/new empty, and return it. Raises `OSError`."""
    new = directory / PARTIAL / "new"
    new.mkdir(exist_ok=True)
    (new / SUMS).unlink(missing_ok=True)  # first: without it nothing in there counts
    for path in new.iterdir():
        path.unlink()
    return new


def clear_partial(directory: Path) -> None:
    """Remove what was fetched for an export that is in its place. Raises `OSError`."""
    clear_new(directory).rmdir()
    for path in (directory / PARTIAL).iterdir():
        path.unlink()
    (directory / PARTIAL).rmdir()


def _in_the_way(directory: Path) -> Iterator[str]:
    """The names, sorted, of what no export has written, and a new one would replace or be mixed up with."""
    former, coming = _lists_in(directory)
    for path in sorted(directory.iterdir()):
        name = path.name
        if name == PARTIAL:
            yield from _strange_in(path)
        elif name == SUMS and _is_plain(path) and former:
            continue
        elif WRITTEN.fullmatch(name):
            known = [sums[name] for sums in (former, coming) if name in sums]
            if not (known and _is_plain(path) and sha256_of(path) in known):
                yield name
        elif PART_OF_A_MODEL.fullmatch(name):
            yield name


def _strange_in(partial: Path) -> Iterator[str]:
    """The names in partial/ that no export has written there."""
    if partial.is_symlink() or not partial.is_dir():
        yield PARTIAL
        return
    for path in sorted(partial.iterdir()):
        if path.name == "new" and path.is_dir() and not path.is_symlink():
            for inner in sorted(path.iterdir()):
                is_ours = WRITTEN.fullmatch(inner.name) or BEING_WRITTEN.fullmatch(inner.name)
                if not (_is_plain(inner) and is_ours):
                    yield f"{PARTIAL}/new/{inner.name}"
        elif not (_is_plain(path) and FETCHED.fullmatch(path.name)):
            yield f"{PARTIAL}/{path.name}"


def _lists_in(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes by name of the export in the folder and of the one that takes its place; empty where none is."""
    new = directory / PARTIAL / "new"
    former = _sums_in(directory) if _has_facts(directory) else {}
    return former, _sums_in(new) if _has_facts(new) or _has_facts(directory) else {}


def _sums_in(directory: Path) -> dict[str, str]:
    """What SHA256SUMS says, but for names that exports do not write: the user may have made a list of more."""
    if not _is_plain(directory / SUMS):
        return {}
    lines = (directory / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    sums = (line.split("  ", 1) for line in lines if "  " in line)
    return {name: sha for sha, name in sums if WRITTEN.fullmatch(name)}


def _has_facts(directory: Path) -> bool:
    """Return whether the facts of an export of a run lie there."""
    if not _is_plain(directory / FACTS):
        return False
    try:
        known = json.loads((directory / FACTS).read_bytes())
    except ValueError:
        return False
    return isinstance(known, dict) and {"run", "manifest"} <= known.keys()


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
