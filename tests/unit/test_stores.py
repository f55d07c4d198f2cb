"""Stores of documents: damaged anywhere they are made again, touched text keeps them, and old ones make room."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import node.data.shelf
from bootstrap.tools_cli import app
from node.data.documents import Split, StoredDocuments, stored_documents
from node.data.shelf import MOST_BYTES, most_bytes
from node.data.store import INDEX, MARK, TEXT, Mark, write_store
from protocol.errors import DataError
from protocol.files.keeping import one_after_another
from tests.unit import corpora

DOCUMENTS = corpora.made_up(30)
TOLD = "are damaged; they are made again."


def stored(entry: Path, cache: Path, most: str = "") -> StoredDocuments:
    return stored_documents([str(entry)], "text", 16_384, Split(0.5), cache, most=most)


def everything(documents: StoredDocuments) -> list[str]:
    return [*documents.held_out(), *documents.training((), 0, 0)]


def stores_in(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """A text, a cache, and the store of the text in it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    text, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    corpora.as_jsonl(text, DOCUMENTS)
    stored(text, cache)
    return text, cache, stores_in(cache)[0]


# --- damage -------------------------------------------------------------------------------------


def damaged(contents: bytes, place: int, how: str) -> bytes:
    if how == "cut":
        return contents[:place]
    if how == "longer":
        return contents + b"\0"
    if how == "zeros":
        return contents[:place] + bytes(len(contents) - place)
    if how == "a block of zeros":
        end = min(place + 512, len(contents))
        return contents[:place] + bytes(end - place) + contents[end:]
    return contents[:place] + bytes([contents[place] ^ 1 << place % 8]) + contents[place + 1 :]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    file=st.sampled_from([TEXT, INDEX, MARK]),
    place=st.integers(0, 10**9),
    how=st.sampled_from(["flip", "cut", "zeros", "a block of zeros", "longer"]),
    when=st.sampled_from(["before the start", "while it is open"]),
)
def test_a_store_damaged_anywhere_gives_the_text_that_it_was_made_of_or_says_what_was_made_again(
    made: tuple[Path, Path, Path],
    caplog: pytest.LogCaptureFixture,
    file: str,
    place: int,
    how: str,
    when: str,
) -> None:
    text, cache, store = made
    kept = stored(text, cache)
    expected = everything(kept)
    contents = (store / file).read_bytes()
    changed = damaged(contents, -1 if place % 7 == 0 else place % len(contents), how)
    (store / file).write_bytes(changed)  # the same file: who has it open sees it
    caplog.clear()
    if when == "before the start":
        kept = stored(text, cache)
    assert everything(kept) == expected
    if changed != contents and (when == "before the start") and file != MARK:
        assert caplog.text.count(TOLD) == 1
    assert caplog.text.count(TOLD) <= 1
    caplog.clear()
    assert everything(stored(text, cache)) == expected
    if when == "before the start":
        assert TOLD not in caplog.text


