"""A test that fails leaves no daemon behind to disturb those after it."""

from __future__ import annotations

from collections.abc import Iterator

import daemons
import pytest


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    before = len(daemons.started)
    yield
    for daemon in daemons.started[before:]:
        daemon.kill()
    del daemons.started[before:]
