"""Threads by affinity and quota: half a core is worth one thread, whatever the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.machine import cores
from node.machine.cores import quotas, whole_cores
from node.process import serving


def version_2(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{limit}\n", encoding="utf-8")


def version_1(folder: Path, quota: int, period: int = 100_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n", encoding="utf-8")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n", encoding="utf-8")


def found(tmp_path: Path, membership: str) -> list[float]:
    (tmp_path / "self").write_text(membership, encoding="utf-8")
    return sorted(quotas(tmp_path, tmp_path / "self"))


def test_the_quota_of_a_container_is_read(tmp_path: Path) -> None:
    version_2(tmp_path, "50000 100000")
    assert found(tmp_path, "0::/\n") == [0.5]
    assert found(tmp_path, "0::/docker/not-mounted-here\n") == [0.5]


def test_every_group_above_counts_and_no_quota_is_none(tmp_path: Path) -> None:
    version_2(tmp_path / "slice", "400000 100000")
    version_2(tmp_path / "slice" / "node", "max 100000")
    version_2(tmp_path / "slice" / "node" / "own", "150000 100000")
    assert found(tmp_path, "0::/slice/node/own\n") == [1.5, 4.0]


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_version_1_is_read_by_either_name(mounted: str, tmp_path: Path) -> None:
    version_1(tmp_path / mounted, -1)
    version_1(tmp_path / mounted / "docker" / "x", 50_000)
    assert found(tmp_path, "4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n") == [0.5]


@pytest.mark.parametrize("contents", ["", "max", "soon 100000", "0 100000", "50000 0"])
def test_what_is_no_quota_limits_nothing(contents: str, tmp_path: Path) -> None:
    version_2(tmp_path, contents)
    assert found(tmp_path, "0::/\n") == []
    assert not list(quotas(tmp_path, tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("may_run_on", "allowed", "threads"),
    [(8, (), 8), (8, (0.5,), 1), (8, (0.01,), 1), (8, (3.9, 6.0), 3), (2, (16.0,), 2), (1, (), 1)],
)
def test_threads_never_wait_for_the_quota(may_run_on: int, allowed: tuple[float, ...], threads: int) -> None:
    assert whole_cores(may_run_on, iter(allowed)) == threads


def test_a_node_takes_no_more_threads_than_cores_unless_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(serving, "cores", lambda: 1)
    assert serving.threads_for(0) == 1
    assert serving.threads_for(4) == 4
    monkeypatch.setattr(serving, "cores", lambda: 32)
    assert serving.threads_for(0) == 16


def test_torch_and_p2pd_are_told_of_a_quota_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, free = {"OMP_NUM_THREADS": "3"}, dict[str, str]()
    monkeypatch.setattr(cores, "_may_run_on", lambda: 8)
    monkeypatch.setattr(cores, "quotas", lambda: iter([2.5]))
    cores.keep_within_quota(chosen)
    assert chosen == {"OMP_NUM_THREADS": "3", "GOMAXPROCS": "2"}
    monkeypatch.setattr(cores, "quotas", lambda: iter([]))
    cores.keep_within_quota(free)
    assert free == {}
