"""Options of the test suite; they must live at the root of the repository for pytest to see them in time."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also check the outer step against the cases of this golden file; may be repeated",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test marked `long_but(id, ...)`, all cases but these are long."""
    marked = item.get_closest_marker("long_but")
    if marked and isinstance(item, pytest.Function) and item.callspec.id not in marked.args:
        item.add_marker(pytest.mark.long)
