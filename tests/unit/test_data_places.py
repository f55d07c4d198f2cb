"""Places that --data names beside plain files: links to nothing, folders without permission, pipes, a mixture."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data.documents import Split, stored_documents
from node.data.sources import documents_in, places_of
from protocol.errors import DataError
from tests.unit.corpora import as_jsonl
from tests.unit.test_data import without_privileges

TEXT = "a text that is long enough to be one\n"


def texts_of(*entries: Path) -> list[str]:
    places = places_of([str(entry) for entry in entries])
    return [b"".join(document).decode() for document in documents_in(places, "text")]


def test_a_link_to_nothing_is_passed_over_unless_it_would_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    for name in ("latest", ".#a.txt", "deep/old.md"):  # an editor's lock is such a link
        (folder / name).symlink_to("nowhere")
    assert texts_of(folder) == [TEXT]
    stored_documents([str(folder)], "text", 16_384, Split(0.05), tmp_path / "cache")
    (folder / "deep" / "b.txt").symlink_to("nowhere")
    for entry in (folder, folder / "**" / "*.txt", folder / "deep" / "b.txt"):
        with pytest.raises(DataError, match=r"Cannot read .*b\.txt.* \(No such file .*Check the path"):
            stored_documents([str(entry)], "text", 16_384, Split(0.05), tmp_path / "cache")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that anybody can come to."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)
        for folder, _, _ in os.walk(directory):
            Path(folder).chmod(0o700)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
@pytest.mark.parametrize(
    "entry", ["closed", "closed/*", "closed/*.txt", "closed/a.txt", "open", "open/deep/*.txt"]
)
def test_a_folder_without_permission_is_named(entry: str, mode: int, shared: Path) -> None:
    if (mode, entry) == (0o111, "closed/a.txt"):
        return  # may be passed through
    (shared / "open" / "deep").mkdir(parents=True)
    (shared / "closed").mkdir()
    for name in ("open/a.txt", "open/deep/b.txt", "closed/a.txt"):
        (shared / name).write_text(TEXT)
    (shared / "open" / "deep").chmod(mode)
    (shared / "closed").chmod(mode)
    with without_privileges(), pytest.raises(DataError) as refusal:
        stored_documents([str(shared / entry)], "text", 16_384, Split(0.05), shared / "cache")
    assert re.search(r"Cannot read '.*(closed|deep).*' \(Permission denied\)\. Check", str(refusal.value))


def test_a_pipe_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for entry in (tmp_path / "pipe.txt", Path("/dev/null")):
        with pytest.raises(DataError, match=r"is a pipe or a device, .* Write it to a file"):
            places_of([str(entry)])
    (tmp_path / "a.txt").write_text(TEXT)
    assert texts_of(tmp_path) == texts_of(tmp_path / "*.txt") == [TEXT]


def test_text_beside_rows_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "noloco")
    folder = tmp_path / "my texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    as_jsonl(folder / "b.jsonl", ["a row"])
    assert texts_of(folder) == ["a row"]
    (told,) = [line for line in caplog.messages if "left out" in line]
    assert "its 1 files without" in told
    assert f"--data '{folder}/*.txt'" in told
    assert texts_of(folder, folder / "**" / "*.txt") == ["a row", TEXT]  # the advice, followed


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "**", "*/*.txt", "open/**/*.txt", "*/*/*.txt", "o*/deep/b.txt"]
)
def test_a_folder_that_a_pattern_may_not_go_into_is_named(pattern: str, mode: int, shared: Path) -> None:
    (shared / "open" / "deep").mkdir(parents=True)
    for name in ("a.txt", "open/a.txt", "open/deep/b.txt"):
        (shared / name).write_text(TEXT)
    closed = shared / "open" / "deep" if pattern.startswith(("*/*/", "o")) else shared / "open"
    closed.chmod(mode)
    with without_privileges():
        if (pattern, mode) == ("o*/deep/b.txt", 0o111):  # what is named in full needs no look into the folder
            assert texts_of(shared / pattern) == [TEXT]
            return
        with pytest.raises(DataError, match=r"Cannot read '.*(open|deep).*' \(Permission denied\)\. Check"):
            stored_documents([str(shared / pattern)], "text", 16_384, Split(0.05), shared / "cache")


def test_a_closed_folder_beside_the_way_of_a_pattern_is_nobodys_business(shared: Path) -> None:
    for name in ("texts", "other", "texts/.hidden"):
        (shared / name).mkdir()
    (shared / "texts" / "a.txt").write_text(TEXT)
    for name in ("other", "texts/.hidden"):
        (shared / name).chmod(0)
    with without_privileges():
        assert texts_of(shared / "t*" / "**" / "*.txt") == texts_of(shared / "texts") == [TEXT]
