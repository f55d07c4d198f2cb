"""By which names the page answers, and beyond which machine a private run is not shown."""

from __future__ import annotations

import pytest

from bootstrap.dashboard.hosts import AllowedHosts, host_in
from bootstrap.dashboard.running import invitation, require_here
from protocol.errors import UserError
from tests.swarm.micro import micro_manifest

OWN = ("box", "box.local")
LOOPBACK = ["127.0.0.1", "127.0.0.1:8765", "localhost", "LOCALHOST:9", "localhost.", "[::1]", "[::1]:8765"]
ADDRESSES = ["192.168.1.7", "203.0.113.9:8765", "[2001:db8::1]:80"]
STRANGE = [
    "evil.example",
    "evil.example:8765",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1, evil.example",
    "127.0.0.1/",
    "[::1",
    "[evil.example]",
    "",
    " ",
    None,
]


@pytest.mark.parametrize("listening", ["127.0.0.1", "::1", "127.0.0.5"])
def test_at_loopback_only_names_of_loopback_are_answered(listening: str) -> None:
    hosts = AllowedHosts(listening, own=OWN)
    assert [host for host in LOOPBACK if not hosts.allows(host)] == []
    assert [host for host in [*STRANGE, *ADDRESSES, "box"] if hosts.allows(host)] == []


@pytest.mark.parametrize("listening", ["0.0.0.0", "::", "192.168.1.7"])
def test_elsewhere_addresses_and_the_machines_names_are_answered(listening: str) -> None:
    hosts = AllowedHosts(listening, own=OWN)
    assert [host for host in [*LOOPBACK, *ADDRESSES, "box:1", "Box.local"] if not hosts.allows(host)] == []
    assert [host for host in STRANGE if hosts.allows(host)] == []


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
def test_the_name_that_a_person_gave_is_answered(listening: str) -> None:
    hosts = AllowedHosts(listening, "Page.example:8765", own=OWN)
    assert hosts.allows("page.example")
    assert hosts.allows("page.example:443")
    assert not hosts.allows("other.example")
    assert [named for named in ("", ":8765", "0.0.0.0:80") if AllowedHosts(listening, named).allows("")] == []


def test_hosts_are_read_without_brackets_and_ports() -> None:
    read = {"a.b:1": "a.b", "[::1]:2": "::1", "A.": "a", "a b": "", "a:b": "", "a:1:2": ""}
    assert {text: host_in(text) for text in read} == read


def test_others_are_invited_to_the_address_that_is_reached_from_farthest() -> None:
    here, near, far = (f"/ip4/{host}/tcp/1/p2p/me" for host in ("127.0.0.1", "192.168.1.7", "8.8.8.8"))
    assert invitation([here, near, "/dns4/seed.example/tcp/1/p2p/me"])["reach"] == "everywhere"
    assert invitation([here, near]) == {"line": f"noloco join {near}", "reach": "this network"}
    assert invitation([here, near, far])["line"] == f"noloco join {far}"
    assert invitation([here])["reach"] == "this machine"


def test_a_private_run_is_shown_on_this_machine_alone() -> None:
    private, open_ = micro_manifest(access__private=True), micro_manifest()
    require_here(private, "127.0.0.1")
    require_here(private, "::1")
    require_here(open_, "0.0.0.0")
    for host in ("0.0.0.0", "::", "192.168.1.7"):
        with pytest.raises(UserError, match=r"private run .*ssh -L"):
            require_here(private, host)