@pytest.mark.parametrize("file", [TEXT, INDEX])
def test_damage_under_a_node_that_trains_is_mended_once_for_all_who_read(
    file: str, made: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    text, cache, store = made
    first, second = stored(text, cache), stored(text, cache)
    expected = everything(first)
    with (store / file).open("r+b") as opened:
        opened.truncate(0)  # under a memory map this would end the process
    assert everything(first) == everything(second) == expected
    assert caplog.text.count(TOLD) == 1


@pytest.mark.parametrize("what", ["gone", "changed"])
def test_damage_that_cannot_be_mended_is_told_in_a_sentence(what: str, made: tuple[Path, Path, Path]) -> None:
    text, cache, store = made
    kept = stored(text, cache)
    (store / TEXT).write_bytes(bytes((store / TEXT).stat().st_size))
    if what == "gone":
        text.unlink()
    else:
        corpora.as_jsonl(text, DOCUMENTS[1:])
    told = (
        r"are damaged and cannot be made again\. Cannot read '.*rows\.jsonl' \(No such file.*Check the path"
        if what == "gone"
        else r"were damaged, and the text that they were made of has changed since\. Start again: "
    )
    with pytest.raises(DataError, match=told):
        everything(kept)


def test_a_store_of_the_earlier_form_is_made_again_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    corpora.as_jsonl(text, DOCUMENTS)
    earlier = of_format_2(cache)
    kept = stored(text, cache)
    assert sorted(everything(kept)) == sorted(DOCUMENTS)
    assert TOLD not in caplog.text
    assert earlier.exists()  # until the room is wanted


def of_format_2(cache: Path) -> Path:
    """As versions before 29 November 2026 have made it."""
    store = cache / ("0a" * 16)
    store.mkdir(parents=True)
    (store / TEXT).write_bytes(b"one text")
    np.save(store / "index.npy", np.array([[7, 0, 8]], np.uint64))
    os.utime(store, (1, 1))
    return store


# --- text that was touched, or changed ----------------------------------------------------------


@pytest.mark.parametrize("as_what", [corpora.as_jsonl, corpora.as_text, corpora.as_saved_to_disk])
def test_text_that_was_touched_is_not_read_again(
    as_what: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    entry = Path(as_what(tmp_path / "text.jsonl", DOCUMENTS))  # type: ignore[operator]
    expected = everything(stored(entry, cache))

    def read_again(places: object, field: str) -> Iterator[object]:
        raise AssertionError("the files were read a second time")

    monkeypatch.setattr("node.data.documents.documents_in", read_again)
    files = [file for file in tmp_path.glob("text*/**/*") if file.is_file()] or [entry]
    for start in range(4):
        for file in files:
            os.utime(file, (start, start))
        assert everything(stored(entry, cache)) == expected
    assert len(stores_in(cache)) == 1


def test_text_that_changed_takes_the_place_of_what_it_was(made: tuple[Path, Path, Path]) -> None:
    text, cache, store = made
    before = stored(text, cache)
    for count in (10, 20, 29):
        corpora.as_jsonl(text, DOCUMENTS[:count])
        assert sorted(everything(stored(text, cache))) == sorted(DOCUMENTS[:count])
    assert stores_in(cache) == [store]
    assert sorted(everything(before)) == sorted(DOCUMENTS)  # whoever trains on it has it still


@pytest.mark.parametrize("reason", ["other text", "damage"])
def test_an_outdated_store_is_gone_before_the_new_one_is_written(
    reason: str, made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the disk need not hold the text three times."""
    text, cache, store = made
    bytes_there = list[int]()

    def measured(directory: Path, documents: Iterable[tuple[int, bytes]], mark: Mark) -> int:
        bytes_there.append(sum(file.stat().st_size for file in store.glob("*")))
        return write_store(directory, documents, mark)

    monkeypatch.setattr(node.data.shelf, "write_store", measured)
    if reason == "damage":
        (store / INDEX).write_bytes(b"")
    else:
        corpora.as_jsonl(text, DOCUMENTS[1:])
    expected = DOCUMENTS if reason == "damage" else DOCUMENTS[1:]
    assert sorted(everything(stored(text, cache))) == sorted(expected)
    assert bytes_there == [0]


def test_a_file_of_somebody_else_outlives_every_store_in_its_folder(made: tuple[Path, Path, Path]) -> None:
    text, cache, store = made
    being_made = store.with_suffix(".new")
    being_made.mkdir()
    letters = [store / "letter", being_made / "letter"]
    for letter in letters:
        letter.write_text("mine")
    for documents in (DOCUMENTS[1:], DOCUMENTS[2:]):
        corpora.as_jsonl(text, documents)
        assert sorted(everything(stored(text, cache))) == sorted(documents)
        assert [letter.read_text() for letter in letters] == ["mine", "mine"]
    (store / TEXT).write_bytes(b"")
    assert sorted(everything(stored(text, cache))) == sorted(DOCUMENTS[2:])
    text.write_text("")
    with pytest.raises(DataError):
        stored(text, cache)
    assert [letter.read_text() for letter in letters] == ["mine", "mine"]


# --- room ---------------------------------------------------------------------------------------


def several(tmp_path: Path, count: int = 4) -> tuple[list[Path], Path]:
    """So many texts whose stores were opened one after another."""
    texts, cache = [], tmp_path / "cache"
    for number in range(count):
        texts.append(tmp_path / f"{number}.jsonl")
        corpora.as_jsonl(texts[-1], [f"{number}" * 1000])
        before = set(stores_in(cache)) if cache.exists() else set()
        stored(texts[-1], cache)
        [new] = set(stores_in(cache)) - before
        os.utime(new, (number, number))
    return texts, cache


def test_the_oldest_stores_that_nobody_has_open_make_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    texts, cache = several(tmp_path)
    in_use = stored(texts[0], cache, "1GB")
    earlier = of_format_2(cache)
    os.utime(max(stores_in(cache), key=lambda store: store.stat().st_mtime), (0, 0))  # that of texts[0]
    kept = stored(texts[3], cache, "3KB")  # each takes some 1.3 KB
    assert len(stores_in(cache)) == 2
    assert not earlier.exists()
    assert everything(in_use) == ["0" * 1000]
    assert everything(kept) == ["3" * 1000]
    assert caplog.text.count("Removed prepared documents that nobody has open") == 3
    assert sorted(path.stem for path in cache.glob("*.lock")) == [store.name for store in stores_in(cache)]


def test_what_this_program_has_not_made_is_never_removed(tmp_path: Path) -> None:
    texts, cache = several(tmp_path, 2)
    (cache / ("ab" * 16)).mkdir()
    (cache / ("ab" * 16) / TEXT).write_text("mine")
    (cache / ("cd" * 16 + ".new")).mkdir()
    (cache / ("cd" * 16 + ".new") / "letter").write_text("mine")
    elsewhere = shutil.copytree(min(cache.glob("*/store.json")).parent, tmp_path / "elsewhere")
    (cache / ("ef" * 16)).symlink_to(elsewhere)
    (cache / "my-store").mkdir()
    (cache / "my-store" / MARK).write_bytes((elsewhere / MARK).read_bytes())
    beside = next(store for store in stores_in(cache) if store.stat().st_mtime == 0) / "letter"
    beside.write_text("mine, too")
    before = {path for path in cache.rglob("*") if "letter" in path.name or path.parent.name.startswith("ab")}
    stored(texts[1], cache, "1KB")
    assert all(path.exists() for path in before)
    assert len(list(elsewhere.iterdir())) == 3
    assert (cache / "my-store" / MARK).exists()


def test_what_a_killed_process_was_making_is_removed_and_what_one_is_making_is_not(
    made: tuple[Path, Path, Path],
) -> None:
    text, cache, store = made
    left, busy = cache / ("12" * 16 + ".new"), cache / ("34" * 16 + ".new")
    for being_made in (left, busy):
        being_made.mkdir()
        (being_made / TEXT).write_bytes(b"half of the te")
        (being_made / MARK).write_bytes((store / MARK).read_bytes())
    with one_after_another(busy.with_suffix(".lock")):
        stored(text, cache)
    assert [left.exists(), busy.exists()] == [False, True]


def test_a_place_without_locks_is_only_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, cache = several(tmp_path, 3)

    class NoLocks:
        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        @staticmethod
        def flock(file: object, wish: int) -> None:
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(node.data.shelf, "fcntl", NoLocks)
    stored(texts[0], cache, "1KB")
    assert len(stores_in(cache)) == 3


def test_the_bound_is_what_was_said_or_the_smaller_of_20_gb_and_a_tenth_of_the_disk() -> None:
    assert most_bytes("", 10**11) == 10**10
    assert most_bytes("", 10**13) == MOST_BYTES == 20 * 10**9
    assert most_bytes("30%", 10**12) == 3 * 10**11
    assert most_bytes("50GB", 10**12) == 5 * 10**10


@pytest.mark.parametrize("wish", ["much", "200%", "5"])
def test_a_bound_that_is_none_is_told(wish: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["eval", "--model", str(tmp_path), "--cache-size", wish])
    assert shown.exit_code == 2
    assert f"error: --cache-size: '{wish}'" in shown.output
