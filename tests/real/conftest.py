"""A test that fails leaves no daemon behind to disturb those after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real import daemons


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    before = len(daemons.started)
    yield
    for pid in daemons.started[before:]:
        daemons.end(pid)
    del daemons.started[before:]
