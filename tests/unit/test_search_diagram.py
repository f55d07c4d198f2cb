"""docs/walks.md shows the phases of the search for a partner as the machine goes through them."""

from __future__ import annotations

from pathlib import Path

from search_diagram import arrows, diagram

from node.rounds.partner_search import Phase

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_phases_as_they_are() -> None:
    page = (ROOT / "docs" / "walks.md").read_text(encoding="utf-8")
    assert diagram() in page, "python tests/unit/search_diagram.py prints the diagram for docs/walks.md"


def test_every_phase_is_entered_and_left() -> None:
    found = arrows()
    assert {before for before, _ in found} == {after for _, after in found} == set(Phase)
