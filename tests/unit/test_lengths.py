"""No file is longer than 500 lines and no function than 70: what does not fit is most likely two things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "node", "bootstrap", "tests", "benchmarks", "docker")
MOST_LINES, MOST_OF_A_FUNCTION = 500, 70
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The name of each, and its lines."""
    for found in ast.walk(ast.parse(source)):
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            assert found.end_lineno is not None
            yield found.name, found.end_lineno - found.lineno + 1


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_neither_the_file_nor_a_function_is_too_long(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert source.count("\n") <= MOST_LINES
    assert not [(name, lines) for name, lines in functions(source) if lines > MOST_OF_A_FUNCTION]


def test_lengths_are_counted() -> None:
    assert list(functions("def one():\n    def two():\n        pass\n\n    two()\n")) == [
        ("one", 5),
        ("two", 2),
    ]
    assert len(FILES) > 500


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: of two it collects one, and fails when both are asked for."""
    names = [file.name for file in FILES if file.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
