"""Each command that a page shows is run by a test, or the table says why by none."""

from __future__ import annotations

from tests.shown_commands import commands_of, entry_of, shown, table, to_run
from tests.unit.test_docs_promises import is_a_test


def test_commands_are_taken_from_indented_blocks() -> None:
    page = "Text with `noloco x`.\n\n    noloco eval   --join ADDRESS   # what it does\n"
    page += "    noloco plan \\\n        --json\n"
    page += "    loss  1.2\n    nolocomotive\n\n```\n    noloco in a fence\n```\n"
    assert commands_of(page) == ["noloco eval --join ADDRESS", "noloco plan --json"]


def test_each_command_of_a_page_has_its_entry() -> None:
    assert len(shown()) > 80
    assert [command for command in shown() if entry_of(command) is None] == []


def test_each_entry_is_of_a_command_that_a_page_shows() -> None:
    used = {entry["begins"] for command in shown() if (entry := entry_of(command))}
    assert [entry["begins"] for entry in table() if entry["begins"] not in used] == []


def test_each_entry_says_what_runs_it() -> None:
    for entry in table():
        assert set(entry) in ({"begins", "run", "prints"}, {"begins", "tests"}, {"begins", "why"}), entry
        assert entry.get("run", "alone") in ("alone", "in a run"), entry
        assert [test for test in entry.get("tests", []) if not is_a_test(test)] == [], entry["begins"]
    assert len(to_run("alone")) > 6
    assert len(to_run("in a run")) > 15
