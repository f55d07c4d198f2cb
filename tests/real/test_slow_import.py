"""An import that keeps the thread is told from another one."""

from __future__ import annotations

import time

import pytest

from node.watch.phases import Phases, told_while_importing


def test_an_import_that_keeps_the_thread_is_told_from_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr("node.watch.phases.LOOK_SECONDS", 0.1)
    phases = Phases(rewrite=said.append)
    phases.begin("loading torch")
    with told_while_importing(phases):
        time.sleep(2.2)
    assert said[1].startswith("Still loading torch (")
