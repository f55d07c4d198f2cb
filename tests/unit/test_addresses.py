"""Addresses: what people paste is either usable as it is or refused with the reason."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.addresses import check_address, is_loopback, peer_id_in, without_peer
from protocol.errors import UserError
from protocol.identity import Identity

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
        (f"/dns4/-x.org/tcp/31337/p2p/{PEER}", "kind dns4"),
        (f"/dns4/x..org/tcp/31337/p2p/{PEER}", "kind dns4"),
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
