"""Addresses: what people paste is either usable as it is or refused with the reason."""

from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UserError
from protocol.records.addresses import (
    Whereabouts,
    check_address,
    check_announced,
    dialable,
    host_of,
    is_loopback,
    peer_id_in,
    without_peer,
)
from protocol.records.identity import Identity
from protocol.transport.hivemind_api import Multiaddr

PEER = Identity.from_seed("someone").peer_id


@pytest.mark.parametrize(
    "place",
    [
        "/ip4/203.0.113.7/tcp/31337",
        "/ip6/2001:db8::1/tcp/1",
        "/dns4/seed.example.org/tcp/65535",
        "/dns6/a-b.example/tcp/80",
        "/dns/localhost/tcp/31337",
    ],
)
def test_right_addresses_pass_unchanged(place: str) -> None:
    address = f"{place}/p2p/{PEER}"
    assert check_address(f"  {address}\n") == address
    assert peer_id_in(address) == PEER
    assert without_peer(address) == place


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "form"),
        ("203.0.113.7:31337", "form"),
        (PEER, "form"),
        ("/ip4/203.0.113.7/tcp/31337", "form"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}/", "form"),
        (f"x/ip4/203.0.113.7/tcp/31337/p2p/{PEER}", "form"),
        (f"/ip5/203.0.113.7/tcp/31337/p2p/{PEER}", "begins with /ip5/"),
        (f"/ip4/203.0.113.777/tcp/31337/p2p/{PEER}", "'203.0.113.777' is not an address of kind ip4"),
        (f"/ip6/203.0.113.7/tcp/31337/p2p/{PEER}", "kind ip6"),
        (f"/ip6/fe80::1%eth0/tcp/31337/p2p/{PEER}", "kind ip6"),
        (f"/dns4/-x.org/tcp/31337/p2p/{PEER}", "kind dns4"),
        (f"/dns4/x..org/tcp/31337/p2p/{PEER}", "kind dns4"),
        (f"/dns4/my_host/tcp/31337/p2p/{PEER}", "underscore"),
        (f"/ip4/203.0.113.7/udp/31337/p2p/{PEER}", "tcp"),
        (f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}", "port"),
        (f"/ip4/203.0.113.7/tcp/65536/p2p/{PEER}", "port"),
        (f"/ip4/203.0.113.7/tcp/-1/p2p/{PEER}", "port"),
        (f"/ip4/203.0.113.7/tcp/²/p2p/{PEER}", "port"),
        (f"/ip4/203.0.113.7/tcp/31337/ipfs/{PEER}", "/p2p/"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER[:-1]}", "peer id"),
    ],
)
def test_wrong_addresses_are_named_with_the_reason_and_an_example(address: str, reason: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_address(address)
    text = str(refusal.value)
    assert reason in text
    assert repr(address) in text
    assert "/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo" in text


@given(
    st.text(max_size=100)
    | st.lists(st.sampled_from(["", "ip4", "1.2.3.4", "tcp", "9", "p2p", PEER])).map("/".join)
)
def test_arbitrary_text_only_ever_raises_user_errors(text: str) -> None:
    with contextlib.suppress(UserError):
        assert check_address(text) == text.strip()


def test_loopback_addresses_are_told_apart() -> None:
    assert is_loopback("/ip4/127.0.0.1/tcp/1")
    assert is_loopback(f"/ip6/::1/tcp/1/p2p/{PEER}")
    assert not is_loopback("/ip4/203.0.113.7/tcp/1")
    assert not is_loopback("/dns4/localhost/tcp/1")
    assert not is_loopback("")


def somewhere(*hosts: str, is_local: bool = False) -> Whereabouts:
    return Whereabouts(frozenset(map(ipaddress.ip_address, hosts)), is_local)


ABROAD = somewhere("127.0.0.1", "8.8.4.4")


def place(host: str, port: int = 31337) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def test_public_addresses_are_dialled_with_and_without_the_peer() -> None:
    for host in ("8.8.8.8", "2a00:1450::1", "::ffff:8.8.8.8"):
        assert ABROAD.may_dial(place(host))
        assert dialable([f"{place(host)}/p2p/{PEER}"], ABROAD) == [f"{place(host)}/p2p/{PEER}"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1",  # this machine
        "169.254.169.254", "fe80::1", "fe80::1%eth0", "2a00:1450::1%eth0", "fec0::1",  # this link, this site
        "0.0.0.0", "0.1.2.3", "::", "::ffff:0.0.0.0",  # nowhere
        "224.0.0.1", "239.255.255.250", "ff02::1", "255.255.255.255", "240.0.0.1",  # many, or nobody yet
        "192.0.2.1", "198.51.100.1", "203.0.113.7", "2001:db8::1", "198.18.0.1", "192.0.0.1",  # for books and trials
        "64:ff9b::a00:1", "2002:0a00:0001::1", "2001:0:4136:e378::1", "::10.0.0.1",  # with an IPv4 address within
        "10.0.0.1", "172.16.9.9", "192.168.1.1", "100.64.0.1", "fd00::1", "::ffff:192.168.1.1",  # others' networks
    ],
)  # fmt: skip
def test_addresses_of_no_place_on_the_internet_are_not_dialled(host: str) -> None:
    assert not ABROAD.may_dial(place(host))


@pytest.mark.parametrize(
    ("own", "near", "far"),
    [
        ("10.77.0.1", "10.77.0.2", "192.168.0.2"),
        ("172.17.0.2", "172.31.0.1", "10.0.0.1"),
        ("192.168.1.5", "::ffff:192.168.1.9", "172.16.0.1"),
        ("100.64.3.2", "100.127.0.1", "10.0.0.1"),
        ("fd00::2", "fd12::1", "10.0.0.1"),
    ],
)
def test_a_private_network_is_for_those_who_are_in_it(own: str, near: str, far: str) -> None:
    here = somewhere("127.0.0.1", own)
    assert here.may_dial(place(near))
    assert not here.may_dial(place(far))


