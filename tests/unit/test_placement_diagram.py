"""docs/architecture.md shows the ways to a stage as a newcomer and a member take them."""

from __future__ import annotations

from pathlib import Path

from placement_diagram import MEMBER, NEWCOMER, diagrams, members_arrows, newcomers_arrows

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_ways_as_they_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for diagram in diagrams():
        assert diagram in page, "python tests/unit/placement_diagram.py prints them for docs/architecture.md"


def test_every_question_is_asked() -> None:
    for arrows, questions in ((newcomers_arrows(), NEWCOMER), (members_arrows(), MEMBER)):
        assert {name for arrow in arrows for name in arrow} == {"[*]", *questions}
