"""What `noloco doctor` says of what it has seen: each finding that is not well names what to do."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from bootstrap.inspect.doctor import line, uplink
from bootstrap.inspect.large_packets import NAME, lost_above
from bootstrap.inspect.reachability import Answered, clock, reachability
from node.machine.checkup import (
    OUTSIDE,
    CheckResult,
    Interface,
    disk,
    gpu,
    interface,
    kernels_driver,
    memory,
    mtu,
    ulimits,
)
from node.machine.limits import Room
from node.process.first_look import towards
from protocol.records.announcement import LinkReport
from protocol.records.identity import Identity

GIB = 2**30
AT = "/ip4/11.0.113.7/tcp/31337"
HOME = Interface("wlan0", "192.168.1.20", 1500)
PUBLIC = Interface("eth0", "11.0.113.7", 1500)


def test_memory_names_the_limit_that_is_short() -> None:
    assert memory(Room(3 * GIB, 4 * GIB)).is_well
    short = memory(Room(GIB // 2, GIB, "the container"))
    assert short.is_well is False
    assert short.told == (
        "512.0 MiB are free of the 1.0 GiB that the container allows. Close other programs, or raise the limit."
    )


def test_a_full_disk_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    assert disk(tmp_path / "not" / "yet", free=3 * GIB).is_well
    full = disk(tmp_path, free=0)
    assert full.is_well is False
    assert "--state-dir on another disk" in full.told
    file = tmp_path / "file"
    file.touch()
    assert "cannot be written by this user" in disk(file, free=3 * GIB).told


@pytest.mark.parametrize(
    ("files", "file_size", "is_well", "told"),
    [
        (65_536, resource.RLIM_INFINITY, True, "65,536 files may be open."),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, "any number of files may be open."),
        (256, resource.RLIM_INFINITY, None, "ulimit -n 65536"),
        (65_536, 1 << 20, False, "A file may have 1.0 MiB (ulimit -f)"),
    ],
)
def test_the_limits_of_the_shell(files: int, file_size: int, is_well: bool | None, told: str) -> None:
    found = ulimits(files, file_size)
    assert found.is_well is is_well
    assert told in found.told


def test_a_gpu_that_torch_cannot_use_is_not_well() -> None:
    assert gpu(["NVIDIA L4"], "535.104.05", "2.13", "13.0").told == "NVIDIA L4, driver 535.104.05."
    assert gpu([], "", "2.13", None).is_well is None
    assert gpu([], "470.82", "2.13", "13.0").told.endswith(
        "torch 2.13 is made for CUDA 13.0: update the driver."
    )
    assert gpu([], "535.1", "2.13", None).is_well is False


def test_the_kernel_tells_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert kernels_driver(file) == ""
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:  gcc 12.2.0\n"
    )
    assert kernels_driver(file) == "535.104.05"


def test_the_interface_and_its_mtu() -> None:
    assert "a private address" in interface(HOME).told
    assert interface(PUBLIC).told == "eth0, 11.0.113.7."
    assert interface(None).is_well is False
    assert mtu(PUBLIC).is_well
    tunnel = mtu(Interface("wg0", "10.9.0.2", 1280))
    assert tunnel.is_well is None
    assert tunnel.told.endswith("ip link set dev wg0 mtu 1500")
    small = mtu(Interface("tun0", "10.9.0.2", 1000))
    assert small.is_well is False
    assert small.told.endswith("ip link set dev tun0 mtu 1280")


def test_the_interface_is_looked_for_towards_the_first_host_with_a_number() -> None:
    peer = Identity.from_seed("peer").peer_id
    assert towards([f"/dns4/seed.example/tcp/1/p2p/{peer}", f"{AT}/p2p/{peer}"]) == "11.0.113.7"
    assert towards([]) == OUTSIDE


def test_what_is_sent_to_try_large_packets_is_libp2ps() -> None:
    length = (NAME[0] & 0x7F) + (NAME[1] << 7)  # a varint
    assert length == len(NAME) - 2
    assert length <= 1024  # go-multistream takes no longer ones


def test_a_way_that_loses_large_packets_is_told_with_the_size_that_passes() -> None:
    lost = lost_above(1280, HOME)
    assert lost.is_well is False
    assert lost.told.startswith("Packets of 1280 bytes arrive, larger ones (1360) are lost")
    assert "ip link set dev wlan0 mtu 1280" in lost.told
    assert "larger ones (1500)" in lost_above(1492, HOME).told


def test_a_wrong_clock_is_told_by_most_members() -> None:
    right = Answered(AT, 0.02)
    assert clock([right, right, None], 0.02, 3.0).told == "+0.02 s beside 2 members'; 3 s are allowed."
    assert clock([], -0.5, 3.0).told == "-0.50 s beside a member's; 3 s are allowed."
    wrong = clock([Answered(AT, -9.0), Answered(AT, -9.1), right], 0.02, 3.0)
    assert wrong.is_well is False
    assert wrong.told.startswith("-9.00 s beside 3 members'; 3 s are allowed. Switch on time synchronisation")
    theirs = clock([right, right, Answered(AT, 40.0)], 0.02, 3.0)
    assert theirs.is_well
    assert theirs.told.endswith("1 of them differs by more, which is theirs to mend.")


def test_who_is_dialled_by_some_is_reachable() -> None:
    found = reachability([AT, AT, "", None], 31337, near=HOME)
    assert found == CheckResult("port", True, f"2 of 3 peers dialled this machine directly, at {AT}.")
    assert reachability([None], 4).is_well is None


def test_who_is_dialled_in_its_own_network_alone_may_not_be_elsewhere() -> None:
    found = reachability(["/ip4/192.168.1.20/tcp/31337"], 31337, near=HOME)
    assert found.is_well is None
    assert "Forward TCP port 31337 of the router to 192.168.1.20" in found.told
    assert reachability(["/ip4/127.0.0.1/tcp/31337"], 31337).is_well  # a swarm on one machine


def test_who_cannot_be_dialled_is_told_what_to_forward() -> None:
    no = reachability(["", "", None], 31337, near=HOME)
    assert no.is_well is None, "a seed peer passes streams on"
    assert no.told.startswith("None of 2 peers could dial this machine.")
    assert "--relay-for-others" in no.told
    assert "Forward TCP port 31337 of the router to 192.168.1.20, this machine" in no.told
    unknown = reachability([""], 31337)
    assert "Forward TCP port 31337 of the router to this machine" in unknown.told


def test_who_is_behind_a_router_is_told_whether_others_there_meet_it_directly() -> None:
    no = reachability(["", ""], 31337, near=HOME, seen=[AT, AT], networks=2)
    assert no.told.startswith("None of 2 peers, of 2 networks, could dial this machine.")
    assert f"Most others behind routers it meets directly: 2 peers see it at {AT}." in no.told
    other = AT.replace("31337", "40000")
    apart = reachability(["", ""], 31337, near=HOME, seen=[AT, other], networks=1)
    assert "None of 2 peers could dial" in apart.told
    assert f"the router gives each destination another port ({AT}, {other})." in apart.told
    assert "directly" not in reachability([""], 31337, near=HOME, seen=[AT]).told


def test_with_an_address_of_its_own_it_is_the_firewall() -> None:
    no = reachability([""], 31337, near=PUBLIC)
    assert "Open TCP port 31337 in this machine's firewall (ufw allow 31337/tcp)" in no.told
    assert "router" not in no.told


def test_the_uplink_is_the_best_that_was_measured() -> None:
    peer = Identity.from_seed("peer").peer_id
    slow, fast, small = (LinkReport(peer, 0.03, 1e6), LinkReport(peer, 0.02, 2e6), LinkReport(peer, 0.03))
    assert uplink([slow, fast, small]).told == "16.0 Mbit/s or more, round trip 20 ms."
    assert uplink([]).is_well is None
    assert uplink([small]).is_well is False


def test_a_line_has_a_mark() -> None:
    assert line(CheckResult("port", False, "Nobody.")) == "NO  port      Nobody."
    assert line(CheckResult("port", None, "Nobody.")).startswith("--  port")