def test_loopback_is_for_swarms_on_one_machine() -> None:
    local = somewhere("127.0.0.1", is_local=True)
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert local.may_dial(place(host))
    assert not local.may_dial(place("169.254.0.1"))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "nonsense",
        "/ip4",
        "/ip4/8.8.8.8",
        "/ip4/8.8.8.8/tcp",
        "/ip4/8.8.8.8/tcp/",
        "/ip4/8.8.8.8/udp/31337",
        "/dns4/example.org/tcp/31337",
        "/dns/localhost/tcp/31337",
        "/ip4/8.8.8/tcp/31337",
        "/ip6/8.8.8.8/tcp/31337",
        *(f"/ip4/8.8.8.8/tcp/{port}" for port in ("0", "22", "1023", "65536", "99999", "-1", "²", "0031337")),
    ],
)
def test_names_other_transports_and_ports_of_services_are_not_dialled(address: str) -> None:
    assert not ABROAD.may_dial(address)
    assert not somewhere("127.0.0.1", is_local=True).may_dial(address)


@given(st.ip_addresses(), st.lists(st.ip_addresses(), max_size=3), st.integers(0, 65_535))
def test_nothing_but_public_hosts_or_shared_private_ranges_is_ever_dialled(
    host: ipaddress.IPv4Address | ipaddress.IPv6Address,
    own: list[ipaddress.IPv4Address | ipaddress.IPv6Address],
    port: int,
) -> None:
    if not Whereabouts(frozenset(own), False).may_dial(place(str(host), port)):
        return
    assert port >= 1_024
    real = host_of(place(str(host)))
    assert real is not None
    assert not any([real.is_loopback, real.is_link_local, real.is_multicast, real.is_unspecified])
    assert real.is_global or own


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["", "ip4", "ip6", "8.8.8.8", "tcp", "9999", "::1"])).map("/".join)
)
def test_arbitrary_text_is_not_dialled_or_well_formed(text: str) -> None:
    assert not ABROAD.may_dial(text) or text.startswith("/ip4/8.8.8.8/tcp/9999")


@given(st.from_regex(r"[A-Za-z0-9._-]{1,70}", fullmatch=True))
def test_every_name_that_passes_is_one_to_libp2p(host: str) -> None:
    with contextlib.suppress(UserError):
        Multiaddr(without_peer(check_address(f"/dns4/{host}/tcp/31337/p2p/{PEER}")))


# --- what a peer announces -----------------------------------------------------------------------

OTHER = Identity.from_seed("another").peer_id


@pytest.mark.parametrize(
    "place", ["/ip4/203.0.113.7/tcp/31337", "/ip6/2001:db8::1/tcp/443", "/dns4/seed.example.org/tcp/1"]
)
def test_the_own_id_is_taken_off_what_is_announced(place: str) -> None:
    assert check_announced(f" {place} ", PEER) == place
    assert check_announced(f"{place}/p2p/{PEER}", PEER) == place
    assert check_announced(f"{place}/p2p/{OTHER}") == place  # before the own id is known


@pytest.mark.parametrize(
    ("announced", "reason"),
    [
        (f"/ip4/203.0.113.7/tcp/1/p2p/{OTHER}", f"ends with another peer's id, and this peer is {PEER}"),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{OTHER}/p2p-circuit", "is not a peer id; leave out /p2p/"),
        ("/ip4/203.0.113.7/tcp/1/p2p/me", "is not a peer id; leave out /p2p/"),
        ("203.0.113.7", "write it as /ip4/203.0.113.7/tcp/31337, with the port that leads"),
        ("203.0.113.7:31451", "write it as /ip4/203.0.113.7/tcp/31451,"),
        ("[2001:db8::1]:31451", "write it as /ip6/2001:db8::1/tcp/31451,"),
        ("2001:db8::1", "write it as /ip6/2001:db8::1/tcp/31337,"),
        ("/ip4/203.0.113.7", "the form /ip4/HOST/tcp/PORT"),
        ("/ip4/203.0.113.7/udp/1/quic", "the form /ip4/HOST/tcp/PORT"),
        ("/ip4/203.0.113.7/udp/1", "listen on tcp, not on 'udp'"),
        ("/ip4/203.0.113.7/tcp/0", "'0' is not a port between 1 and 65535"),
        ("/ip4/203.0.113.700/tcp/1", "'203.0.113.700' is not an address of kind ip4"),
        ("/ip4/0.0.0.0/tcp/1", "nobody can dial 0.0.0.0"),
        ("/ip6/::/tcp/1", "nobody can dial ::"),
        ("/ip6/fe80::1%eth0/tcp/1", "not an address of kind ip6"),
        ('"/ip4/203.0.113.7/tcp/31451"', "quotes around it: leave them out"),
        ("'/ip4/203.0.113.7/tcp/31451", "quotes around it: leave them out"),
        ("seed.example.org:31451", "the form /ip4/HOST/tcp/PORT"),
        ("", "the form /ip4/HOST/tcp/PORT"),
    ],
)
def test_what_nobody_can_be_reached_at_is_not_announced(announced: str, reason: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_announced(announced, PEER)
    text = str(refusal.value)
    assert reason in text
    assert text.startswith("Cannot announce ")
    assert "--announce" in text
    assert text.endswith("A right one looks like /ip4/203.0.113.7/tcp/31337")
    assert "\n" not in text


@given(st.text(max_size=100))
def test_any_text_is_announced_as_an_address_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        assert check_address(f"{check_announced(text, PEER)}/p2p/{PEER}")
