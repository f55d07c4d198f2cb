"""A test that fails leaves no daemon behind to disturb those after it; and which tests may run at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.network import daemons

# They mostly wait, the longest first: with two workers they run beside other long ones, which run one after another
BESIDE = ("test_slow_stage_for_real.py", "test_bare_wheel.py", "test_wrong_inputs.py")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: BESIDE.index(item.path.name) if item.path.name in BESIDE else len(BESIDE))
    for item in items:
        if item.path.parent.name in ("network", "attacks") and item.get_closest_marker("long"):
            beside = item.path.name in BESIDE
            item.add_marker(pytest.mark.xdist_group("beside" if beside else "one after another"))


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    before = len(daemons.started)
    yield
    for daemon in daemons.started[before:]:
        daemon.kill()
    del daemons.started[before:]
