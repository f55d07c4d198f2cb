"""Where `noloco swarm` has its page: what is asked for, and what is said without the packages."""

from __future__ import annotations

import re

import pytest

from bootstrap.local import page
from protocol.errors import MissingPackage, UserError
from protocol.files.installation import extra_line


def why_not(place: str) -> str:
    """Why there can be no page; empty for a place that can be one."""
    try:
        page.require_place(place)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", ["", "none", "8765", "127.0.0.1:0", "[::1]:8765"])
def test_a_place_is_a_port_with_or_without_a_host_or_none(place: str) -> None:
    assert why_not(place) == ""


@pytest.mark.parametrize("place", ["nowhere", "127.0.0.1", "127.0.0.1:99999"])
def test_a_mistyped_place_is_told_with_its_flag(place: str) -> None:
    assert re.match(r"--dashboard: .* is not HOST:PORT", why_not(place))


def test_none_is_no_page_and_says_nothing() -> None:
    said = list[str]()
    assert page.open_page("none", said.append) is None
    assert not said


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PACKAGES", ("json", "no_such_package"))
    said = list[str]()
    assert page.open_page("", said.append) is None
    assert said == [f"For a web page of the run: {extra_line('dashboard')}."]
    with pytest.raises(MissingPackage, match=r"\[dashboard\]"):  # it was asked for
        page.open_page("127.0.0.1:0", said.append)
