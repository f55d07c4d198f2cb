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
