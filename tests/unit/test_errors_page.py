"""docs/troubleshooting.md has each error that ends a command, and none that the code does not have."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.spoken_errors import GAP, Code, Met, tidy

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ERRORS = "| message begins with | what it means | what to do |\n|---|---|---|\n"
WARNINGS = "| line | what happened |\n|---|---|\n"
# whose errors of Python's own kind become lines of a message about settings
SETTINGS = {
    "bootstrap/lab/simulated_swarm/swarm_scenario.py",
    "node/config.py",
    "node/machine/hours.py",
    "node/machine/limits.py",
    "node/machine/listening.py",
    "protocol/run/manifest.py",
    "protocol/run/model.py",
}
# which only name the place of another error, and repeat what it says
REPEATING = {
    "bootstrap/export/fetching.py",
    "node/config.py",
    "node/machine/listening.py",
    "protocol/run/manifest.py",
}
# which end no command
ELSEWHERE = {
    Met(
        "bootstrap/dashboard/sampling.py",
        "JoinError",
        "No text can be written at present: a stage has nobody that answers. Try again later.",
    ): "the page, below its box",
    Met("bootstrap/local/page.py", "UserError", "its process ended; … says why"): "the log, in brackets",
    Met(
        "node/process/dashboard_process.py", "UserError", "its process ended; what it said is above"
    ): "the log, in brackets",
    Met(
        "node/service/first_state.py",
        "JoinError",
        "Nobody has the state of stage …, and there is no --from-checkpoint.",
    ): "the log: This node chooses a stage again",
    Met(
        "node/service/first_state.py", "JoinError", "The state of stage … could not be downloaded."
    ): "the log: This node chooses a stage again",
    Met(
        "node/state/copies.py", "JoinError", "The copy of stage … could not be fetched (…)."
    ): "the log: The copy of stage … could not be fetched",
    Met("node/state/copy_keeper.py", "StateError", "the copy is not finite"): "the log, at --verbose",
    Met(
        "bootstrap/lab/in_memory/memory.py",
        "UserError",
        "… is no address in this network; try /memory/12D3Koo…",
    ): "tests: addresses of the network in memory are typed by nobody",
    Met(
        "bootstrap/lab/in_memory/memory_network.py",
        "UserError",
        "Peer … is running already. Give each peer a key file of its own.",
    ): "tests and simulations, which make the keys",
}

CODE = Code()
KINDS = CODE.kinds_of("UserError", "NodeFailed")
CONSTRUCTED = {each for kind in KINDS for each in CODE.met(kind)}
CONSTRUCTED |= {each for each in CODE.met("ValueError") if each.file in SETTINGS}
FOUND = sorted(each for each in CONSTRUCTED - set(ELSEWHERE) if re.search(r"\w", each.text))
TEXTS = sorted({each.text for each in FOUND})


def rows_of(page: str, header: str) -> list[str]:
    """What stands in the first column of each table with this header."""
    tables = [part.partition("\n\n")[0] for part in page.split(header)[1:]]
    return [tidy(line.split(" | ")[0].removeprefix("|")) for table in tables for line in table.splitlines()]


def begins(text: str, beginning: str) -> bool:
    """Whether a message begins so: with two words or more, and more where words follow.

    One word is enough if punctuation ends it, as in "… failed (…)".
    """
    if not text.startswith(beginning):
        return False
    words, rest = len(re.findall(r"\w+", beginning)), text[len(beginning) :]
    least = 1 if beginning[-1] in ").:" else 2
    return words >= least and not re.match(r"\w" if words > 2 else r" ?\w", rest)


def entries_of(row: str) -> dict[str, set[str]]:
    """The beginnings that a row names, with the messages that begin so.

    They stand between commas, of which they may have some themselves.
    """
    found: dict[str, set[str]] = {}
    parts = row.split(", ")
    while parts:
        for count in range(len(parts), 0, -1):
            entry = ", ".join(parts[:count])
            if messages := {text for text in TEXTS if begins(text, entry)}:
                break
        found[entry] = messages
        parts = parts[count:]
    return found


ENTRIES = {entry: texts for row in rows_of(PAGE, ERRORS) for entry, texts in entries_of(row).items()}
KNOWN = Counter(text for texts in ENTRIES.values() for text in texts)


def test_the_code_was_found() -> None:
    assert len(FOUND) > 300
    assert {"JoinError", "TokenizerError", "NothingHeldOut", "NobodyGreets", "NodeFailed"} <= KINDS
    assert not KINDS & {"Refused", "CodecError", "RecordError", "PeerUnreachable", "OutOfMemory"}


def test_a_message_that_is_made_elsewhere_is_followed_to_its_words() -> None:
    """To a constant of another file, a function, a caller, a list, a loop, and an error that is repeated."""
    for file, beginning in (
        ("node/cli.py", "Tell this node where the run is"),
        ("protocol/transport/ports.py", f"Port {GAP} is in use on {GAP}"),
        ("node/model/pretrained.py", f"{GAP} has no config.json"),
        ("node/command.py", f"{GAP} is not a setting"),
        ("bootstrap/generation/decoding.py", "--tokens must be 1 or more"),
        ("bootstrap/lab/simulation/learning.py", "The held-out documents of the data"),
    ):
        assert any(each.file == file and each.text.startswith(beginning) for each in FOUND), beginning


def test_what_has_no_words_repeats_another_error() -> None:
    assert {each.file for each in CONSTRUCTED if not re.search(r"\w", each.text)} == REPEATING


def test_what_ends_no_command_is_still_in_the_code() -> None:
    assert set(ELSEWHERE) <= CONSTRUCTED


@pytest.mark.parametrize("each", FOUND, ids=lambda each: each.name)
def test_each_error_has_an_entry(each: Met) -> None:
    assert KNOWN[each.text], each.text


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_entry_is_of_an_error_that_is_gone(entry: str) -> None:
    assert ENTRIES[entry]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_error_is_missed_without_its_entry(entry: str) -> None:
    """So no entry is there for nothing, and none can be taken out unnoticed."""
    assert any(KNOWN[text] == 1 for text in ENTRIES[entry])


@pytest.mark.parametrize("line", rows_of(PAGE, WARNINGS))
def test_no_warning_is_of_a_line_that_is_gone(line: str) -> None:
    parts = [part.strip(" ;,.:") for part in re.split(rf"{GAP}|\. |, (?=[A-Z])", line)]
    said = "\n".join(CODE.sentences)
    assert [part for part in parts if len(part) > 3]
    assert not [part for part in parts if part not in said]
