"""Why this machine cannot listen somewhere is told as it is, with the flags that chose the place."""

from __future__ import annotations

import errno
import os

import pytest

from protocol.errors import UserError
from protocol.transport.ports import require_port, why_not


@pytest.mark.parametrize(
    ("number", "host", "port", "said"),
    [
        (
            errno.EADDRINUSE,
            "::",
            31337,
            "Port 31337 is in use on ::. Stop what uses it, or choose another --port.",
        ),
        (
            errno.EADDRNOTAVAIL,
            "203.0.113.7",
            31337,
            "This machine has no address 203.0.113.7. Listen on one that it",
        ),
        (errno.EADDRNOTAVAIL, "203.0.113.7", 31337, "on all of them with --host 0.0.0.0; a router's"),
        (errno.EADDRNOTAVAIL, "2001:db8::7", 31337, "on all of them with --host ::; a router's"),
        (errno.EAFNOSUPPORT, "::1", 31337, "This machine has no address ::1."),
        (
            errno.EACCES,
            "0.0.0.0",
            443,
            "Port 443 is not permitted to this user: those below 1024 are the system's.",
        ),
        (errno.EACCES, "0.0.0.0", 31337, "Cannot listen on 0.0.0.0 port 31337 (Permission denied). Choose"),
    ],
)
def test_the_true_reason(number: int, host: str, port: int, said: str) -> None:
    assert said in why_not(OSError(number, os.strerror(number)), host, port)


def test_another_flag_has_its_own_advice() -> None:
    reason = OSError(errno.EADDRNOTAVAIL, "")
    told = why_not(reason, "203.0.113.7", 80, "--dashboard", "--dashboard")
    assert told.endswith("on all of them with --dashboard 0.0.0.0.")
    assert why_not(OSError(errno.EADDRINUSE, ""), "::1", 80, "", "--dashboard").endswith(
        "another --dashboard."
    )


@pytest.mark.parametrize(
    "host", ["", "localhost", "seed.example.org", "[::1]", "127.0.0.1:80", "fe80::1%eth0"]
)
def test_what_is_no_address_is_told_before_anything_is_tried(host: str) -> None:
    with pytest.raises(UserError, match=r"^Cannot listen on .*Try --host"):
        require_port(host, 31337)
