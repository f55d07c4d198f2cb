"""Fixtures of the tests of exchanges."""

from __future__ import annotations

import pytest

from tests.unit.two_ends import PIECE


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in so many pieces that a micro model has several."""
    for module in ("model.fragment", "rounds.exchanges"):
        monkeypatch.setattr(f"node.{module}.PIECE_PARAMETERS", PIECE)
