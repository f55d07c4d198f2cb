"""The program's own version: the order of versions, and the commit that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.rpc.compatibility import order_of
from protocol.version import commit_of_checkout


@pytest.mark.parametrize(
    ("version", "order"),
    [("1.2.3", (1, 2, 3)), ("0.2.0+g1234567", (0, 2, 0)), ("0.3.0.dev1", (0, 3, 0)), ("", ()), ("x", ())],
)
def test_versions_are_in_order(version: str, order: tuple[int, ...]) -> None:
    assert order_of(version) == order


def test_the_commit_of_a_checkout_is_found_on_a_branch_packed_detached_and_in_a_worktree(
    tmp_path: Path,
) -> None:
    commit, git = "0123456789" * 4, tmp_path / ".git"
    assert commit_of_checkout(tmp_path) == ""
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of_checkout(tmp_path) == ""
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert commit_of_checkout(tmp_path) == commit
    (git / "refs" / "heads" / "main").write_text("f" * 40 + "\n")
    assert commit_of_checkout(tmp_path) == "f" * 40
    (git / "worktrees" / "w").mkdir(parents=True)
    (git / "worktrees" / "w" / "HEAD").write_text(commit)
    (git / "worktrees" / "w" / "commondir").write_text("../..\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {git}/worktrees/w\n")
    assert commit_of_checkout(tmp_path / "w") == commit
    (git / "worktrees" / "w" / "HEAD").write_text("ref: refs/heads/main")
    assert commit_of_checkout(tmp_path / "w") == "f" * 40
    (git / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of_checkout(tmp_path) == ""
