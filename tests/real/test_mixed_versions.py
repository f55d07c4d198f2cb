"""Yesterday's program beside today's: commits of this repository's own history, in one run with this one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.run.manifest import as_toml
from protocol.run.signed_manifest import SignedManifest
from tests.patience import patience
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool, wait_until
from tests.versions.formats import VERSIONS

pytestmark = [pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LAST = "69c8df8"  # the last kept version before records named theirs: it averages with this one
APART = "0a455aa"  # the sample beside its contributions has another size
FIRST = "088b778"  # whose directories and manifests are taken over
MICRO = VERSIONS / LAST / "node-1" / "manifest.noloco"
SLOW = patience(120.0)

Old = tuple[str, ...]  # what to put before a command so that an earlier version runs it


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Old]]:
    """Earlier versions' own code, which runs with the packages that are installed for this one."""
    place, prefixes = tmp_path_factory.mktemp("versions"), {}
    for commit in (LAST, APART):
        there = subprocess.run(
            ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"],
            check=False,
            capture_output=True,
        )
        if there.returncode:
            pytest.skip(f"this clone's history does not go back to {commit}")
        folder = place / commit
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(folder), commit],
            check=True,
            capture_output=True,
        )
        prefixes[commit] = ("env", "-C", str(folder), f"PYTHONPATH={folder}")
    yield prefixes
    for folder in place.iterdir():
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(folder)],
            check=True,
            capture_output=True,
        )


@pytest.fixture
def micro(tmp_path: Path) -> Path:
    """A small run's manifest, as a founder writes it."""
    path = tmp_path / "micro.toml"
    text = as_toml(SignedManifest.from_bytes(MICRO.read_bytes()).manifest)
    path.write_text(
        text.replace('clock = "replica"\n', ""), encoding="utf-8"
    )  # which earlier versions do not know
    return path


def kept(version: str, name: str, place: Path) -> Path:
    """A copy of what an earlier version left behind."""
    return Path(shutil.copytree(VERSIONS / version / name, place / name))


def partners(node: NodeDaemon) -> set[str]:
    return {event["partner"] for event in node.events("round") if event.get("partner")}


def peer_of(node: NodeDaemon) -> str:
    return node.address.rpartition("/")[2]


def test_the_last_version_and_this_one_train_and_average_in_one_run(
    checkouts: dict[str, Old], micro: Path, tmp_path: Path
) -> None:
    """Its seed and one of its nodes at each stage; then each is started again as today's, and loses nothing."""
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(micro), prefix=checkouts[LAST])
    join = "--join", seed.join_address()
    old = [
        NodeDaemon(tmp_path / f"old-{s}", *join, "--stage", str(s), prefix=checkouts[LAST]) for s in (0, 1)
    ]
    new = [NodeDaemon(tmp_path / f"new-{s}", *join, "--stage", str(s)) for s in (0, 1)]
    for mine, theirs in zip(new, old, strict=True):
        assert wait_until(lambda: peer_of(theirs) in partners(mine), SLOW), mine.output  # noqa: B023
        assert wait_until(lambda: peer_of(mine) in partners(theirs), SLOW), theirs.output  # noqa: B023
        assert not mine.events("version-apart")
    for stage, before in enumerate(old):
        at = before.step
        assert before.leave() == 0
        upgraded = NodeDaemon(before.state, *join, "--stage", str(stage))
        upgraded.wait_for_step(at + 5, SLOW)
        assert "tarts again at" not in upgraded.output
        old[stage] = upgraded
    for mine, theirs in zip(new, old, strict=True):
        met = len([1 for event in mine.events("round") if event.get("partner") == peer_of(theirs)])
        assert wait_until(
            lambda: sum(e.get("partner") == peer_of(theirs) for e in mine.events("round")) > met,  # noqa: B023
            SLOW,
        ), mine.output
    told = run_tool("status", "--join", seed.join_address())
    assert "versions apart" not in told.stdout
    assert all(daemon.leave() == 0 for daemon in (*old, *new, seed))


@pytest.mark.parametrize("is_seed_old", [True, False])
def test_versions_whose_contributions_do_not_fit_say_so_once_and_train_on(
    checkouts: dict[str, Old], tmp_path: Path, is_seed_old: bool
) -> None:
    run = kept(APART, "run", tmp_path)
    seed = SeedDaemon(run, prefix=checkouts[APART] if is_seed_old else ())
    join = "--join", seed.join_address()
    old = [
        NodeDaemon(tmp_path / f"old-{s}", *join, "--stage", str(s), prefix=checkouts[APART]) for s in (0, 1)
    ]
    new = [NodeDaemon(tmp_path / f"new-{s}", *join, "--stage", str(s)) for s in (0, 1)]
    for node in new:
        node.wait_for_event("version-apart", SLOW)
    steps = [node.step for node in (*old, *new)]
    rounds = [len(node.events("round")) for node in new]
    for node, step in zip((*old, *new), steps, strict=True):
        node.wait_for_step(step + 30, SLOW)
    for node, before in zip(new, rounds, strict=True):
        assert len(node.events("round")) > before
        assert len(node.events("version-apart")) == 1
        assert len(node.events("exchange-failed")) <= 1
        assert "Cannot average with" in node.output
    status = run_tool("status", "--join", seed.join_address())
    assert re.search(r"do(es)? not average with all\s+others, being of versions apart", status.stdout), (
        status.stdout
    )
    assert all(daemon.leave() == 0 for daemon in (*new, *old, seed))


@pytest.mark.parametrize("version", [FIRST, APART])
def test_an_earlier_versions_run_goes_on_from_its_directories(version: str, tmp_path: Path) -> None:
    seed = SeedDaemon(kept(version, "run", tmp_path))
    join = "--join", seed.join_address()
    nodes = [NodeDaemon(kept(version, f"node-{stage}", tmp_path), *join) for stage in (0, 1)]
    for node in nodes:
        assert int(node.wait_for_event("restored", SLOW)["step"]) > 100
        node.wait_for_step(int(node.wait_for_event("restored")["step"]) + 5, SLOW)
    out = tmp_path / "model"
    exported = run_tool("export", *join, "--out", str(out), patience=SLOW)
    assert exported.returncode == 0, exported.stdout + exported.stderr
    assert (out / "model.safetensors").exists()
    assert all(daemon.leave() == 0 for daemon in (*nodes, seed))


def test_a_run_with_a_removed_setting_names_the_version_that_trains_it(tmp_path: Path) -> None:
    seed = SeedDaemon(kept("088b778-drift", "run", tmp_path))
    node = NodeDaemon(kept("088b778-drift", "node-0", tmp_path), "--join", seed.join_address())
    assert node.process.wait(SLOW) == 2
    assert "This run trains with outer.drift_control = true" in node.output
    assert (node.state / "checkpoint.safetensors").read_bytes() == (
        VERSIONS / "088b778-drift" / "node-0" / "checkpoint.safetensors"
    ).read_bytes()
    assert seed.leave() == 0
