"""Versions: of what peers say to each other, and of this program, with its commit where that is known."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

PROTOCOL = 1  # counted up when peers of the one before could not work with those of this one
MINOR = 7  # counted up with any change of what travels or is kept, see tests/versions
DISTRIBUTION = "noloco-node"
COMMIT_FILE = "commit.txt"  # beside this module, where whoever built an image wrote it
COMMIT = re.compile(r"[0-9a-f]{40}")
SHOWN = 7  # digits of a commit


@cache
def own_version() -> str:
    """ "0.2.0+g1234567", or without a commit "0.2.0"; empty for a copy that was not installed."""
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
    commit = _commit_of(found)
    return f"{found.version}+g{commit[:SHOWN]}" if commit else found.version


def _commit_of(found: Distribution) -> str:
    """The commit that was installed: of an image, of `pip install git+…`, or of the checkout that this runs from."""
    with suppress(OSError):
        told = files("protocol").joinpath(COMMIT_FILE).read_text(encoding="utf-8").strip()
        if COMMIT.fullmatch(told):
            return told
    with suppress(ValueError, AttributeError, TypeError):
        came_from = json.loads(found.read_text("direct_url.json") or "{}")
        if COMMIT.fullmatch(told := str(came_from.get("vcs_info", {}).get("commit_id", ""))):
            return told
    return commit_of_checkout(Path(__file__).resolve().parent.parent)


def commit_of_checkout(folder: Path) -> str:
    """The commit that is checked out in a folder, or one of its worktrees; empty if it is no checkout of git's."""
    git = folder / ".git"
    try:
        if git.is_file():
            git = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head if COMMIT.fullmatch(head) else ""
        branch, common = head.removeprefix("ref: "), git
        if (git / "commondir").is_file():
            common = git / (git / "commondir").read_text(encoding="utf-8").strip()
        if (common / branch).is_file():
            told = (common / branch).read_text(encoding="utf-8").strip()
            return told if COMMIT.fullmatch(told) else ""
        for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {branch}") and COMMIT.fullmatch(line[:40]):
                return line[:40]
    except (OSError, UnicodeDecodeError):
        pass
    return ""
