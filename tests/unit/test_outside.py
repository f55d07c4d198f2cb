"""Which address a node tells others when it is behind a mapped port."""

from __future__ import annotations

import logging

import pytest

from node.membership.outside import (
    MOST_ANNOUNCED,
    Told,
    announced,
    inner_port,
    is_dialled,
    is_outside,
    outside_addresses,
    rented,
)
from protocol.errors import UserError
from protocol.messages.peers import Welcome

CONTAINER = ["/ip4/172.17.0.3/tcp/31337/p2p/12D3Koo", "/ip4/127.0.0.1/tcp/31337/p2p/12D3Koo"]
RUNPOD = {"RUNPOD_PUBLIC_IP": "203.0.113.9", "RUNPOD_TCP_PORT_22": "40022", "RUNPOD_TCP_PORT_31337": "41337"}
VAST = {"PUBLIC_IPADDR": "203.0.113.9", "VAST_TCP_PORT_22": "33022", "VAST_TCP_PORT_31337": "33337"}


def test_what_runpod_and_vast_set_is_the_address() -> None:
    assert rented(31337, RUNPOD).address == "/ip4/203.0.113.9/tcp/41337"
    assert rented(31337, VAST).address == "/ip4/203.0.113.9/tcp/33337"
    assert rented(31337, {**VAST, "PUBLIC_IPADDR": "2001:db8::9"}).address == "/ip6/2001:db8::9/tcp/33337"


def test_a_port_that_is_not_mapped_is_told_with_what_to_do() -> None:
    assert rented(8000, RUNPOD).address == ""
    assert "Add 8000 to the pod's exposed TCP ports" in rented(8000, RUNPOD).warning
    assert "Add -p 8000:8000" in rented(8000, VAST).warning


@pytest.mark.parametrize("host", ["not-an-address", "203.0.113.9/tcp/1"])
@pytest.mark.parametrize("port", ["0", "99999", "ssh", "٣"])
def test_nonsense_in_the_environment_is_told_and_not_announced(host: str, port: str) -> None:
    for environment in ({**RUNPOD, "RUNPOD_PUBLIC_IP": host}, {**RUNPOD, "RUNPOD_TCP_PORT_31337": port}):
        found = rented(31337, environment)
        assert found.address == ""
        assert found.warning.endswith("Give the right one with --announce.")


def test_elsewhere_the_environment_says_nothing() -> None:
    # Vast.ai's variable alone is set by others, too
    assert rented(31337, {"PATH": "/bin", "PUBLIC_IPADDR": "203.0.113.9"}) == rented(31337, {})
    assert rented(31337, {}).warning == ""


def test_the_volunteers_word_counts_more_than_the_platforms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in RUNPOD.items():
        monkeypatch.setenv(name, value)
    assert announced(["/dns4/me.example/tcp/1"], 31337) == ("/dns4/me.example/tcp/1",)
    with pytest.raises(UserError, match=r"--announce names .* choose it with --port"):
        announced(["/dns4/me.example/tcp/1"], 0)
    assert announced((), 31337) == ("/ip4/203.0.113.9/tcp/41337",)
    with caplog.at_level(logging.WARNING):
        assert announced((), 31338) == ()
    assert "maps no port to 31338" in caplog.text


def test_only_a_node_without_a_public_address_asks_to_be_dialled() -> None:
    assert inner_port(CONTAINER) == 31337
    assert inner_port(["/ip4/8.8.8.8/tcp/31337/p2p/12D3Koo", *CONTAINER]) == 0
    assert inner_port(["/ip4/127.0.0.1/tcp/31337/p2p/12D3Koo"]) == 0
    assert inner_port([]) == 0


@pytest.mark.parametrize(
    ("address", "outside"),
    [
        ("/ip4/8.8.8.8/tcp/31337", True),
        ("/ip4/192.168.1.20/tcp/31337", True),  # the container's host, to the others in its network
        ("/ip4/172.17.0.1/tcp/31337", False),  # the gateway of the container's own network
        ("/ip4/172.17.0.3/tcp/31337", False),
        ("/ip4/127.0.0.1/tcp/31337", False),
        ("/ip4/8.8.8.8/udp/31337", False),
        ("/dns4/example.org/tcp/31337", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_what_counts_as_an_outside_address(address: str, outside: bool) -> None:
    assert is_outside(address, CONTAINER) is outside


RIGHT, WRONG = "/ip4/8.8.8.8/tcp/31337", "/ip4/9.9.9.9/tcp/31337"
OWN = [address.partition("/p2p/")[0] for address in CONTAINER if "127.0.0.1" not in address]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([Told(RIGHT, "a"), Told(RIGHT, "b")], [RIGHT]),
        ([Told(WRONG, "x"), Told(RIGHT, "a"), Told(RIGHT, "b")], [RIGHT]),
        ([Told(RIGHT, "a")], [RIGHT, *OWN]),  # the usual beginning: there is one greeter, and it may lie
        ([Told(WRONG, "x"), Told(WRONG, "x"), Told(WRONG, "x")], [WRONG, *OWN]),  # all of one network
        ([Told(WRONG, "x"), Told(RIGHT, "a")], [WRONG, RIGHT, *OWN]),
        ([Told("", "a"), Told("/ip4/172.17.0.1/tcp/31337", "b"), Told("nonsense", "c")], []),
        ([Told(f"/ip4/8.8.8.8/tcp/{port}", "a") for port in ("99999", "0", "٣", "1/ws", "1/p2p/x")], []),
        ([], []),
    ],
)
def test_one_networks_word_replaces_no_address_of_this_machine(told: list[Told], expected: list[str]) -> None:
    """Before: the first greeter's word was announced alone, be it the address of the liar itself."""
    assert outside_addresses(told, CONTAINER) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], False),
        ([Told("", "a"), Told("", "b")], False),
        ([Told(RIGHT, "a")], True),  # nobody else is there to ask
        ([Told(WRONG, "x"), Told("", "a")], None),
        ([Told(WRONG, "x"), Told(WRONG, "x"), Told("", "a"), Told("", "b")], None),
        ([Told(RIGHT, "a"), Told("", "x"), Told(RIGHT, "b")], True),
        ([Told(RIGHT, "a"), Told("", "a"), Told("", "a")], False),
    ],
)
def test_one_networks_word_against_others_makes_no_node_one_that_can_be_dialled(
    told: list[Told], expected: bool | None
) -> None:
    assert is_dialled(told) is expected


def test_many_words_fit_a_record() -> None:
    many = [Told(f"/ip4/8.8.{n}.8/tcp/31337", f"{n}") for n in range(20)]
    own = [f"/ip4/10.{n}.0.1/tcp/31337" for n in range(20)]
    found = outside_addresses(many, own)
    assert len(found) == MOST_ANNOUNCED
    assert set(found) & set(own)


def test_where_a_peer_says_that_it_reached_this_node_is_one_line_without_escape_codes() -> None:
    """Failed before: it stands in the log, on the terminal and in what the doctor says."""
    rude = "/ip4/1.2.3.4\x1b]0;title\x07\n12:00:00  ! Your node is broken"
    welcome = Welcome(run_id="run", time=0.0, role="node", manifest=b"", reached=rude)
    told = Welcome.parsed({**welcome.model_dump(), "reached": rude}).reached
    assert told.isprintable()
    assert told.startswith(r"/ip4/1.2.3.4\x1b]0;title\x07 12:00:00")
