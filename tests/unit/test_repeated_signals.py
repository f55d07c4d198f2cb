"""Which second signal ends a process at once, and which belongs to the first."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM, Signals

import pytest

from node.machine.processes import is_repeated


@pytest.mark.parametrize(
    ("first", "number", "is_again"),
    [
        (None, SIGINT, False),
        (None, SIGTERM, False),
        (None, SIGHUP, False),
        (SIGINT, SIGINT, True),
        (SIGINT, SIGTERM, True),
        (SIGTERM, SIGTERM, True),
        (SIGTERM, SIGINT, True),
        (SIGHUP, SIGINT, True),
        (SIGINT, SIGHUP, False),  # the terminal closes while the node leaves
        (SIGHUP, SIGHUP, False),  # from the terminal, and from the shell in it
        (SIGHUP, SIGTERM, False),  # a session that systemd ends
        (SIGTERM, SIGHUP, False),
    ],
)
def test_what_one_closing_terminal_sends_asks_once(
    first: Signals | None, number: Signals, is_again: bool
) -> None:
    assert is_repeated(first, number) is is_again
