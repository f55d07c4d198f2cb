"""How much memory a node believes that it may take: the least of all limits, of either version of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import build_config
from node.machine.limits import _cgroup_rooms, parse_size, size
from protocol.errors import UserError

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * GIB),
        ("800 MiB", 800 * MIB),
        ("1.5g", 1_500_000_000),
        ("6GB", 6 * 10**9),
        ("4294967296", 4 * GIB),
    ],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "4 apples", "0", "GiB", "1e9", "0.1"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 4GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["20", "4096"])
def test_a_number_that_lacks_its_unit_is_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=f"as {text}GiB"):
        parse_size(text)


def test_the_limit_comes_from_flag_environment_or_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('max_memory = "3GiB"')
    assert build_config({}, {}, file).most_memory == 3 * GIB
    assert build_config({}, {"NOLOCO_MAX_MEMORY": "2GiB"}, file).most_memory == 2 * GIB
    assert build_config({"max_memory": "1GiB"}, {"NOLOCO_MAX_MEMORY": "2GiB"}).most_memory == GIB
    assert build_config({}, {}).most_memory == 0
    with pytest.raises(UserError, match="--max-memory: 'lots' is not an amount of memory: write it as 4GiB"):
        build_config({"max_memory": "lots"}, {})


def group(folder: Path, limit: str, used: int, reclaimable: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current", "inactive_file")}.get(
        version, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {reclaimable}\n")


def test_a_containers_limit_is_read_and_its_page_cache_is_free(tmp_path: Path) -> None:
    """Inside a container the own group is the root of what is mounted."""
    group(tmp_path, str(GIB), used=700 * MIB, reclaimable=200 * MIB)
    (tmp_path / "self").write_text("0::/\n")
    (room,) = _cgroup_rooms(tmp_path, tmp_path / "self")
    assert (room.free, room.limit, room.source) == (524 * MIB, GIB, "the container")
    assert room.described() == " of the 1.0 GiB that the container allows"


def test_every_group_above_counts(tmp_path: Path) -> None:
    group(tmp_path / "slice", str(GIB), used=10 * MIB, reclaimable=0)
    group(tmp_path / "slice" / "node", "max", used=10 * MIB, reclaimable=0)
    (tmp_path / "self").write_text("0::/slice/node\n")
    assert [room.limit for room in _cgroup_rooms(tmp_path, tmp_path / "self")] == [GIB]


def test_version_1_is_read_too_and_its_no_limit_is_none(tmp_path: Path) -> None:
    group(tmp_path / "memory", str(2**63 - 4096), used=10 * MIB, reclaimable=0, version=1)
    group(tmp_path / "memory" / "docker" / "x", str(GIB), used=24 * MIB, reclaimable=0, version=1)
    (tmp_path / "self").write_text("4:cpu,memory:/docker/x\n1:name=systemd:/docker/x\n0::/\n")
    (room,) = _cgroup_rooms(tmp_path, tmp_path / "self")
    assert room.free == 1000 * MIB


@pytest.mark.parametrize("membership", ["", "0::/gone\n", "4:memory:/gone\n"])
def test_without_control_groups_there_is_no_such_limit(membership: str, tmp_path: Path) -> None:
    (tmp_path / "self").write_text(membership)
    assert not list(_cgroup_rooms(tmp_path, tmp_path / "self"))
    assert not list(_cgroup_rooms(tmp_path, tmp_path / "nothing"))


def test_sizes_for_people() -> None:
    assert (size(GIB), size(5 * MIB)) == ("1.0 GiB", "5.0 MiB")
