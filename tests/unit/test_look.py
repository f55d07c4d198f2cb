"""`make look` and `make pages` see what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import look, pages


def test_a_long_file_and_a_long_function_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def one():\n    def two():\n        pass\n\n    two()\n"
    monkeypatch.setattr(look, "MOST_LINES", 4)
    monkeypatch.setattr(look, "MOST_OF_A_FUNCTION", 4)
    assert list(look.lengths(source)) == [("file", "5 lines"), ("one", "5 lines")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('"""Whoever sits on a key."""\n', "neither verb nor noun phrase"),
        ('"""Mutable state: the last one."""\n', "state before what it is"),
        ('"""Return the last one."""\n# so many of them\n', "foreign"),
    ],
)
def test_a_sentence_that_is_hard_to_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: str
) -> None:
    (tmp_path / "node").mkdir()
    file = tmp_path / "node" / "odd.py"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(look, "ROOT", tmp_path)
    assert kind in [found.kind for found in look.looked_at(file)]


def test_walks_are_numbered_and_their_files_counted() -> None:
    walk = "# Walks\n\n## A round\n\nIn 9 files.\n\n1. `a.py` `b`: c\n1. `d.py` `e`: f\n    - `a.py` `g`: h\n"
    assert pages.numbered(walk) == walk.replace("In 9", "In 2").replace("1. `d", "2. `d")


def test_every_folder_of_the_packages_is_on_the_page_of_files() -> None:
    page = pages.files_page()
    assert "## protocol/rpc/\n" in page
    assert "| partner_search.py | " in page
    assert "|  |" not in page, "each module says what it is"
