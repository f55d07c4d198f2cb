"""docs/defence.md names every place that records something against a peer, and each row's tests are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "defence.md").read_text(encoding="utf-8")
# whatever is held against a peer, or is a judgement of its work, is one of these calls
RECORDS = {
    "strike",
    "_note_fruitless",
    "suspect",
    "record_meeting",
    "record_check",
    "record_overruling",
    "record_bad",
    "record_holding",
    "left_out.add",
    "OddLoss",
    "OddGradient",
    "Unrepeatable",
}
# that keep the accounts, and define what the calls mean
ACCOUNTS = {"protocol/access/peer_limits.py", "node/membership/ledger.py", "node/membership/view.py"}


class Row(NamedTuple):
    lie: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


def rows() -> list[Row]:
    section = PAGE.split("## Who notices what", 1)[1].split("\n## ", 1)[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [
        Row(
            row[0],
            tuple(re.findall(r"`([a-z_/]+\.py)`", row[1])),
            tuple(re.findall(r"tests/[\w/]+\.py", row[-1])),
        )
        for row in cells
    ]


def called(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=attr, value=ast.Attribute(attr=owner)) if f"{owner}.{attr}" in RECORDS:
            return f"{owner}.{attr}"
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def records_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := called(node)) in RECORDS:
            yield name


@cache
def recording() -> frozenset[str]:
    """The files of the product that record something of a peer, the accounts apart."""
    files = [*(ROOT / "node").rglob("*.py"), *(ROOT / "protocol").rglob("*.py")]
    found = {
        file.relative_to(ROOT).as_posix()
        for file in files
        if any(records_in(file.read_text(encoding="utf-8")))
    }
    return frozenset(found - ACCOUNTS)


def test_records_are_found_in_code() -> None:
    source = "a.strike(p)\nself.left_out.add(p)\nother.add(p)\nraise OddLoss(1.0, 2.0)\nview.suspect\n"
    assert sorted(records_in(source)) == ["OddLoss", "left_out.add", "strike"]
    assert len(recording()) > 10


def test_each_place_that_records_something_of_a_peer_is_in_the_table_and_no_other() -> None:
    judges = {row.files[0] for row in rows() if len(row.files) > 1} - recording()
    assert {file for row in rows() for file in row.files} - judges == recording()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.lie[:40])
def test_each_row_has_its_place_and_a_test_that_is_there(row: Row) -> None:
    """A judge that records nothing itself is used where its row says so, or by what that place belongs to."""
    assert row.files
    assert any(file in recording() for file in row.files)
    assert row.tests
    assert all((ROOT / test).exists() for test in row.tests)
    judges = [file for file in row.files if file not in recording()]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "node").rglob("*.py"))
    for judge in judges:
        assert (ROOT / judge).exists()
        assert f"from {judge.removesuffix('.py').replace('/', '.')} import" in sources


def test_all_calls_that_count_are_used_so_that_the_list_is_no_wish() -> None:
    used = {name for file in recording() for name in records_in((ROOT / file).read_text(encoding="utf-8"))}
    assert used == RECORDS
