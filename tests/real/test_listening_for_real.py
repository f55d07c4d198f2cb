"""Sockets of this machine: on IPv6, on addresses that it has or has not, on ports that are taken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from node.process.dashboard_process import own_addresses
from protocol.errors import ResourceError
from protocol.records.identity import Identity
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from protocol.transport.ports import port_is_free, require_port
from tests.patience import patience


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_port_of_ipv6_is_free_until_it_is_taken_and_ipv4_has_its_own(host: str) -> None:
    with socket.socket(socket.AF_INET6) as taken, socket.socket() as old:
        old.bind(("127.0.0.1", 0))
        old.listen()
        assert require_port(host, old.getsockname()[1]).version == 6
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(host, port)
        with pytest.raises(ResourceError, match=rf"Port {port} is in use on {host}\."):
            require_port(host, port)
    assert port_is_free(host, port)


def test_an_address_that_is_not_of_this_machine_is_named() -> None:
    with pytest.raises(ResourceError, match=r"This machine has no address 203\.0\.113\.7"):
        require_port("203.0.113.7", 31337)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_peers_meet_over_ipv6_and_keep_their_port(host: str, tmp_path: Path) -> None:
    def make(name: str, port: int = 0) -> Libp2pTransport:
        Identity.load_or_create(tmp_path / f"{name}.key")
        return Libp2pTransport(tmp_path / f"{name}.key", Libp2pConfig(host=host, port=port))

    seed, newcomer = make("seed"), make("newcomer")
    await seed.start()
    await newcomer.start()
    addresses = seed.addresses()
    assert all(address.startswith("/ip6/") for address in addresses)
    port = int(addresses[0].split("/")[4])
    [here, *_] = own_addresses(seed, port, host)
    assert here == f"/ip6/::1/tcp/{port}/p2p/{seed.peer_id}"
    assert await newcomer.connect([here], patience(20.0)) == [seed.peer_id]
    await seed.close()
    await newcomer.close()
    again = make("seed", port)
    await again.start()
    assert here in again.addresses()
    await again.close()
