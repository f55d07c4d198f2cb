"""Hours of the week: as people write them, over midnight, and over a change of clocks. The clock is made up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from node.machine.hours import Hours

ZURICH = ZoneInfo("Europe/Zurich")  # clocks go forward on 29 March 2026 at 2:00, back on 25 October at 3:00
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")  # by half an hour


@pytest.mark.parametrize(
    ("hours", "moment", "covered"),
    [
        ("22-07", "24T23:30", True),
        ("22-07", "24T06:59", True),
        ("22-07", "24T07:00", False),
        ("22-07", "24T21:59", False),
        ("09:30-17", "24T09:30", True),
        ("09:30-17", "24T17:00", False),
        ("00-24", "24T13:00", True),
        ("18-24", "24T23:59", True),
        ("18-24", "24T00:00", False),
        ("mon-fri 22-07, sat-sun", "24T12:00", False),  # a Tuesday
        ("mon-fri 22-07, sat-sun", "28T06:30", True),  # Saturday morning
        ("mon-fri 22-07, sat-sun", "28T12:00", True),
        ("mon-fri 22-07, sat-sun", "29T23:59", True),
        ("mon-fri 22-07, sat-sun", "30T00:00", False),  # Sunday's window ended, Monday's has not begun
        ("fri 22-07", "28T06:59", True),  # the window of Friday
        ("fri 22-07", "27T06:59", False),
        ("sat-mon 12-13", "30T12:30", True),
        ("sat-mon 12-13", "24T12:30", False),
        ("06-08,12-13:15, 22-23", "24T13:14", True),
        ("06-08,12-13:15, 22-23", "24T13:15", False),
        ("Wed 20 - 04", "26T03:59", True),
        ("tue 22-22", "25T21:59", True),  # a day long
        ("tue 22-22", "25T22:00", False),
    ],
)
def test_windows(hours: str, moment: str, covered: bool) -> None:
    assert Hours.parse(hours).covers(datetime.fromisoformat(f"2026-11-{moment}")) is covered


@pytest.mark.parametrize(
    "text",
    [
        "22",
        "25-07",
        "22-07:61",
        "24:30-03",
        "mon tue 22-07",
        "foo",
        "mon-",
        "-07",
        "mon 22",
        "22-07,",
        ",",
        "-",
    ],
)
def test_what_are_no_hours(text: str) -> None:
    with pytest.raises(ValueError, match="write them as 22-07"):
        Hours.parse(text)


def covered_minutes(hours: str, begin: datetime, zone: ZoneInfo) -> list[datetime]:
    """The minutes, in UTC, of the day from `begin` on that are covered, by a clock in that zone."""
    parsed, first = Hours.parse(hours), begin.replace(tzinfo=zone).astimezone(UTC)
    minutes = (first + timedelta(minutes=minute) for minute in range(24 * 60))
    return [minute for minute in minutes if parsed.covers(minute.astimezone(zone))]


@pytest.mark.parametrize(
    ("hours", "noon", "minutes"),
    [
        ("22-07", "2026-03-27T12:00", 9 * 60),  # an ordinary night
        ("22-07", "2026-03-28T12:00", 8 * 60),  # clocks go from 2:00 to 3:00
        ("22-07", "2026-10-24T12:00", 10 * 60),  # they go from 3:00 to 2:00
        ("sun 02-03", "2026-03-28T12:00", 0),  # there is no such hour
        ("sun 02-03", "2026-10-24T12:00", 120),  # it comes twice
        ("sun 02:30-04", "2026-03-28T12:00", 60),
        ("sat 22-02:30, sun 05-06", "2026-10-24T12:00", 6 * 60),  # of them half an hour twice
    ],
)
def test_a_change_of_clocks_makes_the_night_shorter_or_longer(hours: str, noon: str, minutes: int) -> None:
    assert len(covered_minutes(hours, datetime.fromisoformat(noon), ZURICH)) == minutes


@pytest.mark.parametrize(
    ("hours", "now", "begins"),
    [
        ("22-07", "2026-11-24T12:00:01", "2026-11-24T22:00+01:00"),
        ("mon-fri 22-07, sat-sun", "2026-11-27T12:00", "2026-11-27T22:00+01:00"),
        ("sat-sun", "2026-11-30T00:00", "2026-12-05T00:00+01:00"),
        ("mon 12:07-12:09", "2026-11-30T12:09", "2026-12-07T12:07+01:00"),
        ("07-22", "2026-03-28T23:00", "2026-03-29T07:00+02:00"),  # over the change
        ("07-22", "2026-10-24T23:00", "2026-10-25T07:00+01:00"),
        ("sun 02:30-04", "2026-03-28T23:00", "2026-03-29T03:00+02:00"),  # 2:30 is left out
        (
            "sun 02-02:30",
            "2026-10-25T02:40",
            "2026-10-25T02:00+01:00",
        ),  # twenty minutes later, the second time
    ],
)
def test_when_they_begin_again(hours: str, now: str, begins: str) -> None:
    found = Hours.parse(hours).begins(datetime.fromisoformat(now).replace(tzinfo=ZURICH))
    assert found is not None
    assert found.isoformat(timespec="minutes") == begins
    assert Hours.parse(hours).covers(found)
    assert not Hours.parse(hours).covers((found.astimezone(UTC) - timedelta(minutes=1)).astimezone(ZURICH))


def test_clocks_may_change_by_half_an_hour() -> None:
    """On 4 October 2026 at 2:00 to 2:30."""
    assert len(covered_minutes("22-07", datetime(2026, 10, 3, 12), LORD_HOWE)) == 8.5 * 60


@pytest.fixture
def clock_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of Zurich, by rules that need no database."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("clock_of_the_machine")
def test_the_machine_s_own_clock_is_followed_over_a_change() -> None:
    """`datetime.astimezone` gives a fixed offset, which must not be taken for that of the next morning."""
    before = datetime.fromtimestamp(1_774_735_200, UTC).astimezone()
    assert before.isoformat() == "2026-03-28T23:00:00+01:00"
    begins = Hours.parse("07-22").begins(before)
    assert begins is not None
    assert begins.isoformat() == "2026-03-29T07:00:00+02:00"
